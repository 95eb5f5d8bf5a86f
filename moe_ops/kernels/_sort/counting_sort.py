"""A stable counting sort of slots by bucket, a block of slots per program.

Few slots take one launch, in which every program counts all slots. Many take two launches. The
first one counts: a table has the slots of each bucket in each block. In the second one every
program adds up that table (it is small and stays in the L2 cache). Either way a program then knows
where each bucket begins and how many of its slots lie in earlier blocks, and sorts its own block.
The order never depends on timing.

A bucket is a local expert. Alignment, permutation, the batched format and counting differ in what
the last launch writes. Their kernels begin with the arguments that `count_blocks` returns, and end
with the constants of `Blocks`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_ops.dispatch.tiles import SINGLE_LAUNCH_SLOTS, cdiv, scan_sizes
from moe_ops.kernels._runtime.dependent import take_turn
from moe_ops.kernels._runtime.launch import Launch
from moe_ops.kernels._runtime.slots import dense, local_experts, map_size, next_power_of_2

FEW_BLOCK = 64
"""Slots of one program where they are few: sorting more in a program takes longer."""
ENTRIES = 8
"""Table entries that a thread reads at once: 16 bytes."""
ROWS = 8
"""Table rows that a thread reads before it adds them up."""


@triton.jit
def _block_buckets(
    topk_ids, expert_map, num_slots, first_expert, num_experts, num_buckets, BLOCK: tl.constexpr
):
    """The bucket of each slot of this program's block, negative where the slot is skipped.

    Bucket b is local expert ``first_expert + b``.
    """
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    return _buckets_of(
        slot, topk_ids, expert_map, num_slots, first_expert, num_experts, num_buckets
    )


@triton.jit
def _buckets_of(slot, topk_ids, expert_map, num_slots, first_expert, num_experts, num_buckets):
    """The bucket of each of some slots; see `_block_buckets`."""
    inside, last = slot < num_slots, first_expert + num_buckets
    return local_experts(topk_ids, expert_map, slot, inside, num_experts, last) - first_expert


@triton.jit
def _count(buckets, counted, BUCKETS: tl.constexpr):
    """The slots of each bucket among those that are counted and not skipped."""
    return tl.histogram(tl.maximum(buckets, 0), BUCKETS, mask=counted & (buckets >= 0))


@triton.jit(do_not_specialize=["num_slots", "first_expert"])
def _count_blocks_kernel(
    topk_ids, expert_map, table, num_slots, first_expert, num_experts, num_buckets,
    BUCKETS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program counts the slots of one block, by bucket."""
    take_turn()
    buckets = _block_buckets(
        topk_ids, expert_map, num_slots, first_expert, num_experts, num_buckets, BLOCK
    )
    row = table + tl.program_id(0) * BUCKETS
    tl.store(row + tl.arange(0, BUCKETS), _count(buckets, buckets >= 0, BUCKETS).to(tl.int16))


