"""Where the rows between two GEMMs lie, and how they are activated and quantized there.

The expert GEMMs follow a tile plan and know nothing of formats: slots in token order, the padded
rows of each expert, and permuted rows differ in the plan, and in which rows hold anything.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe_ops import ops
from moe_ops.scheme import UNQUANTIZED, Quant, Scheme
from moe_ops.tensors import Rows
from moe_ops.tuned import default_row_tiles, device_name, row_tiles


def row_tiles_of(scheme: Scheme, w2: Tensor | None = None) -> tuple[int, ...]:
    """The row tiles that the plan and the GEMMs of a scheme choose from.

    Those that were timed for layers of the sizes of ``w2``, where there are any.
    """
    if w2 is None:
        return default_row_tiles(scheme)
    num_experts, hidden, width = w2.shape
    if scheme.weight is not None and scheme.weight.element.packed:
        width *= 2
    return row_tiles(scheme, (num_experts, width, hidden), device_name(w2.device))


class SlotRows(NamedTuple):
    """Row ``t * k + j`` is slot j of token t; the rows of skipped slots hold anything."""

    plan: tuple[Tensor, Tensor, Tensor]
    row_tiles: tuple[int, ...]
    topk_ids: Tensor
    expert_map: Tensor | None
    num_local_experts: int

    @staticmethod
    def of(
        topk_ids: Tensor,
        expert_map: Tensor | None,
        num_local_experts: int,
        scheme: Scheme = UNQUANTIZED,
        plan: tuple[Tensor, Tensor, Tensor] | None = None,
        w2: Tensor | None = None,
    ) -> SlotRows:
        """The space of a routing: local experts only, tiles picked by the op.

        With its plan, or one that `topk_align` has made for the same row tiles.
        """
        tiles, local = row_tiles_of(scheme, w2), num_local_experts
        if plan is None:
            plan = ops.moe_align_block_size(topk_ids, expert_map, tiles, local, False, True)
        return SlotRows(plan, tiles, topk_ids, expert_map, num_local_experts)

    def quantize(self, x: Tensor, scale: Tensor | None, quant: Quant) -> Rows:
        """The rows of slots that are not skipped; the others become zeros."""
        slots = (self.topk_ids, self.expert_map, self.num_local_experts)
        return Rows(*ops.moe_quantize(x, scale, None, *slots, quant.key))

    def activate(self, x: Tensor, activation: str) -> Tensor:
        """Every row."""
        return ops.activation(x, activation)

    def activate_quantize(
        self, x: Tensor, scale: Tensor | None, activation: str, quant: Quant
    ) -> Rows:
        """Activated, rounded to the dtype of ``x``, quantized."""
        slots = (self.topk_ids, self.expert_map, self.num_local_experts)
        return Rows(*ops.activation_quantize(x, scale, *slots, activation, quant.key))


class BatchedRows(NamedTuple):
    """Row ``e * M + i`` is the i-th of expert e; those past its count hold anything."""

    plan: tuple[Tensor, Tensor, Tensor]
    row_tiles: tuple[int, ...]
    expert_num_tokens: Tensor
    max_num_tokens: int

    @staticmethod
    def of(expert_num_tokens: Tensor, max_num_tokens: int, scheme: Scheme) -> BatchedRows:
        """The space of ``(El, M, ..)`` tensors, with its plan."""
        tiles = row_tiles_of(scheme)
        plan = ops.align_batched(expert_num_tokens, max_num_tokens, tiles)
        return BatchedRows(plan, tiles, expert_num_tokens, max_num_tokens)

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


def permuted_rows(expert_first_token_offset: Tensor, num_rows: int, scheme: Scheme) -> BatchedRows:
    """The space of permuted rows: those in use come first, so it is one expert's to quantize."""
    tiles = row_tiles_of(scheme)
    plan = ops.align_permuted(expert_first_token_offset, num_rows, tiles)
    # The last offset, as the largest: torch 2.11's Inductor cannot slice a symbolic number of them.
    used = expert_first_token_offset.amax(0, keepdim=True).to(torch.int32)
    return BatchedRows(plan, tiles, used, num_rows)


def _flat(quantized: tuple[Tensor, Tensor]) -> Rows:
    """``(E, M, ..)`` as rows; one scale an expert stays ``(E, 1)``."""
    data, scale = quantized
    return Rows(data.flatten(0, 1), scale.flatten(0, 1))
