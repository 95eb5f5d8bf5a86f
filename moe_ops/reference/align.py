"""Reference of the alignment operators."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import pad

from moe_ops.dispatch.row_tiles import expert_rule, tile_rule
from moe_ops.dispatch.tiles import TileRule, one_row_tile, plan_sizes, row_tile
from moe_ops.reference.slots import local_experts, slots_by_expert
from moe_ops.tensors import TilePlan

Groups = Sequence[tuple[int, Sequence[int]]]
"""Experts with their rows."""


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
    num_slots = topk_ids.numel()
    sizes = plan_sizes(num_slots, num_experts, rule, pad_to)
    bucket_map = expert_map if ignore_invalid_experts else None
    groups = slots_by_expert(topk_ids, bucket_map, num_experts)
    rows, experts = _tiles(groups, block_size, num_slots)
    if expert_map is not None and bucket_map is None:
        names = expert_map.tolist()
        experts = [names[e] if -(2**31) <= names[e] < 2**31 else -1 for e in experts]
    used = array("i", [len(rows)])
    parts = _filled(rows, sizes.rows, num_slots), _filled(experts, sizes.tiles, -1), used
    return TilePlan(*(topk_ids.new_tensor(part, dtype=torch.int32) for part in parts))


def plan_slots(
    topk_ids: Tensor,
    expert_map: Tensor | None,
    num_experts: int,
    scheme: str,
    dtype: torch.dtype,
    batch_invariant: bool = False,
) -> Tensor:
    """Plan in one tensor: `moe_align_block_size` of the slots of local experts."""
    rule = tile_rule(scheme, dtype, topk_ids.device, batch_invariant, expert_map)
    groups = slots_by_expert(topk_ids, expert_map, num_experts)
    starts = accumulate((len(slots) for _, slots in groups), initial=0)
    return _plan(groups, list(starts), topk_ids.numel(), num_experts, rule, topk_ids.device)


def count_expert_num_tokens(
    topk_ids: Tensor, expert_map: Tensor | None, num_local_experts: int
) -> Tensor:
    """Number of slots of each local expert."""
    bucket = local_experts(topk_ids, expert_map, num_local_experts)
    return torch.bincount(bucket[bucket >= 0], minlength=num_local_experts).to(torch.int32)


def adapter_ids(
    topk_ids: Tensor,
    expert_map: Tensor | None,
    lora_ids: Tensor | None,
    num_experts: int,
    num_adapters: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Each slot's pair of adapter and expert, its adapter, and the token's adapter; -1: none."""
    expert = local_experts(topk_ids, expert_map, num_experts).view(topk_ids.shape)
    adapter, valid = torch.zeros_like(expert), expert >= 0
    if lora_ids is not None:
        adapter = adapter + lora_ids.long()[:, None]
        valid &= (adapter >= 0) & (adapter < num_adapters)
    pairs, adapters = (
        torch.where(valid, x, -1).to(torch.int32) for x in (adapter * num_experts + expert, adapter)
    )
    tokens = pad(adapters, (0, 1), value=-1).amax(1, keepdim=True)
    return pairs, adapters, tokens


def plan_batched(
    expert_num_tokens: Tensor, max_num_tokens: int, scheme: str, batch_invariant: bool = False
) -> Tensor:
    """Plan for batched rows: the rows of expert e begin at ``e * max_num_tokens``."""
    rule = expert_rule(scheme, expert_num_tokens.device, batch_invariant)
    counts = expert_num_tokens.long().clamp(0, max_num_tokens).tolist()
    starts = [expert * max_num_tokens for expert in range(len(counts))]
    return _contiguous_plan(
        starts, counts, len(counts) * max_num_tokens, rule, expert_num_tokens.device
    )


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
    device = expert_first_token_offset.device
    return _contiguous_plan(offset[:-1].tolist(), counts.tolist(), num_rows, rule, device)


def _contiguous_plan(
    starts: list[int], counts: list[int], num_rows: int, rule: TileRule, device: torch.device
) -> Tensor:
    """The plan of experts whose rows are contiguous: ``counts[e]`` from ``starts[e]`` on."""
    spans = [range(start, start + count) for start, count in zip(starts, counts, strict=True)]
    return _plan(list(enumerate(spans)), starts, num_rows, len(starts), rule, device)


def _plan(
    groups: Groups,
    starts: list[int],
    num_rows: int,
    num_experts: int,
    rule: TileRule,
    device: torch.device,
) -> Tensor:
    """Plan in one tensor: see `PlanSizes`. ``starts``: the first permuted row of each group."""
    sizes, tile = plan_sizes(num_rows, num_experts, rule), row_tile(rule, num_rows, num_experts)
    rows, experts = _tiles(groups, tile, num_rows)
    firsts: list[int] = []
    for start, (_, group) in zip(starts, groups, strict=False):
        firsts += range(start, start + len(group), tile)
    plan = array("i", (len(rows), sizes.experts_at, sizes.firsts_at, 0))
    plan += _filled(rows, sizes.rows, num_rows)
    plan += _filled(experts, sizes.tiles, -1)
    plan += _filled(firsts, sizes.tiles, -1)
    return torch.frombuffer(plan, dtype=torch.int32).to(device)


def _tiles(groups: Groups, tile: int, pad: int) -> tuple[list[int], list[int]]:
    """The rows of each group, padded to whole tiles, and the expert of each tile."""
    rows: list[int] = []
    experts: list[int] = []
    for expert, group in groups:
        rows += [*group, *[pad] * (-len(group) % tile)]
        experts += [expert] * -(-len(group) // tile)
    return rows, experts


def _filled(entries: list[int], size: int, rest: int) -> array[int]:
    """``entries`` and then ``rest``, ``size`` numbers in total."""
    return array("i", entries) + array("i", [rest]) * (size - len(entries))
