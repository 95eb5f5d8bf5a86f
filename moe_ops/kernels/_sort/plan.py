"""The steps of writing a tile plan, which the kernels of alignment share.

They take the three parts of a plan, or one tensor with all (None for the other two): it is WHOLE
then, and tells tiles' first rows, too. See `plan_parts`.
"""

from __future__ import annotations

from functools import lru_cache

import triton
import triton.language as tl

from moe_ops.dispatch.tiles import PLAN_PROGRAMS, cdiv, next_power_of_2
from moe_ops.kernels._runtime.slots import HEADER

BITS, LOW = tl.constexpr(16), tl.constexpr(0xFFFF)
"""Of a count of slots, or of tiles, where several are added up in one integer: there are few."""


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
def as_name(expert):
    """What an expert map says, as int32; -1 where that is too narrow."""
    name = expert.to(tl.int32)
    return tl.where(name == expert, name, -1)


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


@triton.constexpr_function
def buckets_each(buckets):
    """Those of one program, of so many (a power of two)."""
    return max(1, min(4, buckets // PLAN_PROGRAMS))


@lru_cache(maxsize=1024)
def plan_programs(num_buckets: int) -> int:
    """How many programs place them."""
    return cdiv(num_buckets, buckets_each(next_power_of_2(num_buckets)))


@triton.jit
def _bits(packed, i):
    """The count in some bits of an integer."""
    return ((packed >> (i * BITS)) & LOW).to(tl.int32)


@triton.jit
def _before(found, first, BUCKETS: tl.constexpr, TILE: tl.constexpr):
    """The tiles and the slots of the buckets before ``first``, and all tiles."""
    bucket = tl.arange(0, BUCKETS)
    count = tl.histogram(tl.maximum(found, 0), BUCKETS, mask=found >= 0)
    tiles = (count + TILE - 1) // TILE
    below = tl.where(bucket < first, (count << BITS) + tiles, 0)
    sums = tl.sum((tiles.to(tl.int64) << 2 * BITS) + below)
    return _bits(sums, 0), _bits(sums, 1), _bits(sums, 2)


@triton.jit
def _spans(counts, tile, start, EACH: tl.constexpr, TILE: tl.constexpr):
    """Of each bucket its first tile and slot, the row after its slots, and the tile after its."""
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
    """The rows of padding of some buckets, which lie side by side, and the names of their tiles."""
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
        for i in tl.static_range(EACH):  # a bucket without tiles gives way to the next one
            first, start, _, _ = spans[i]
            name = tl.where(tile >= first, first_bucket + i, name)
            row = tl.where(tile >= first, start + (tile - first) * TILE, row)
        if names is not None:
            known = (tile < end) & (name < num_buckets)
            name = as_name(tl.load(names + name, mask=known, other=0))
        name_tile(experts, firsts, tile, name, row, tile < end, WHOLE)


@triton.jit
def place_buckets(
    found, slot, names, sorted_token_ids, expert_ids, num_tokens_post_padded,
    num_slots, num_rows, num_tiles, num_buckets, TILE: tl.constexpr, BUCKETS: tl.constexpr,
):  # fmt: skip
    """Place the slots of this program's buckets, and fill its share of what no bucket uses.

    ``found`` has the bucket of every slot, in the order of the slots. Every program counts them
    all; those of its own buckets, up to four side by side, it numbers in one sum.
    """
    slots, experts, firsts, header = plan_parts(
        sorted_token_ids, expert_ids, num_tokens_post_padded, num_rows, num_tiles
    )
    WHOLE: tl.constexpr = expert_ids is None
    EACH: tl.constexpr = buckets_each(BUCKETS)
    SUMS: tl.constexpr = tl.int32 if EACH * BITS <= 32 else tl.int64
    program, programs = tl.program_id(0), tl.num_programs(0)
    tile, start, used_tiles = _before(found, program * EACH, BUCKETS, TILE)

    own = found - program * EACH
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
