"""Steps of writing a tile plan, shared by the kernels of alignment.

A plan is three tensors, or one tensor that also has the tiles' first rows (a WHOLE plan; the other
two arguments are then None). See `plan_parts`.
"""

from __future__ import annotations

from functools import lru_cache

import triton
import triton.language as tl

from moe_ops.dispatch.tiles import PLAN_PROGRAMS, cdiv, next_power_of_2
from moe_ops.kernels._runtime.slots import HEADER

BITS, LOW = tl.constexpr(16), tl.constexpr(0xFFFF)
"""Width and mask of one count where several share one integer. Slots are so few that each
count, of slots or of tiles, fits in 16 bits."""


@triton.jit
def fill(out, start, stop, first, step, value, CHUNK: tl.constexpr):
    """``out[start:stop] = value``, for the chunks ``first, first + step, ...`` of that range."""
    for at in range(start + first * CHUNK, stop, step * CHUNK):
        index = at + tl.arange(0, CHUNK)
        tl.store(out + index, tl.zeros((CHUNK,), dtype=tl.int32) + value, mask=index < stop)


@triton.jit
def plan_parts(slots, experts, used, num_rows, num_tiles):
    """Pointers to the slots, the experts, the tiles' first rows and the number of rows in use.

    ``slots`` is a whole plan if ``experts`` is None. Else there are no first rows.
    """
    if experts is None:
        used, experts, slots = slots, slots + HEADER + num_rows, slots + HEADER
    return slots, experts, experts + num_tiles, used


@triton.jit
def as_name(expert):
    """An entry of an expert map as int32, -1 if it does not fit."""
    name = expert.to(tl.int32)
    return tl.where(name == expert, name, -1)


@triton.jit
def name_tile(experts, firsts, tile, name, row, mask, WHOLE: tl.constexpr):
    """Store the expert of some tiles, and their first row."""
    tl.store(experts + tile, name, mask=mask)
    if WHOLE:
        tl.store(firsts + tile, row, mask=mask)


@triton.jit
def name_tiles(experts, firsts, tile, count, name, row, TILE: tl.constexpr, WHOLE: tl.constexpr):
    """Name ``count`` tiles of one expert; the first of these tiles begins with ``row``."""
    for at in range(0, count, 128):
        i = at + tl.arange(0, 128)
        own, first = i * 0 + name, row + i * TILE
        name_tile(experts, firsts, tile + i, own, first, i < count, WHOLE)


@triton.jit
def finish_plan(
    slots, experts, firsts, header, used_tiles, share, shares, pad, num_rows, num_tiles,
    TILE: tl.constexpr, CHUNK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Fill this program's share of what no tile uses; the first program writes the header."""
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


@triton.constexpr_function
def buckets_each(buckets):
    """Buckets per program, given how many there are (a power of two)."""
    return max(1, min(4, buckets // PLAN_PROGRAMS))


@lru_cache(maxsize=1024)
def plan_programs(num_buckets: int) -> int:
    """Programs that place this many buckets."""
    return cdiv(num_buckets, buckets_each(next_power_of_2(num_buckets)))


@triton.jit
def _bits(word, i):
    """The i-th count in an integer."""
    return ((word >> (i * BITS)) & LOW).to(tl.int32)


@triton.jit
def _before(buckets, first, BUCKETS: tl.constexpr, TILE: tl.constexpr):
    """The number of tiles and of slots in the buckets before ``first``, and of all tiles."""
    bucket = tl.arange(0, BUCKETS)
    count = tl.histogram(tl.maximum(buckets, 0), BUCKETS, mask=buckets >= 0)
    tiles = (count + TILE - 1) // TILE
    below = tl.where(bucket < first, (count << BITS) + tiles, 0)
    sums = tl.sum((tiles.to(tl.int64) << 2 * BITS) + below)
    return _bits(sums, 0), _bits(sums, 1), _bits(sums, 2)


@triton.jit
def _spans(counts, tile, start, EACH: tl.constexpr, TILE: tl.constexpr):
    """For each bucket: its first tile, its first slot, the row after its slots, the next tile."""
    spans = ()
    for i in tl.static_range(EACH):
        count = _bits(counts, i)
        after = tile + (count + TILE - 1) // TILE
        spans = spans + ((tile, start, tile * TILE + count, after),)
        tile, start = after, start + count
    return spans


@triton.jit
def _finish_buckets(
    slots, experts, firsts, spans, names, first_bucket, num_buckets, pad,
    EACH: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Write the padding rows and the tiles' names of some buckets, which lie side by side."""
    begin, end = spans[0][0], spans[EACH - 1][3]  # see `_spans`
    for at in range(begin * TILE, end * TILE, 128):
        row = at + tl.arange(0, 128)
        unused = row < 0
        for i in tl.static_range(EACH):
            _, _, stop, after = spans[i]
            unused = unused | ((row >= stop) & (row < after * TILE))
        tl.store(slots + row, row * 0 + pad, mask=unused)
    for at in range(begin, end, 128):
        tile = at + tl.arange(0, 128)
        name, row = tile * 0 + first_bucket, tile * 0
        for i in tl.static_range(EACH):  # the next bucket overwrites one without tiles
            first, start, _, _ = spans[i]
            name = tl.where(tile >= first, first_bucket + i, name)
            row = tl.where(tile >= first, start + (tile - first) * TILE, row)
        if names is not None:
            valid = (tile < end) & (name < num_buckets)
            name = as_name(tl.load(names + name, mask=valid, other=0))
        name_tile(experts, firsts, tile, name, row, tile < end, WHOLE)


@triton.jit
def place_buckets(
    buckets, slot, names, sorted_token_ids, expert_ids, num_tokens_post_padded,
    num_slots, num_rows, num_tiles, num_buckets, TILE: tl.constexpr, BUCKETS: tl.constexpr,
):  # fmt: skip
    """Place the slots of this program's buckets, and fill its share of what no bucket uses.

    ``buckets`` has the bucket of every slot, in the order of the slots. Every program counts all
    buckets, then ranks the slots of its own ones (up to four) in one prefix sum of such integers.
    """
    slots, experts, firsts, header = plan_parts(
        sorted_token_ids, expert_ids, num_tokens_post_padded, num_rows, num_tiles
    )
    WHOLE: tl.constexpr = expert_ids is None
    EACH: tl.constexpr = buckets_each(BUCKETS)
    SUMS: tl.constexpr = tl.int32 if EACH * BITS <= 32 else tl.int64
    program, programs = tl.program_id(0), tl.num_programs(0)
    tile, start, used_tiles = _before(buckets, program * EACH, BUCKETS, TILE)

    own = buckets - program * EACH
    mine = (own >= 0) & (own < EACH)
    place = tl.where(mine, own, 0)
    one = mine.to(SUMS) << (place * BITS).to(SUMS)
    rank = _bits(tl.cumsum(one, 0) - one, place.to(SUMS))
    spans, row = _spans(tl.sum(one), tile, start, EACH, TILE), rank
    for i in tl.static_range(EACH):
        row = tl.where(own == i, rank + spans[i][0] * TILE, row)
    tl.store(slots + row, slot, mask=mine)
    _finish_buckets(
        slots, experts, firsts, spans, names, program * EACH, num_buckets, num_slots,
        EACH, TILE, WHOLE,
    )  # fmt: skip
    finish_plan(
        slots, experts, firsts, header, used_tiles, program, programs, num_slots,
        num_rows, num_tiles, TILE, 512, WHOLE,
    )  # fmt: skip
