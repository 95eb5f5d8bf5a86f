"""Triton kernels of the alignment stage: a stable counting sort.

Few slots take one launch: every program reads all slots and places the slots of up to four experts.
Many slots take `counting_sort`. No two programs write the same entry, and the order never depends
on timing.

Kernels take either the three parts of a plan or ``(plan, None, None)``: see `plan_parts`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_ops.dispatch.row_tiles import expert_rule, tile_rule
from moe_ops.dispatch.tiles import (
    SINGLE_LAUNCH_SLOTS,
    Scan,
    TileRule,
    cdiv,
    is_direct,
    plan_sizes,
    row_tile,
    scan_sizes,
)
from moe_ops.fake_impls.align import adapter_ids as empty_adapters
from moe_ops.fake_impls.align import count_expert_num_tokens as empty_counts
from moe_ops.fake_impls.align import moe_align_block_size as empty_plan
from moe_ops.fake_impls.align import plan_batched as empty_batched
from moe_ops.fake_impls.align import plan_permuted as empty_permuted
from moe_ops.fake_impls.align import plan_slots as empty_plan_slots
from moe_ops.kernels._runtime.dependent import take_turn
from moe_ops.kernels._runtime.launch import Launch
from moe_ops.kernels._runtime.slots import (
    dense,
    dense_vectors,
    local_experts,
    map_size,
    next_power_of_2,
)
from moe_ops.kernels._sort.counting_sort import (
    Blocks,
    block_sizes,
    count_blocks,
    count_slots,
    sort_in_block,
)
from moe_ops.kernels._sort.plan import (
    as_name,
    finish_plan,
    name_tile,
    name_tiles,
    place_buckets,
    plan_parts,
    plan_programs,
)


@triton.jit(do_not_specialize=["num_slots", "first_expert"])
def _count_kernel(
    topk_ids, expert_map, table, num_slots, first_expert, num_experts, num_buckets, counts,
    BUCKETS: tl.constexpr, BLOCK: tl.constexpr, FEW: tl.constexpr,
    ACROSS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Program 0 stores the counts of all slots; the other programs do nothing."""
    take_turn()
    if tl.program_id(0) == 0:
        _, count, _, _ = count_slots(
            topk_ids, expert_map, table, num_slots, first_expert, num_experts, num_buckets,
            BUCKETS, BLOCK, FEW, ACROSS, ROWS,
        )  # fmt: skip
        bucket = tl.arange(0, BUCKETS)
        tl.store(counts + bucket, count, mask=bucket < num_buckets)


@lru_cache(maxsize=1024)
def _count_launch(sizes: Blocks) -> Launch:
    return Launch(_count_kernel, **sizes.constants())


def count_expert_num_tokens(
    topk_ids: Tensor, expert_map: Tensor | None, num_local_experts: int
) -> Tensor:
    """Launch one kernel for few slots, and two for many: count the blocks, add up the counts."""
    counts = empty_counts(topk_ids, expert_map, num_local_experts)
    sizes, grid, slots = count_blocks(topk_ids, expert_map, num_local_experts)
    _count_launch(sizes)(grid, *slots, counts)
    return counts


