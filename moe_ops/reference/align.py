"""Reference of the alignment operators."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops.dispatch.row_tiles import expert_rule, tile_rule
from moe_ops.dispatch.tile_plan import unpack_plan
from moe_ops.dispatch.tiles import PLAN_HEADER, TileRule, cdiv, one_row_tile, plan_sizes, row_tile
from moe_ops.reference.slots import local_experts
from moe_ops.tensors import TilePlan


def moe_align_block_size(
    topk_ids: Tensor,
    expert_map: Tensor | None,
    block_size: int,
    num_experts: int,
    pad_sorted_ids: bool,
    ignore_invalid_experts: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the slots by expert, stably, with each expert's group padded to whole tiles."""
    rule, pad_to = one_row_tile(block_size), block_size if pad_sorted_ids else 1
    rows, tiles, *_ = plan_sizes(topk_ids.numel(), num_experts, rule, pad_to)
    plan = TilePlan(*(_empty(topk_ids, entries) for entries in (rows, tiles, 1)))
    bucket_map, names = (expert_map, None) if ignore_invalid_experts else (None, expert_map)
    _fill_slots(plan, topk_ids, bucket_map, names, block_size, num_experts)
    return plan


def plan_slots(
    topk_ids: Tensor,
    expert_map: Tensor | None,
    num_experts: int,
    scheme: str,
    dtype: torch.dtype,
    batch_invariant: bool = False,
) -> Tensor:
    """Plan in one tensor: `moe_align_block_size` of the slots of local experts."""
    rule = tile_rule(scheme, dtype, topk_ids.device, batch_invariant)
    num_slots = topk_ids.numel()
    plan = _empty(topk_ids, plan_sizes(num_slots, num_experts, rule).entries)
    parts, tile = (
        unpack_plan(plan, num_slots, num_experts, rule),
        row_tile(rule, num_slots, num_experts),
    )
    counts = _fill_slots(parts, topk_ids, expert_map, None, tile, num_experts)
    _fill_rest(plan, counts.cumsum(0) - counts, counts, num_slots, rule)
    return plan


def _empty(like: Tensor, entries: int) -> Tensor:
    return like.new_empty(entries, dtype=torch.int32)


def _fill_rest(
    plan: Tensor, starts: Tensor, counts: Tensor, num_slots: int, rule: TileRule
) -> None:
    """Write the parts that only a plan in one tensor has: the header and the tiles' first rows.

    The permuted rows of expert e begin at ``starts[e]``.
    """
    sizes = plan_sizes(num_slots, len(counts), rule)
    plan[1:PLAN_HEADER] = plan.new_tensor((sizes.experts_at, sizes.firsts_at, 0))
    tile = row_tile(rule, num_slots, len(counts))
    tiles = cdiv(counts, tile)
    # starts[e] less the padded rows before expert e: tile i of the plan begins at origin + i * tile
    origin = (starts - (tiles.cumsum(0) - tiles) * tile).repeat_interleave(tiles)
    firsts = plan[sizes.firsts_at :]
    firsts.fill_(-1)
    firsts[: len(origin)] = origin + torch.arange(len(origin), device=plan.device) * tile


def _fill_slots(
    plan: TilePlan,
    topk_ids: Tensor,
    bucket_map: Tensor | None,
    names: Tensor | None,
    tile: int,
    num_experts: int,
) -> Tensor:
    """Write the plan of slots sorted by bucket, and return the number of slots per bucket.

    The bucket of a slot is its id mapped by ``bucket_map``. ``names[b]`` is written as the expert
    id of bucket b (None: b itself).
    """
    num_slots = topk_ids.numel()
    bucket = local_experts(topk_ids, bucket_map, num_experts)
    bucket = torch.where(bucket < 0, num_experts, bucket)
    order = torch.argsort(bucket, stable=True)
    counts = torch.bincount(bucket, minlength=num_experts + 1)[:num_experts]
    names = torch.arange(num_experts, device=topk_ids.device) if names is None else names.long()
    names = torch.where(names == names.to(torch.int32), names, -1)
    _fill(plan, tile, order, counts, names, num_slots)
    return counts


def count_expert_num_tokens(
    topk_ids: Tensor, expert_map: Tensor | None, num_local_experts: int
) -> Tensor:
    """Number of slots of each local expert."""
    bucket = local_experts(topk_ids, expert_map, num_local_experts)
    return torch.bincount(bucket[bucket >= 0], minlength=num_local_experts).to(torch.int32)


def plan_batched(
    expert_num_tokens: Tensor, max_num_tokens: int, scheme: str, batch_invariant: bool = False
) -> Tensor:
    """Plan for batched rows: the rows of expert e begin at ``e * max_num_tokens``."""
    rule = expert_rule(scheme, expert_num_tokens.device, batch_invariant)
    counts = expert_num_tokens.long().clamp(0, max_num_tokens)
    starts = torch.arange(len(counts), device=counts.device) * max_num_tokens
    return _spans(starts, counts, len(counts) * max_num_tokens, rule)


def plan_permuted(
    expert_first_token_offset: Tensor, num_rows: int, scheme: str, batch_invariant: bool = False
) -> Tensor:
    """Plan for permuted rows: expert e has the rows ``offset[e]`` to ``offset[e + 1] - 1``.

    Offsets are clamped to the number of rows, and counts to the rows that earlier experts leave.
    """
    rule = expert_rule(scheme, expert_first_token_offset.device, batch_invariant)
    offset = expert_first_token_offset.long().clamp(0, num_rows)
    counts = offset.diff().clamp(min=0)
    counts = counts.minimum((num_rows - (counts.cumsum(0) - counts)).clamp(min=0))
    return _spans(offset[:-1], counts, num_rows, rule)


def _spans(starts: Tensor, counts: Tensor, num_rows: int, rule: TileRule) -> Tensor:
    """The plan of experts whose rows are contiguous: ``counts[e]`` from ``starts[e]`` on."""
    plan = _empty(counts, plan_sizes(num_rows, len(counts), rule).entries)
    gaps = starts - (counts.cumsum(0) - counts)
    rows = torch.arange(int(counts.sum()), device=counts.device) + gaps.repeat_interleave(counts)
    tile = row_tile(rule, num_rows, len(counts))
    names = torch.arange(len(counts), device=counts.device)
    parts = unpack_plan(plan, num_rows, len(counts), rule)
    _fill(parts, tile, rows, counts, names, num_rows)
    _fill_rest(plan, starts, counts, num_rows, rule)
    return plan


def _fill(
    plan: TilePlan, tile: int, order: Tensor, counts: Tensor, names: Tensor, pad: int
) -> None:
    """Write ``order`` in groups of ``counts``, padded to the tile, with ``names`` as expert ids."""
    sorted_token_ids, expert_ids, num_tokens_post_padded = plan
    tiles = cdiv(counts, tile)
    used_rows, used_tiles = torch.stack((counts.sum(), tiles.sum())).tolist()
    # A row moves down by the padding of all groups before its own.
    padding = tiles * tile - counts
    moved = (padding.cumsum(0) - padding).repeat_interleave(counts, output_size=used_rows)
    row = torch.arange(used_rows, device=order.device) + moved
    sorted_token_ids.fill_(pad)
    sorted_token_ids[row] = order[:used_rows].to(torch.int32)
    expert_ids.fill_(-1)
    expert_ids[:used_tiles] = names.repeat_interleave(tiles, output_size=used_tiles).to(torch.int32)
    num_tokens_post_padded.fill_(used_tiles * tile)
