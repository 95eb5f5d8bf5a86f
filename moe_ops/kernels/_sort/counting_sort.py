"""A stable counting sort of many slots by expert, in two launches of one program a block of slots.

The first launch counts: a table has the slots of each bucket in each block. In the second, every
program adds up that table (it is small and stays in the L2 cache), so that it knows where each
bucket begins and how much of it lies in the blocks before its own; then it sorts its block. The
order never depends on timing.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_ops.dispatch.tiles import cdiv, sort_block
from moe_ops.kernels._runtime.dependent import take_turn
from moe_ops.kernels._runtime.launch import Launch
from moe_ops.kernels._runtime.slots import local_experts, map_size, next_power_of_2

ENTRIES = 8
"""Of the table, that a thread reads at once: 16 bytes."""
ROWS = 8
"""Of the table, that a thread reads before it adds them up."""


@triton.jit
def block_buckets(topk_ids, expert_map, num_slots, num_experts, num_buckets, BLOCK: tl.constexpr):
    """The bucket of each slot of this program's block, -1 where it is skipped."""
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = slot < num_slots
    return local_experts(topk_ids, expert_map, slot, inside, num_experts, num_buckets)


@triton.jit(do_not_specialize=["num_slots"])
def _count_blocks_kernel(
    topk_ids, expert_map, table, num_slots, num_experts, num_buckets,
    BUCKETS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program counts the slots of one block, by bucket."""
    take_turn()
    found = block_buckets(topk_ids, expert_map, num_slots, num_experts, num_buckets, BLOCK)
    count = tl.histogram(tl.maximum(found, 0), BUCKETS, mask=found >= 0)
    row = table + tl.program_id(0) * BUCKETS
    tl.store(row + tl.arange(0, BUCKETS), count.to(tl.int16))


@triton.jit
def add_blocks(table, num_blocks, BUCKETS: tl.constexpr, ACROSS: tl.constexpr, ROWS: tl.constexpr):
    """Of each bucket: all slots, those in the blocks before this program's, and those in it.

    A step reads ROWS rows in each of ACROSS groups of threads. Triton gives a thread the rows of
    the middle axis: it adds them up by itself, two buckets at a time, since 16 bits hold the sums.
    All threads together only add up the sums of all steps.
    """
    mine = tl.program_id(0)
    PAIRS: tl.constexpr = BUCKETS // 2
    pairs = table.to(tl.pointer_type(tl.int32), bitcast=True) + tl.arange(0, PAIRS)[None, None, :]
    row = tl.arange(0, ACROSS)[:, None, None] + tl.arange(0, ROWS)[None, :, None] * ACROSS
    count_low = tl.zeros((ACROSS, PAIRS), dtype=tl.int32)
    count_high, before_low, before_high = count_low, count_low, count_low
    for first in range(0, num_blocks, ACROSS * ROWS):
        block = first + row
        counts = tl.load(pairs + block * PAIRS, mask=block < num_blocks, other=0)
        both = tl.sum(counts, 1)
        count_low += both & 0xFFFF
        count_high += (both >> 16) & 0xFFFF
        both = tl.sum(tl.where(block < mine, counts, 0), 1)
        before_low += both & 0xFFFF
        before_high += (both >> 16) & 0xFFFF
    count = tl.interleave(tl.sum(count_low, 0), tl.sum(count_high, 0))
    before = tl.interleave(tl.sum(before_low, 0), tl.sum(before_high, 0))
    return count, before, tl.load(table + mine * BUCKETS + tl.arange(0, BUCKETS)).to(tl.int32)


@triton.jit
def sort_in_block(found, first_row, own, num_buckets, BLOCK: tl.constexpr):
    """The slots of this program's block by bucket, the row of each, and which ones have a row.

    ``first_row`` is where each bucket's slots of this block go, ``own`` how many there are.
    """
    position = tl.arange(0, BLOCK)
    key = tl.sort(tl.where(found >= 0, found, num_buckets) * BLOCK + position)
    bucket = key // BLOCK
    placed = bucket < num_buckets
    begin = tl.cumsum(own, 0) - own
    row = position + tl.gather(first_row - begin, tl.where(placed, bucket, 0), 0)
    return tl.program_id(0) * BLOCK + key % BLOCK, row, placed


class Blocks(NamedTuple):
    """How many slots a program sorts, and what it does it with."""

    block: int
    """Slots: ROWS blocks of them are no more than 16 bits can count."""
    buckets: int
    across: int
    """Groups of warps that read rows of the table."""
    rows: int
    """Of the table, that each of them reads in a step."""
    num_warps: int


@lru_cache(maxsize=4096)
def block_sizes(num_slots: int, num_buckets: int) -> Blocks:
    """The sizes for a number of slots and of buckets."""
    block, buckets = sort_block(num_slots), next_power_of_2(max(num_buckets, 2))
    num_warps = 8 if block > 256 else 4
    at_once = num_warps * 32 * ENTRIES
    across = max(1, min(16, at_once // buckets))
    rows = max(1, min(ROWS, ROWS * at_once // buckets))
    return Blocks(block, buckets, across, rows, num_warps)


@lru_cache(maxsize=1024)
def _count_launch(buckets: int, block: int, num_warps: int) -> Launch:
    return Launch(_count_blocks_kernel, BUCKETS=buckets, BLOCK=block, num_warps=num_warps)


def count_blocks(topk_ids: Tensor, expert_map: Tensor | None, num_buckets: int) -> Tensor:
    """``(blocks, buckets)`` int16, buckets rounded up: launch one program a block.

    Args:
        topk_ids: contiguous.
        expert_map: contiguous, or None.
        num_buckets: experts to sort by.
    """
    num_slots = topk_ids.numel()
    sizes = block_sizes(num_slots, num_buckets)
    blocks = cdiv(num_slots, sizes.block)
    table = topk_ids.new_empty(blocks, sizes.buckets, dtype=torch.int16)
    _count_launch(sizes.buckets, sizes.block, sizes.num_warps)(
        (blocks,),
        topk_ids,
        expert_map,
        table,
        num_slots,
        map_size(expert_map, num_buckets),
        num_buckets,
    )
    return table
