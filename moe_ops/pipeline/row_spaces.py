"""Where the rows between two GEMMs lie, and how they are activated and quantized there.

The expert GEMMs follow a tile plan and know nothing of formats: slots in token order, the padded
rows of each expert, and permuted rows differ in the plan, and in which rows hold anything.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe_ops import ops
from moe_ops.dispatch.device import name_and_arch
from moe_ops.dispatch.hopper import plans_for
from moe_ops.dispatch.tiles import INVARIANT_ROW_TILES, is_direct
from moe_ops.dispatch.tuned import row_tiles
from moe_ops.dispatch.tuned_file import default_row_tiles
from moe_ops.scheme import Quant, Scheme
from moe_ops.tensors import Routing, Rows, Tiles

RowTiles = tuple[int, ...]


def row_tiles_of(
    scheme: Scheme, w2: Tensor | None = None, batch_invariant: bool = False
) -> RowTiles:
    """The row tiles that the plan and the GEMMs of a scheme choose from.

    Those that were timed for layers of the sizes of ``w2``, where there are any; one tile for a
    result that is ``batch_invariant``.

    Raises:
        NotImplementedError: ``batch_invariant`` with a scheme that cannot be.
    """
    if batch_invariant:
        check_batch_invariant(scheme)
        return INVARIANT_ROW_TILES
    if w2 is None:
        return default_row_tiles(scheme)
    num_experts, hidden, width = w2.shape
    if scheme.weight is not None and scheme.weight.element.packed:
        width *= 2
    sizes = (num_experts, width, hidden)
    return row_tiles_of_sizes(scheme, sizes, w2.element_size(), w2.device)


def row_tiles_of_sizes(
    scheme: Scheme, sizes: tuple[int, int, int], itemsize: int, device: torch.device
) -> RowTiles:
    """The row tiles of a layer with ``(E, I, H)``.

    ``itemsize``: bytes of a number in a weight that is not quantized.
    """
    name, arch = name_and_arch(device)
    hopper = plans_for(scheme, arch, itemsize, sizes[1])
    return row_tiles(scheme, sizes, name, hopper=hopper)


def depends_on_batch(quant: Quant | None) -> bool:
    """Whether activations have one scale that comes from the rows of all tokens."""
    return quant is not None and quant.per_tensor and not quant.static


def check_batch_invariant(scheme: Scheme) -> None:
    """NotImplementedError for a scheme in which tokens depend on each other."""
    if depends_on_batch(scheme.activation):
        raise NotImplementedError(
            f"batch_invariant must be False for scheme {scheme.name}, whose activations share a "
            "scale that all tokens decide, got True; a scheme with static scales or with scales of "
            "rows or groups (fp8_tensor_static, fp8_channel, fp8_block128, int8_channel, ..) can"
        )


def always(condition) -> bool:
    """Whether a condition holds for all values of its symbols, without a guard on them."""
    if isinstance(condition, bool) and not torch.compiler.is_compiling():
        return condition
    return torch.fx.experimental.symbolic_shapes.statically_known_true(condition)


def sure(tokens: int) -> int:
    """Lower bound on the token count, for comparisons with `always`.

    A program that is exported for one token or more is traced as if there were two.
    """
    return tokens - 1 if torch.compiler.is_exporting() else tokens


class SlotRows(NamedTuple):
    """Row ``t * k + j`` is slot j of token t; the rows of skipped slots hold anything."""

    tiles: Tiles
    row_tiles: tuple[int, ...]
    num_local_experts: int
    expert_order: bool = False
    """Whether rows between the GEMMs lie in the order of the plan instead, for these to read."""

    @staticmethod
    def of(
        routing: Routing, num_local_experts: int, row_tiles: RowTiles, plan: Tensor | None = None
    ) -> SlotRows:
        """The space of a routing: local experts only, tiles picked by the op.

        With its plan, or one that `topk_plan` has made for the same row tiles; without one where
        nobody would read it.
        """
        _, ids, expert_map = routing
        direct = is_direct(ids.shape[0] * ids.shape[1], num_local_experts)
        if plan is None and not always(direct):
            plan = ops.plan_slots(ids, expert_map, row_tiles, num_local_experts)
        return SlotRows(Tiles(plan, ids, expert_map), row_tiles, num_local_experts)

    def quantize(self, x: Tensor, scale: Tensor | None, quant: Quant) -> Rows:
        """The rows of slots that are not skipped; the others become zeros."""
        slots = (*self.tiles[1:], self.num_local_experts)
        return Rows(*ops.moe_quantize(x, scale, None, *slots, quant.key))

    def activate(self, x: Tensor, activation: str) -> Tensor:
        """Every row."""
        return ops.activation(x, activation)

    def activate_quantize(
        self, x: Tensor, scale: Tensor | None, activation: str, quant: Quant
    ) -> Rows:
        """Activated, rounded to the dtype of ``x``, quantized."""
        slots = (*self.tiles[1:], self.num_local_experts)
        return Rows(*ops.activation_quantize(x, scale, *slots, activation, quant.key))


class BatchedRows(NamedTuple):
    """Row ``e * M + i`` is the i-th of expert e; those past its count hold anything."""

    tiles: Tiles
    row_tiles: tuple[int, ...]
    expert_num_tokens: Tensor
    max_num_tokens: int

    @property
    def expert_order(self) -> bool:
        """They lie by expert anyway."""
        return True

    @staticmethod
    def of(expert_num_tokens: Tensor, max_num_tokens: int, row_tiles: RowTiles) -> BatchedRows:
        """The space of ``(El, M, ..)`` tensors, with its plan."""
        plan = ops.plan_batched(expert_num_tokens, max_num_tokens, row_tiles)
        return BatchedRows(Tiles(plan), row_tiles, expert_num_tokens, max_num_tokens)

    def _batched(self, x: Tensor) -> Tensor:
        return x.view(self.expert_num_tokens.shape[0], self.max_num_tokens, x.shape[-1])

    def quantize(self, x: Tensor, scale: Tensor | None, quant: Quant) -> Rows:
        """The rows in use; padding becomes zeros."""
        count = self.expert_num_tokens
        return _flat(ops.batched_quantize(self._batched(x), scale, count, quant.key))

    def activate(self, x: Tensor, activation: str) -> Tensor:
        """The rows in use; padding becomes zeros."""
        return ops.batched_activation(self._batched(x), self.expert_num_tokens, activation).flatten(
            0, 1
        )

    def activate_quantize(
        self, x: Tensor, scale: Tensor | None, activation: str, quant: Quant
    ) -> Rows:
        """Activated, rounded to the dtype of ``x``, quantized."""
        count, x = self.expert_num_tokens, self._batched(x)
        return _flat(ops.batched_activation_quantize(x, scale, count, activation, quant.key))


def permuted_rows(
    expert_first_token_offset: Tensor, num_rows: int, row_tiles: RowTiles
) -> BatchedRows:
    """The space of permuted rows: those in use come first, so it is one expert's to quantize."""
    plan = ops.plan_permuted(expert_first_token_offset, num_rows, row_tiles)
    # The last offset, as the largest: torch 2.11's Inductor cannot slice a symbolic number of them.
    used = expert_first_token_offset.amax(0, keepdim=True).to(torch.int32)
    return BatchedRows(Tiles(plan), row_tiles, used, num_rows)


def _flat(quantized: tuple[Tensor, Tensor]) -> Rows:
    """``(E, M, ..)`` as rows; one scale an expert stays ``(E, 1)``."""
    data, scale = quantized
    return Rows(data.flatten(0, 1), scale.flatten(0, 1))
