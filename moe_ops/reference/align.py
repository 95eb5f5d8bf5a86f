"""Reference of the alignment operators."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_ops.fake_impls.align import moe_align_block_size as empty_plan
from moe_ops.reference.slots import local_experts
from moe_ops.tiles import cdiv, pick_row_tile


def moe_align_block_size(
    topk_ids: Tensor,
    expert_map: Tensor | None,
    row_tiles: Sequence[int],
    num_experts: int,
    pad_sorted_ids: bool,
    ignore_invalid_experts: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """A stable counting sort of the slots by expert, each group padded to the row tile."""
    plan = empty_plan(
        topk_ids, expert_map, row_tiles, num_experts, pad_sorted_ids, ignore_invalid_experts
    )
    sorted_token_ids, expert_ids, num_tokens_post_padded = plan
    num_slots = topk_ids.numel()
    tile = pick_row_tile(row_tiles, num_slots, num_experts)
    bucket = local_experts(topk_ids, expert_map if ignore_invalid_experts else None, num_experts)
    bucket = torch.where(bucket < 0, num_experts, bucket)
    order = torch.argsort(bucket, stable=True)
    counts = torch.bincount(bucket, minlength=num_experts + 1)[:num_experts]
    tiles = cdiv(counts, tile)
    used_slots, used_tiles = torch.stack((counts.sum(), tiles.sum())).tolist()

    # A slot moves down by the padding of the groups before its own.
    padding = tiles * tile - counts
    moved = (padding.cumsum(0) - padding).repeat_interleave(counts, output_size=used_slots)
    row = torch.arange(used_slots, device=topk_ids.device) + moved
    sorted_token_ids.fill_(num_slots)
    sorted_token_ids[row] = order[:used_slots].to(torch.int32)

    names = torch.arange(num_experts, device=topk_ids.device)
    if expert_map is not None and not ignore_invalid_experts:
        names = expert_map.long()
    expert_ids.fill_(-1)
    expert_ids[:used_tiles] = names.repeat_interleave(tiles, output_size=used_tiles)
    num_tokens_post_padded.fill_(used_tiles * tile)
    return plan


def count_expert_num_tokens(
    topk_ids: Tensor, expert_map: Tensor | None, num_local_experts: int
) -> Tensor:
    """How many slots each local expert has."""
    bucket = local_experts(topk_ids, expert_map, num_local_experts)
    return torch.bincount(bucket[bucket >= 0], minlength=num_local_experts).to(torch.int32)