@triton.jit(do_not_specialize=["num_tokens", "num_experts", "num_local", "num_adapters"])
def _adapter_ids_kernel(
    topk_ids, expert_map, lora_ids, pairs, adapters, tokens,
    num_tokens, num_experts, num_local, num_adapters,
    TOP_K: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Each program takes ROWS tokens; a token's adapter is that of any of its slots."""
    take_turn()
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    slot = token[:, None] * TOP_K + column[None, :]
    real = (token < num_tokens)[:, None] & (column < TOP_K)[None, :]
    expert = local_experts(topk_ids, expert_map, slot, real, num_experts, num_local)
    adapter, valid = tl.zeros((ROWS, COLUMNS), tl.int32), expert >= 0
    if lora_ids is not None:
        of_token = tl.load(lora_ids + token, mask=token < num_tokens, other=-1)
        has_one = (of_token >= 0) & (of_token < num_adapters)
        adapter += tl.where(has_one, of_token, 0).to(tl.int32)[:, None]
        valid &= has_one[:, None]
    tl.store(pairs + slot, tl.where(valid, adapter * num_local + expert, -1), mask=real)
    adapter = tl.where(valid, adapter, -1)
    tl.store(adapters + slot, adapter, mask=real)
    tl.store(tokens + token, tl.max(adapter, 1), mask=token < num_tokens)


ADAPTER_SLOTS = 256
"""Slots of a program that looks adapters up."""


@lru_cache(maxsize=64)
def _adapter_launch(top_k: int) -> Launch:
    columns = next_power_of_2(max(1, top_k))
    rows = max(1, ADAPTER_SLOTS // columns)
    return Launch(_adapter_ids_kernel, TOP_K=top_k, COLUMNS=columns, ROWS=rows)


def adapter_ids(
    topk_ids: Tensor,
    expert_map: Tensor | None,
    lora_ids: Tensor | None,
    num_experts: int,
    num_adapters: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch one kernel, whose programs each take some tokens."""
    outs = empty_adapters(topk_ids, expert_map, lora_ids, num_experts, num_adapters)
    tokens, k = topk_ids.shape
    if tokens:
        launch, count = _adapter_launch(k), map_size(expert_map, num_experts)
        grid = (cdiv(tokens, launch.constants["ROWS"]),)
        vectors = dense_vectors(topk_ids, expert_map, lora_ids)
        launch(grid, *vectors, *outs, tokens, count, num_experts, num_adapters)
    return outs


@triton.jit(do_not_specialize=["num_slots", "num_rows", "num_tiles"])
def _align_kernel(
    topk_ids, expert_map, num_slots, num_experts, num_buckets,
    names, sorted_token_ids, expert_ids, num_tokens_post_padded, num_rows, num_tiles,
    TILE: tl.constexpr, BUCKETS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Each program places the slots of one expert or of a few experts."""
    take_turn()
    slot = tl.arange(0, CHUNK)
    buckets = local_experts(topk_ids, expert_map, slot, slot < num_slots, num_experts, num_buckets)
    place_buckets(
        buckets, slot, names, sorted_token_ids, expert_ids, num_tokens_post_padded,
        num_slots, num_rows, num_tiles, num_buckets, TILE, BUCKETS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_slots", "first_expert", "num_rows", "num_tiles"])
def _align_blocks_kernel(
    topk_ids, expert_map, table, num_slots, first_expert, num_experts, num_buckets,
    names, sorted_token_ids, expert_ids, num_tokens_post_padded, num_rows, num_tiles,
    TILE: tl.constexpr, BUCKETS: tl.constexpr, BLOCK: tl.constexpr, FEW: tl.constexpr,
    ACROSS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Each program places the slots of one block and fills its share of the padding and the ids."""
    take_turn()
    slots, experts, firsts, header = plan_parts(
        sorted_token_ids, expert_ids, num_tokens_post_padded, num_rows, num_tiles
    )
    block, blocks = tl.program_id(0), tl.num_programs(0)
    bucket = tl.arange(0, BUCKETS)
    buckets, count, before, own = count_slots(
        topk_ids, expert_map, table, num_slots, first_expert, num_experts, num_buckets,
        BUCKETS, BLOCK, FEW, ACROSS, ROWS,
    )  # fmt: skip
    tiles = (count + TILE - 1) // TILE
    start, first_tile = tl.cumsum(count, 0) - count, tl.cumsum(tiles, 0) - tiles
    first_row, used_tiles = first_tile * TILE, tl.sum(tiles)
    WHOLE: tl.constexpr = expert_ids is None

    slot, own_bucket, row = sort_in_block(buckets, first_row + before, own, num_buckets, BLOCK)
    tl.store(slots + row, slot, mask=own_bucket < num_buckets)

    name = bucket
    if names is not None:
        name = as_name(tl.load(names + bucket, mask=bucket < num_buckets, other=0))
    for at in range(block, TILE, blocks):
        unused = count + at < tiles * TILE
        tl.store(slots + first_row + count + at, bucket * 0 + num_slots, mask=unused)
    for at in range(block, tl.max(tiles), blocks):
        name_tile(experts, firsts, first_tile + at, name, start + at * TILE, at < tiles, WHOLE)
    finish_plan(
        slots, experts, firsts, header, used_tiles, block, blocks, num_slots,
        num_rows, num_tiles, TILE, 512, WHOLE,
    )  # fmt: skip


@lru_cache(maxsize=4096)
def _align_launch(num_slots: int, tile: int, num_experts: int) -> Launch:
    """The launch of the kernel for a number of slots."""
    if num_slots > SINGLE_LAUNCH_SLOTS:
        return _align_blocks(block_sizes(num_slots, num_experts), tile)
    return _align_few(scan_sizes(num_slots), tile, num_experts)


@lru_cache(maxsize=1024)
def _align_few(scan: Scan, tile: int, num_experts: int) -> Launch:
    buckets = next_power_of_2(max(num_experts, 2))
    return Launch(
        _align_kernel, TILE=tile, BUCKETS=buckets, CHUNK=scan.chunk, num_warps=scan.num_warps
    )


@lru_cache(maxsize=1024)
def _align_blocks(sizes: Blocks, tile: int) -> Launch:
    return Launch(_align_blocks_kernel, TILE=tile, **sizes.constants())


def moe_align_block_size(
    topk_ids: Tensor,
    expert_map: Tensor | None,
    block_size: int,
    num_experts: int,
    pad_sorted_ids: bool,
    ignore_invalid_experts: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch one kernel for few slots (a program per expert), two for many (one per block)."""
    plan = empty_plan(
        topk_ids, expert_map, block_size, num_experts, pad_sorted_ids, ignore_invalid_experts
    )
    bucket_map, names = (expert_map, None) if ignore_invalid_experts else (None, expert_map)
    sizes = plan[0].shape[0], plan[1].shape[0]
    _align_slots(plan, sizes, topk_ids, bucket_map, names, block_size, num_experts)
    return plan


def plan_slots(
    topk_ids: Tensor,
    expert_map: Tensor | None,
    num_experts: int,
    scheme: str,
    dtype: torch.dtype,
    batch_invariant: bool = False,
) -> Tensor:
    """Make a plan in one tensor; launch nothing if slots are so few that no GEMM reads a plan."""
    plan = empty_plan_slots(topk_ids, expert_map, num_experts, scheme, dtype, batch_invariant)
    if not is_direct(topk_ids.numel(), num_experts):
        rule = tile_rule(scheme, dtype, topk_ids.device, batch_invariant, expert_map)
        _write_plan(plan, topk_ids, expert_map, num_experts, rule)
    return plan


def sorted_slots(
    topk_ids: Tensor, expert_map: Tensor | None, num_experts: int, rule: TileRule
) -> Tensor:
    """A plan by another rule than a scheme's, for more slots than `is_direct` allows."""
    sizes = plan_sizes(topk_ids.numel(), num_experts, rule)
    plan = topk_ids.new_empty(sizes.entries, dtype=torch.int32)
    _write_plan(plan, topk_ids, expert_map, num_experts, rule)
    return plan


def _write_plan(
    plan: Tensor, topk_ids: Tensor, expert_map: Tensor | None, num_experts: int, rule: TileRule
) -> None:
    """Write a plan in one tensor for the row tile that the rule has at this load."""
    rows, tiles, *_ = plan_sizes(topk_ids.numel(), num_experts, rule)
    tile = row_tile(rule, topk_ids.numel(), num_experts)
    _align_slots((plan, None, None), (rows, tiles), topk_ids, expert_map, None, tile, num_experts)


def _align_slots(
    parts: tuple[Any, ...],
    sizes: tuple[int, int],
    topk_ids: Tensor,
    bucket_map: Tensor | None,
    names: Tensor | None,
    tile: int,
    num_experts: int,
) -> None:
    """Write the plan of the slots, sorted by bucket: the id, mapped by ``bucket_map``."""
    num_slots = topk_ids.numel()
    launch = _align_launch(num_slots, tile, num_experts)
    if num_slots > SINGLE_LAUNCH_SLOTS:
        _, grid, slots = count_blocks(topk_ids, bucket_map, num_experts)
    else:
        grid = (plan_programs(num_experts),)
        counted = (num_slots, map_size(bucket_map, num_experts), num_experts)
        slots = (topk_ids.contiguous(), dense(bucket_map), *counted)
    launch(grid, *slots, dense(names), *parts, *sizes)


@triton.jit
def _bounded(number, most):
    """Clamp an offset or a count to ``0..most``; returns int32."""
    return tl.minimum(tl.maximum(number, 0), most).to(tl.int32)


@triton.jit
def _no_more_rows(count, num_rows):
    """Reduce row counts so that their running sum never exceeds ``num_rows``."""
    count = tl.maximum(count, 0)
    before = tl.cumsum(count.to(tl.int64), 0) - count
    return tl.minimum(count, tl.maximum(num_rows - before, 0)).to(tl.int32)


@triton.jit(do_not_specialize=["max_rows", "pad", "num_rows", "num_tiles"])
def _spans_kernel(
    plan, counts, offset,
    max_rows, pad, num_rows, num_tiles, num_experts, TILE: tl.constexpr, BUCKETS: tl.constexpr,
):  # fmt: skip
    """Each program lists the contiguous rows of one expert and fills its share of the rest.

    Expert e's rows begin at ``e * max_rows`` if ``counts`` is given, else at ``offset[e]``.
    """
    take_turn()
    slots, names, firsts, header = plan_parts(plan, None, None, num_rows, num_tiles)
    expert = tl.program_id(0)
    experts = tl.arange(0, BUCKETS)
    inside = experts < num_experts
    if counts is not None:
        count = _bounded(tl.load(counts + experts, mask=inside, other=0), max_rows)
        start = expert * max_rows
    else:
        first = _bounded(tl.load(offset + experts, mask=inside, other=0), pad)
        count = _bounded(tl.load(offset + experts + 1, mask=inside, other=0), pad) - first
        count = _no_more_rows(count, pad)
        start = _bounded(tl.load(offset + expert), pad)
    tiles = (count + TILE - 1) // TILE
    first_tile = tl.sum(tl.where(experts < expert, tiles, 0))
    my_tiles = tl.sum(tl.where(experts == expert, tiles, 0))
    my_count = tl.sum(tl.where(experts == expert, count, 0))
    used_tiles = tl.sum(tiles)

    for at in range(0, my_tiles * TILE, 256):
        rank = at + tl.arange(0, 256)
        row = tl.where(rank < my_count, start + rank, pad)
        tl.store(slots + first_tile * TILE + rank, row, mask=rank < my_tiles * TILE)
    name_tiles(names, firsts, first_tile, my_tiles, expert, start, TILE, True)
    finish_plan(
        slots, names, firsts, header, used_tiles, expert, num_experts, pad,
        num_rows, num_tiles, TILE, 256, True,
    )  # fmt: skip


@lru_cache(maxsize=1024)
def _spans_launch(tile: int, num_experts: int) -> Launch:
    return Launch(_spans_kernel, TILE=tile, BUCKETS=next_power_of_2(max(num_experts, 2)))


def plan_batched(
    expert_num_tokens: Tensor, max_num_tokens: int, scheme: str, batch_invariant: bool = False
) -> Tensor:
    """Launch one program per expert."""
    plan = empty_batched(expert_num_tokens, max_num_tokens, scheme, batch_invariant)
    num_experts = expert_num_tokens.shape[0]
    num_rows = num_experts * max_num_tokens
    spans = (expert_num_tokens.contiguous(), None)
    rule = expert_rule(scheme, plan.device, batch_invariant)
    return _run_spans(plan, spans, max_num_tokens, num_rows, num_experts, rule)


def plan_permuted(
    expert_first_token_offset: Tensor, num_rows: int, scheme: str, batch_invariant: bool = False
) -> Tensor:
    """Launch one program per expert."""
    plan = empty_permuted(expert_first_token_offset, num_rows, scheme, batch_invariant)
    num_experts = expert_first_token_offset.shape[0] - 1
    spans = (None, expert_first_token_offset.contiguous())
    rule = expert_rule(scheme, plan.device, batch_invariant)
    return _run_spans(plan, spans, 0, num_rows, num_experts, rule)


def _run_spans(
    plan: Tensor,
    spans: tuple[Tensor | None, Tensor | None],
    max_rows: int,
    num_rows: int,
    num_experts: int,
    rule: TileRule,
) -> Tensor:
    tile = row_tile(rule, num_rows, num_experts)
    _spans_launch(tile, num_experts)(
        (num_experts,), plan, *spans, max_rows, num_rows,
        *plan_sizes(num_rows, num_experts, rule)[:2], num_experts,
    )  # fmt: skip
    return plan
