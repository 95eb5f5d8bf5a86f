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
def place_bucket(
    found, slot, names, sorted_token_ids, expert_ids, num_tokens_post_padded,
    num_slots, num_rows, num_tiles, num_buckets, TILE: tl.constexpr, BUCKETS: tl.constexpr,
):  # fmt: skip
    """Place the slots of this program's bucket, and fill its share of what no bucket uses.

    ``found`` has the bucket of every slot, in the order of the slots.
    """
    slots, experts, header = plan_parts(
        sorted_token_ids, expert_ids, num_tokens_post_padded, num_rows
    )
    bucket = tl.program_id(0)
    buckets = tl.arange(0, BUCKETS)
    count = tl.histogram(tl.maximum(found, 0), BUCKETS, mask=found >= 0)
    tiles = (count + TILE - 1) // TILE
    first_tile = tl.sum(tl.where(buckets < bucket, tiles, 0))
    my_tiles = tl.sum(tl.where(buckets == bucket, tiles, 0))
    used_tiles = tl.sum(tiles)

    if my_tiles > 0:
        mine = (found == bucket).to(tl.int32)
        row = first_tile * TILE
        tl.store(slots + row + tl.cumsum(mine, 0) - mine, slot, mask=mine > 0)
        name = bucket
        if names is not None:
            name = tl.load(names + bucket).to(tl.int32)
        fill(slots, row + tl.sum(mine), row + my_tiles * TILE, 0, 1, num_slots, TILE)
        fill(experts, first_tile, first_tile + my_tiles, 0, 1, name, 128)

    fill(slots, used_tiles * TILE, num_rows, bucket, num_buckets, num_slots, 128)
    fill(experts, used_tiles, num_tiles, bucket, num_buckets, -1, 128)
    if bucket == 0:
        store_header(header, expert_ids, used_tiles * TILE, num_rows)
