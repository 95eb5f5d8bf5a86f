"""Outputs of the alignment operators."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

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
    pad_to = max(row_tiles) if pad_sorted_ids else 1
    return _plan(topk_ids, num_slots, num_experts, row_tiles, pad_to)


def count_expert_num_tokens(
    topk_ids: Tensor, expert_map: Tensor | None, num_local_experts: int
) -> Tensor:
    """``(El,)`` int32."""
    return topk_ids.new_empty(num_local_experts, dtype=torch.int32)


def align_batched(
    expert_num_tokens: Tensor, max_num_tokens: int, row_tiles: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """A plan for ``El * max_num_tokens`` rows."""
    num_experts = expert_num_tokens.shape[0]
    return _plan(expert_num_tokens, num_experts * max_num_tokens, num_experts, row_tiles)


def align_permuted(
    expert_first_token_offset: Tensor, num_rows: int, row_tiles: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """A plan for ``num_rows`` rows."""
    num_experts = expert_first_token_offset.shape[0] - 1
    return _plan(expert_first_token_offset, num_rows, num_experts, row_tiles)


def _plan(
    like: Tensor, num_slots: int, num_experts: int, row_tiles: Sequence[int], pad_to: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    known = isinstance(num_slots, int) and isinstance(num_experts, int)
    sizes = _sizes if known else _sizes.__wrapped__  # symbolic sizes cannot be looked up
    rows, tiles = sizes(num_slots, num_experts, tuple(row_tiles), pad_to)
    sorted_token_ids = like.new_empty(rows, dtype=torch.int32)
    return sorted_token_ids, sorted_token_ids.new_empty(tiles), sorted_token_ids.new_empty(1)


@lru_cache(maxsize=4096)
def _sizes(
    num_slots: int, num_experts: int, row_tiles: tuple[int, ...], pad_to: int
) -> tuple[int, int]:
    """Rows and tiles of a plan."""
    rows = cdiv(padded_slots(num_slots, num_experts, row_tiles), pad_to) * pad_to
    return rows, num_tiles(num_slots, num_experts, row_tiles)
