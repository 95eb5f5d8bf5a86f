"""The loop shared by the references of all expert GEMMs: one product per expert that has rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moe_ops.activation import formula
from moe_ops.dispatch.tiles import TileRule
from moe_ops.reference.activation import apply, split
from moe_ops.reference.slots import LINE, planned_rows, present_rows, take
from moe_ops.tensors import AnyTiles

Product = Callable[[int, Sequence[Tensor], Tensor], None]
"""``product(expert, rows, out)`` writes ``rows[0] @ w[expert].T`` to ``out``, of `Columns.dtype`.

``rows`` are the expert's rows of each of the inputs."""


class Columns(NamedTuple):
    """The results of a slot, and which experts have any."""

    n: int
    """Columns of a product."""
    num_experts: int
    """El."""
    rows: Tensor | None = None
    """int32 ``(El,)``: the row of each expert in the weight, which lacks others (-1); None: expert
    e is row e."""
    dtype: torch.dtype = torch.float32
    """Dtype of the products; another one if nothing follows them."""


class Epilogue(NamedTuple):
    """What follows the products, in float32: router weights, then the bias, then the activation."""

    bias: Tensor | None
    """``(El, n)``."""
    topk_weights: Tensor | None = None
    """One per slot."""
    activation: str = ""
    """Key of f; empty: no activation."""
    product: Tensor | None = None
    """Where the rows before the activation are written, in slot order; None: nowhere."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing follows."""
        return self.bias is self.topk_weights is self.product is None and not self.activation


def grouped(
    product: Product,
    inputs: Sequence[Tensor],
    columns: Columns,
    tiles: AnyTiles,
    rule: TileRule,
    top_k: int,
    dtype: torch.dtype,
    then: Epilogue,
    *,
    permuted: str | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """``out[s] = f(topk_weights[s] * product + bias[e])`` in float32, rounded once.

    Rows of skipped slots are zeros; with ``out`` they stay as they are.

    Args:
        product: see `Product`.
        inputs: the rows ``a``, and other tensors with a row for each of them.
        columns: what the weight has.
        tiles: plan, ``topk_ids`` and expert map.
        rule: the rule by which the row tile of the plan was chosen.
        top_k: slots per row of ``a``.
        dtype: dtype of the result.
        then: what follows the products.
        permuted: which of ``"a"`` and ``"out"`` has permuted rows, if any.
        out: the tensor to write to; None: a new one.
    """
    num_slots = inputs[0].shape[0] * top_k
    by_slot = _begin_lines(inputs[0], columns)
    planned = planned_rows(tiles, rule, num_slots, columns.num_experts, by_slot)
    slots, experts, counts, between, in_order = present_rows(planned, columns.rows)
    if in_order:
        sources = [_for_slots(x, top_k) for x in inputs]
    else:
        source = between if permuted == "a" else slots // top_k
        sources = [take(x, source) for x in inputs]
    rows = torch.empty((len(slots), columns.n), dtype=columns.dtype, device=inputs[0].device)
    parts = rows.split_with_sizes(counts)
    taken = [x.split_with_sizes(counts) for x in sources]
    for expert, part, *mine in zip(experts, parts, *taken, strict=True):
        product(expert, mine, part)
    if then.topk_weights is not None:
        rows *= then.topk_weights.flatten()[slots, None].float()
    if then.bias is not None:
        for expert, part in zip(experts, parts, strict=True):
            part += then.bias[expert].float()
    if then.product is not None:
        then.product.index_copy_(0, slots, rows.to(dtype))
    if then.activation:
        applied = formula(then.activation)
        rows = apply(*split(rows, applied), applied)
    rows, places = rows.to(dtype), between if permuted == "out" else slots
    if out is None and (in_order or (isinstance(places, slice) and len(rows) == num_slots)):
        return rows
    result = rows.new_zeros((num_slots, rows.shape[1])) if out is None else out
    if isinstance(places, slice):
        result[places] = rows
        return result
    return result.index_copy_(0, places, rows)


def _begin_lines(a: Tensor, columns: Columns) -> bool:
    """Whether all rows begin at cache lines, in any order: BLAS sums by where a row begins."""
    widths = a.shape[1] * a.dtype.itemsize, columns.n * columns.dtype.itemsize
    whole = all(width % LINE == 0 for width in widths)
    return whole and a.is_contiguous() and a.data_ptr() % LINE == 0


def _for_slots(x: Tensor, top_k: int) -> Tensor:
    """The row of each slot, in slot order: a view of one row, or with one slot a row."""
    return x if top_k == 1 else x.unsqueeze(1).expand(-1, top_k, -1).flatten(0, 1)
