"""The steps of writing a tile plan, which the kernels of alignment share.

They take the three parts of a plan, or one tensor with all (None for the other two): it is WHOLE
then, and tells tiles' first rows, too. See `plan_parts`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_ops.kernels.slots import HEADER


@triton.jit
def fill(out, start, stop, first, step, value, CHUNK: tl.constexpr):
    """``out[start:stop] = value``, the chunks ``first, first + step, ...`` of it."""
    for at in range(start + first * CHUNK, stop, step * CHUNK):
        index = at + tl.arange(0, CHUNK)
        tl.store(out + index, tl.zeros((CHUNK,), dtype=tl.int32) + value, mask=index < stop)


@triton.jit
def plan_parts(slots, experts, used, num_rows, num_tiles):
    """Where the slots, the experts, the tiles' first rows and the number of rows in use are.

    Given each (there are no first rows then), or a tensor with all.
    """
    if experts is None:
        used, experts, slots = slots, slots + HEADER + num_rows, slots + HEADER
    return slots, experts, experts + num_tiles, used


@triton.jit
def name_tile(experts, firsts, tile, name, row, mask, WHOLE: tl.constexpr):
    """The expert of some tiles, and their first row."""
    tl.store(experts + tile, name, mask=mask)
    if WHOLE:
        tl.store(firsts + tile, row, mask=mask)


@triton.jit
def name_tiles(experts, firsts, tile, count, name, row, TILE: tl.constexpr, WHOLE: tl.constexpr):
    """``count`` tiles of one expert, of which the first begins with ``row``."""
    for at in range(0, count, 128):
        i = at + tl.arange(0, 128)
        own, first = i * 0 + name, row + i * TILE
        name_tile(experts, firsts, tile + i, own, first, i < count, WHOLE)


@triton.jit
def finish_plan(
    slots, experts, firsts, header, used_tiles, share, shares, pad, num_rows, num_tiles,
    TILE: tl.constexpr, CHUNK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """This program's share of what no tile uses, and by the first program the header."""
    fill(slots, used_tiles * TILE, num_rows, share, shares, pad, CHUNK)
    fill(experts, used_tiles, num_tiles, share, shares, -1, 128)
    if WHOLE:
        fill(firsts, used_tiles, num_tiles, share, shares, -1, 128)
    if share == 0:
        tl.store(header, used_tiles * TILE)
        if WHOLE:
            at = tl.arange(0, HEADER)
            begin = tl.where(at == 1, HEADER + num_rows, HEADER + num_rows + num_tiles)
            tl.store(header + at, tl.where(at < 3, begin, 0), mask=at > 0)


@triton.jit
def place_buckets(
    found, slot, names, sorted_token_ids, expert_ids, num_tokens_post_padded,
    num_slots, num_rows, num_tiles, num_buckets, TILE: tl.constexpr, BUCKETS: tl.constexpr,
):  # fmt: skip
    """Place the slots of this program's buckets, and fill its share of what no bucket uses.

    ``found`` has the bucket of every slot, in the order of the slots. Of buckets every program has
    one, or a few where there are many: counting takes longer than placing.
    """
    slots, experts, firsts, header = plan_parts(
        sorted_token_ids, expert_ids, num_tokens_post_padded, num_rows, num_tiles
    )
    WHOLE: tl.constexpr = expert_ids is None
    program, programs = tl.program_id(0), tl.num_programs(0)
    buckets = tl.arange(0, BUCKETS)
    count = tl.histogram(tl.maximum(found, 0), BUCKETS, mask=found >= 0)
    tiles = (count + TILE - 1) // TILE
    used_tiles = tl.sum(tiles)

    for bucket in range(program, num_buckets, programs):
        mine = (found == bucket).to(tl.int32)
        my_count = tl.sum(mine)
        if my_count > 0:
            first_tile = tl.sum(tl.where(buckets < bucket, tiles, 0))
            row, my_tiles = first_tile * TILE, (my_count + TILE - 1) // TILE
            tl.store(slots + row + tl.cumsum(mine, 0) - mine, slot, mask=mine > 0)
            name = bucket
            if names is not None:
                name = tl.load(names + bucket).to(tl.int32)
            fill(slots, row + my_count, row + my_tiles * TILE, 0, 1, num_slots, 64)
            before = tl.sum(tl.where(buckets < bucket, count, 0))
            name_tiles(experts, firsts, first_tile, my_tiles, name, before, TILE, WHOLE)

    finish_plan(
        slots, experts, firsts, header, used_tiles, program, programs, num_slots,
        num_rows, num_tiles, TILE, 512, WHOLE,
    )  # fmt: skip
