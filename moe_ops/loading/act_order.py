"""Act-order: weights whose columns belong to groups in any order.

GPTQ and compressed-tensors store ``g_idx`` with such a weight: column k has the scale and the zero
point of group ``g_idx[k]``. A layer stores the columns of a group side by side. So columns are
sorted by group when they are loaded, and their input takes the same order, which leaves every
product as it was.

* The input of ``w2`` consists of the rows of gate and up. These rows are sorted when they are
  loaded, before ranks cut them: nothing is left to do later.
* The input of gate and up is the tokens. The layer keeps the order of the columns, and reads
  tokens in this order: see `moe_ops.layer.FusedMoEMethodBase.apply`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeGuard

import torch
from torch import Tensor

from moe_ops.loading.compressed import INTEGERS
from moe_ops.loading.stored import Form
from moe_ops.scheme import Quant
from moe_ops.scheme.formats import join_nibbles, split_nibbles


class ActOrder:
    """The orders of columns that the tensors of a checkpoint give; false if there are none.

    Shared experts that are side by side have the same orders: of their common tensors.
    """

    def __init__(self) -> None:
        self.columns: dict[tuple[int, str], Tensor] = {}
        """For each expert and projection, the order in which its columns are to be stored."""
        self._inputs: dict[int, Tensor] = {}

    def __bool__(self) -> bool:
        return bool(self.columns or self._inputs)

    def note(self, expert: int, shard: str, g_idx: Tensor, form: Form) -> None:
        """Note the groups of a projection's columns.

        Raises:
            ValueError: groups of other sizes than the scheme's.
        """
        order = column_order(g_idx, form)
        if order is not None:
            shards = ("w1", "w3") if shard == "w13" else (shard,)
            self.columns |= dict.fromkeys(((expert, shard) for shard in shards), order)

    def note_input(self, expert: int, order: Tensor) -> None:
        """Note the order of the tokens' columns of a saved layer, whose weights are sorted."""
        if not torch.equal(order.sort().values, torch.arange(len(order), device=order.device)):
            raise ValueError(f"expert {expert}: numbers must be a permutation of 0..H-1")
        self._inputs[expert] = order.long()

    def ordered(self, x: Tensor, kind: str, expert: int, shard: str, form: Form) -> Tensor:
        """Sort the rows and columns of a projection's canonical tensor."""
        if x.dim() == 0:
            return x
        columns, rows = self.columns.get((expert, shard)), None
        if shard != "w2":
            rows = self.columns.get((expert, "w2"))
        if kind == "weight" and columns is not None:
            columns = columns.to(x.device)
            pairs = form.quant is not None and form.quant.element.values_per_byte == 2
            x = join_nibbles(split_nibbles(x, 1)[:, columns], 1) if pairs else x[:, columns]
        return x if rows is None else x[rows.to(x.device)]

    def input_order(
        self,
        rows: Mapping[int, Sequence[int]],
        hidden_size: int,
        device: torch.device,
        *,
        is_gated: bool,
    ) -> Tensor | None:
        """The order in which each row of ``w13_weight`` takes the columns of the tokens.

        Args:
            rows: the rows of this rank's parameters that hold each expert.
            hidden_size: H of the parameters.
            device: where the result is.
            is_gated: whether experts have a gate projection.

        Returns:
            int32 ``(El, H)``; ``(1, H)`` if all rows have the same order; None if all columns are
            in the order of the tokens.

        Raises:
            NotImplementedError: gate and up of an expert have different orders.
        """
        wanted = {e: self._input(e, is_gated=is_gated) for e, held in rows.items() if held}
        if all(order is None for order in wanted.values()):
            return None
        plain = torch.arange(hidden_size, dtype=torch.int32, device=device)
        orders = plain.repeat(sum(map(len, rows.values())), 1)
        for expert, order in wanted.items():
            if order is not None:
                orders[rows[expert], : len(order)] = order.int().to(device)
        return orders[:1].clone() if bool((orders == orders[:1]).all()) else orders

    def _input(self, expert: int, *, is_gated: bool) -> Tensor | None:
        gate = self.columns.get((expert, "w1"))
        up = self.columns.get((expert, "w3")) if is_gated else gate
        same = gate is up or (gate is not None and up is not None and torch.equal(gate, up))
        if not same:
            raise NotImplementedError(
                f"g_idx of the gate and up projections of expert {expert} must be equal (they have "
                "the same input), got two orders of columns: quantize without act-order, or with "
                "static groups"
            )
        return self._inputs.get(expert, gate)


def sortable(quant: Quant | None) -> TypeGuard[Quant]:
    """Whether tools quantize such a weight in act-order: groups of columns, of integers only."""
    return quant is not None and quant.local and quant.element.name in INTEGERS


def column_order(g_idx: Tensor, form: Form) -> Tensor | None:
    """Return columns sorted by their groups, int64 ``(K,)``; None if they are sorted already.

    Negative groups mean that none were chosen (compressed-tensors).
    """
    if g_idx.numel() != form.k:
        raise ValueError(f"shape must be {(form.k,)}, got {tuple(g_idx.shape)}")
    groups, quant = g_idx.flatten().long(), form.quant
    each = quant.group.cols if sortable(quant) else form.k
    plain = torch.arange(form.k, device=groups.device) // each
    if torch.equal(groups, plain) or bool((groups < 0).all()):
        return None
    order = groups.argsort(stable=True)
    if not torch.equal(groups[order], plain):
        raise ValueError(f"groups must be 0, 1, .. of {each} columns each, got others")
    return order
