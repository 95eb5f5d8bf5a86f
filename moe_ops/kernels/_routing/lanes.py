"""Top-k over the experts of tokens, in a layout that spreads them over the lanes of a warp.

Keys have the shape ``(lanes, tokens, rows, 4)``: every lane of a warp reads four neighbouring
experts, one row after the other. Triton then gives each lane up to 16 experts of a token. A lane
finds its own maximum, and the warp finds the maximum of all lanes in one instruction. (Positions
are computed in this shape and not by reshaping a loaded row, because Triton 3.6 reorders a reshaped
row that only a reduction reads.)
"""

from __future__ import annotations

import triton
import triton.language as tl

LAST_AXIS_FIRST = tl.constexpr(not triton.__version__.startswith("3.6."))
"""Which axis the installed Triton spreads over lanes: see `load_lanes`."""
ROLLED = tl.constexpr(triton.__version__.startswith("3.8."))
"""Whether the installed Triton leaves the rounds of `largest` in a loop unless it is told to unroll
them (the other versions unroll them unasked)."""


@triton.constexpr_function
def lanes_of(experts):
    """Number of lanes that hold the experts of a token: one warp, four warps or eight."""
    if experts > 512:
        return 128 if experts <= 2048 else 256
    return min(32, experts // 4)


@triton.jit
def by_lanes(EXPERTS: tl.constexpr):
    """The expert at each position of ``(lanes, 1, rows, 4)``."""
    LANES: tl.constexpr = lanes_of(EXPERTS)
    lane = tl.arange(0, LANES)[:, None, None, None]
    row = tl.arange(0, EXPERTS // (4 * LANES))[None, None, :, None]
    return (row * LANES + lane) * 4 + tl.arange(0, 4)[None, None, None, :]


@triton.jit
def load_lanes(at, valid=None, other=None):
    """Load in the layout of `by_lanes`; a tensor of fewer axes in any layout.

    Among axes whose neighbours are not adjacent in memory, Triton spreads the first one over lanes
    before the others up to 3.6, and the last one since 3.7.
    """
    if len(at.shape) == 4 and LAST_AXIS_FIRST:
        at = tl.permute(at, (2, 1, 0, 3))
        if valid is not None:
            valid = tl.permute(valid, (2, 1, 0, 3))
        return tl.permute(tl.load(at, mask=valid, other=other), (2, 1, 0, 3))
    else:
        return tl.load(at, mask=valid, other=other)


@triton.jit
def of_tokens(x):
    """Broadcast ``(tokens, 1)`` against the layout of `by_lanes`."""
    return x[None, :, :, None]


@triton.jit
def sum_by_lanes(x):
    """Sum over all axes but the tokens: ``(tokens,)``."""
    return tl.sum(tl.sum(tl.sum(x, 3), 2), 0)


@triton.jit
def _most_of_lanes(keys, addend):
    """The largest key of each lane, once the addend is added (modulo 2**32)."""
    return tl.max(tl.max(keys + addend[:, :, None, None], 3), 2)


@triton.constexpr_function
def in_rounds(experts, topk):
    """Whether top-k over four `finalists` a lane takes fewer instructions than over all experts.

    Finding the finalists costs as much as five or six rounds over 16 experts; a round over the
    finalists costs a third of one over all. With topk > 12 one lane holds more than three of the
    chosen experts too often.
    """
    return experts == 16 * lanes_of(experts) and 6 <= topk <= 12


@triton.jit
def finalists(keys):
    """The four largest keys of each lane ``(lanes, tokens, 2, 2)``, and the largest fourth key.

    If the smallest chosen key of a token is no larger than this fourth key, a key that is no
    finalist might belong to the TOPK largest.
    """
    first = _most_of_lanes(keys, tl.zeros(keys.shape[:2], dtype=tl.int32))
    addend = -0x80000000 - first  # see `largest`
    second = _most_of_lanes(keys, addend) - addend
    addend = -0x80000000 - second
    third = _most_of_lanes(keys, addend) - addend
    addend = -0x80000000 - third
    fourth = _most_of_lanes(keys, addend) - addend
    return tl.join(tl.join(first, second), tl.join(third, fourth)), tl.max(fourth, 0)


@triton.jit
def _most(keys, addend):
    """The largest key of each token, once the addend is added (modulo 2**32)."""
    return tl.max(_most_of_lanes(keys, addend[None, :]), 0)


@triton.constexpr_function
def _unrolled(rounds):
    return rounds if ROLLED else None


@triton.jit
def largest(keys, place, TOPK: tl.constexpr):
    """The TOPK largest keys of each token in descending order, the last one, the largest key left.

    One maximum per round. Keys found in earlier rounds are skipped without changing any key: an
    addend makes the last key found the least of all modulo 2**32, and keeps the order of those
    below it. Equal keys of ``keys`` (int32) are found together, so all should differ. ``place``
    numbers the result's places: ``(tokens, copies, slots)``, or ``(lanes, tokens)`` by lanes.
    """
    chosen = place
    best = tl.zeros((keys.shape[1],), dtype=tl.int32)
    addend = best
    for j in tl.range(TOPK, loop_unroll_factor=_unrolled(TOPK)):
        most = _most(keys, addend)
        best = most - addend
        winner = best[None, :] if len(place.shape) == 2 else best[:, None, None]
        chosen = tl.where(place == j, winner, chosen)
        addend = (-0x80000000 + addend) - most
    return chosen, best, _most(keys, addend) - addend
