"""Outputs of the alignment operators."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_ops.tiles import plan_sizes


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
    pad_to = max(row_tiles) if pad_sorted_ids else 1
    rows, tiles = plan_sizes(num_slots, num_experts, row_tiles, pad_to)
    sorted_token_ids = topk_ids.new_empty(rows, dtype=torch.int32)
    return sorted_token_ids, sorted_token_ids.new_empty(tiles), sorted_token_ids.new_empty(1)


def plan_slots(
    topk_ids: Tensor, expert_map: Tensor | None, row_tiles: Sequence[int], num_experts: int
) -> Tensor:
    """A plan for the slots of a routing."""
    return _plan(topk_ids, topk_ids.shape[0] * topk_ids.shape[1], num_experts, row_tiles)


def count_expert_num_tokens(
    topk_ids: Tensor, expert_map: Tensor | None, num_local_experts: int
) -> Tensor:
    """``(El,)`` int32."""
    return topk_ids.new_empty(num_local_experts, dtype=torch.int32)


def plan_batched(
    expert_num_tokens: Tensor, max_num_tokens: int, row_tiles: Sequence[int]
) -> Tensor:
    """A plan for ``El * max_num_tokens`` rows."""
    num_experts = expert_num_tokens.shape[0]
    return _plan(expert_num_tokens, num_experts * max_num_tokens, num_experts, row_tiles)


def plan_permuted(
    expert_first_token_offset: Tensor, num_rows: int, row_tiles: Sequence[int]
) -> Tensor:
    """A plan for ``num_rows`` rows."""
    num_experts = expert_first_token_offset.shape[0] - 1
    return _plan(expert_first_token_offset, num_rows, num_experts, row_tiles)


def _plan(like: Tensor, num_slots: int, num_experts: int, row_tiles: Sequence[int]) -> Tensor:
    entries = plan_sizes(num_slots, num_experts, row_tiles).entries
    return like.new_empty(entries, dtype=torch.int32)
