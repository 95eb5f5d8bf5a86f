"""The steps of writing a tile plan, which the kernels of alignment share.

They take the three parts of a plan, or None for the last two: see `plan_parts`.
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
def plan_parts(slots, experts, used, num_rows):
    """Where the slots, the experts and the rows in use are: given each, or a tensor with all."""
    if experts is None:
        used, experts, slots = slots, slots + HEADER + num_rows, slots + HEADER
    return slots, experts, used


@triton.jit
def store_header(header, experts, rows, num_rows):
    """How many rows are in use; with ``experts`` None, of a tensor with all, also the rest."""
    if experts is None:
        at = tl.arange(0, HEADER)
        first_expert = tl.where(at == 1, HEADER + num_rows, 0)
        tl.store(header + at, tl.where(at == 0, rows, first_expert))
    else:
        tl.store(header, rows)


@triton.jit
def place_buckets(
    found, slot, names, sorted_token_ids, expert_ids, num_tokens_post_padded,
    num_slots, num_rows, num_tiles, num_buckets, TILE: tl.constexpr, BUCKETS: tl.constexpr,
):  # fmt: skip
    """Place the slots of this program's buckets, and fill its share of what no bucket uses.

    ``found`` has the bucket of every slot, in the order of the slots. Of buckets every program has
    one, or a few where there are many: counting takes longer than placing.
    """
    slots, experts, header = plan_parts(
        sorted_token_ids, expert_ids, num_tokens_post_padded, num_rows
    )
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
            row, end = first_tile * TILE, first_tile + (my_count + TILE - 1) // TILE
            tl.store(slots + row + tl.cumsum(mine, 0) - mine, slot, mask=mine > 0)
            name = bucket
            if names is not None:
                name = tl.load(names + bucket).to(tl.int32)
            fill(slots, row + my_count, end * TILE, 0, 1, num_slots, TILE)
            fill(experts, first_tile, end, 0, 1, name, 128)

    fill(slots, used_tiles * TILE, num_rows, program, programs, num_slots, 512)
    fill(experts, used_tiles, num_tiles, program, programs, -1, 128)
    if program == 0:
        store_header(header, expert_ids, used_tiles * TILE, num_rows)
