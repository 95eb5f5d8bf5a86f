"""Outputs of the alignment operators."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_ops.tiles import cdiv, num_tiles, padded_slots


def moe_align_block_size(
    topk_ids: Tensor,
    expert_map: Tensor | None,
    row_tiles: Sequence[int],
    num_experts: int,
    pad_sorted_ids: bool,
    ignore_invalid_experts: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The three int32 vectors of a plan, as long as any of ``row_tiles`` may need."""
    num_slots = topk_ids.shape[0] * topk_ids.shape[1]
    rows = padded_slots(num_slots, num_experts, row_tiles)
    tiles = num_tiles(num_slots, num_experts, row_tiles)
    if pad_sorted_ids:
        rows = cdiv(rows, max(row_tiles)) * max(row_tiles)
    return (
        topk_ids.new_empty(rows, dtype=torch.int32),
        topk_ids.new_empty(tiles, dtype=torch.int32),
        topk_ids.new_empty(1, dtype=torch.int32),
    )


def count_expert_num_tokens(
    topk_ids: Tensor, expert_map: Tensor | None, num_local_experts: int
) -> Tensor:
    """``(El,)`` int32."""
    return topk_ids.new_empty(num_local_experts, dtype=torch.int32)