@triton.jit
def _add_blocks(table, BUCKETS: tl.constexpr, ACROSS: tl.constexpr, ROWS: tl.constexpr):
    """For each bucket: all slots, those in the blocks before this program's, and those in it.

    A step reads ROWS rows in each of ACROSS groups of threads. Triton gives a thread the rows of
    the middle axis: it adds them up by itself, two buckets at a time, since 16 bits hold the sums.
    All threads together only add up the sums of all steps.
    """
    mine, num_blocks = tl.program_id(0), tl.num_programs(0)
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
def count_slots(
    topk_ids, expert_map, table, num_slots, first_expert, num_experts, num_buckets,
    BUCKETS: tl.constexpr, BLOCK: tl.constexpr, FEW: tl.constexpr,
    ACROSS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The bucket of each slot of this program's block, and three counts for each bucket.

    They are of all slots, of those in earlier blocks, and of those in this one. Without a table
    there are at most FEW slots, which every program counts.
    """
    buckets = _block_buckets(
        topk_ids, expert_map, num_slots, first_expert, num_experts, num_buckets, BLOCK
    )
    if table is None and FEW > BLOCK:
        slot = tl.arange(0, FEW)
        every = _buckets_of(
            slot, topk_ids, expert_map, num_slots, first_expert, num_experts, num_buckets
        )
        count = _count(every, every >= 0, BUCKETS)
        before = _count(every, slot < tl.program_id(0) * BLOCK, BUCKETS)
        own = _count(buckets, buckets >= 0, BUCKETS)
    elif table is None:
        count = _count(buckets, buckets >= 0, BUCKETS)
        before, own = count * 0, count
    else:
        count, before, own = _add_blocks(table, BUCKETS, ACROSS, ROWS)
    return buckets, count, before, own


@triton.jit
def sort_in_block(buckets, first_row, own, num_buckets, BLOCK: tl.constexpr):
    """The slots of this program's block sorted by bucket, the bucket of each, and its row.

    Skipped slots come last; their bucket is ``num_buckets``, and their row means nothing.

    Args:
        buckets: the bucket of each slot, negative where the slot is skipped.
        first_row: the row of each bucket's first slot in this block.
        own: the slots of each bucket in this block.
        num_buckets: how many buckets there are.
        BLOCK: slots in a block.
    """
    position = tl.arange(0, BLOCK)
    key = tl.sort(tl.where(buckets >= 0, buckets, num_buckets) * BLOCK + position)
    bucket = key // BLOCK
    begin = tl.cumsum(own, 0) - own
    row = position + tl.gather(first_row - begin, tl.where(bucket < num_buckets, bucket, 0), 0)
    return tl.program_id(0) * BLOCK + key % BLOCK, bucket, row


class Blocks(NamedTuple):
    """Sizes of a counting sort."""

    block: int
    """Slots of one program. 16 bits can count the slots of ROWS blocks."""
    buckets: int
    """Rounded up to a power of two."""
    few: int
    """Slots, rounded up to a power of two, that every program counts; 0: a table has the counts."""
    across: int
    """Groups of warps that read rows of the table."""
    rows: int
    """Table rows that each of these groups reads in a step."""
    num_warps: int

    def constants(self) -> dict[str, Any]:
        """Constants and launch options of a kernel that sorts."""
        names = ("BLOCK", "BUCKETS", "FEW", "ACROSS", "ROWS", "num_warps")
        return dict(zip(names, self, strict=True))


@lru_cache(maxsize=4096)
def block_sizes(num_slots: int, num_buckets: int) -> Blocks:
    """The sizes for a number of slots and of buckets."""
    scan, buckets = scan_sizes(num_slots), next_power_of_2(max(num_buckets, 2))
    num_warps = max(scan.num_warps, min(8, buckets // 256))
    at_once = num_warps * 32 * ENTRIES
    across = max(1, min(16, at_once // buckets))
    rows = max(1, min(ROWS, ROWS * at_once // buckets))
    few = scan.chunk if num_slots <= SINGLE_LAUNCH_SLOTS else 0
    block = min(few, FEW_BLOCK) if few else scan.chunk
    return Blocks(block, buckets, few, across, rows, num_warps)


@lru_cache(maxsize=1024)
def _count_blocks_launch(buckets: int, block: int, num_warps: int) -> Launch:
    return Launch(_count_blocks_kernel, BUCKETS=buckets, BLOCK=block, num_warps=num_warps)


def count_blocks(
    topk_ids: Tensor, expert_map: Tensor | None, num_buckets: int, first_expert: int = 0
) -> tuple[Blocks, tuple[int], tuple[Any, ...]]:
    """Count the slots of each block, unless they are few, to be sorted by the next launch.

    Args:
        topk_ids: the expert of each slot.
        expert_map: the local expert of each expert, or None: the same number.
        num_buckets: local experts to sort by.
        first_expert: the first one of them.

    Returns:
        The sizes, the grid and the first arguments of the launch that sorts.
    """
    topk_ids, expert_map = topk_ids.contiguous(), dense(expert_map)
    num_slots, table = topk_ids.numel(), None
    sizes = block_sizes(num_slots, num_buckets)
    num_experts = map_size(expert_map, first_expert + num_buckets)
    grid = (max(1, cdiv(num_slots, sizes.block)),)
    if not sizes.few:
        table = topk_ids.new_empty(grid[0], sizes.buckets, dtype=torch.int16)
        count = _count_blocks_launch(sizes.buckets, sizes.block, sizes.num_warps)
        count(grid, topk_ids, expert_map, table, num_slots, first_expert, num_experts, num_buckets)
    return (
        sizes,
        grid,
        (topk_ids, expert_map, table, num_slots, first_expert, num_experts, num_buckets),
    )
