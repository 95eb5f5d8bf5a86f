"""The largest of many, of tokens whose experts a warp's lanes have among them.

Experts lie as ``(lanes, tokens, rows, 4)``: every lane of a warp reads four side by side, one row
after the other. So Triton gives each lane a group of a token's experts, up to 16, of which it finds
the largest by itself, and a warp the largest of all in one instruction. (The positions are made so:
a row that was loaded and reshaped is reordered by Triton 3.6 where only a reduction reads it.)
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.constexpr_function
def lanes_of(experts):
    """How many lanes have a token's experts: those of one warp, or of four or eight."""
    if experts > 512:
        return 128 if experts <= 2048 else 256
    return min(32, experts // 4)


@triton.jit
def by_lanes(EXPERTS: tl.constexpr):
    """The expert of each ``(lanes, 1, rows, 4)``."""
    LANES: tl.constexpr = lanes_of(EXPERTS)
    lane = tl.arange(0, LANES)[:, None, None, None]
    row = tl.arange(0, EXPERTS // (4 * LANES))[None, None, :, None]
    return (row * LANES + lane) * 4 + tl.arange(0, 4)[None, None, None, :]


@triton.jit
def of_tokens(x):
    """``(tokens, 1)`` beside what lies by lanes."""
    return x[None, :, :, None]


@triton.jit
def sum_by_lanes(x):
    """``(tokens,)``: the sums over all but the tokens."""
    return tl.sum(tl.sum(tl.sum(x, 3), 2), 0)


@triton.jit
def _most_of_lanes(packed, addend):
    """The largest of each lane, after the addend."""
    return tl.max(tl.max(packed + addend[:, :, None, None], 3), 2)


@triton.constexpr_function
def in_rounds(experts, topk):
    """Whether four finalists of each lane take fewer instructions than all experts.

    To find them takes as long as five or six rounds of 16 experts, of which they leave a third.
    Of more than 12 chosen ones too often more than three are of one lane.
    """
    return experts == 16 * lanes_of(experts) and 6 <= topk <= 12


@triton.jit
def finalists(packed):
    """The four largest of each lane ``(lanes, tokens, 2, 2)``, and for each token the last's most.

    If one that large is chosen, others of its lane might have been.
    """
    first = _most_of_lanes(packed, tl.zeros(packed.shape[:2], dtype=tl.int32))
    addend = -0x80000000 - first  # see `largest`
    second = _most_of_lanes(packed, addend) - addend
    addend = -0x80000000 - second
    third = _most_of_lanes(packed, addend) - addend
    addend = -0x80000000 - third
    fourth = _most_of_lanes(packed, addend) - addend
    return tl.join(tl.join(first, second), tl.join(third, fourth)), tl.max(fourth, 0)


@triton.jit
def _most(packed, addend):
    """The largest of each token, after the addend."""
    return tl.max(_most_of_lanes(packed, addend[None, :]), 0)


@triton.jit
def largest(packed, slot, TOPK: tl.constexpr):
    """The TOPK largest of each token, falling, the last of them, and the largest of the others.

    One maximum a round. To pass over what was found, no key need change: an addend makes the last
    one found the least of all, modulo 2**32, and keeps the order of the others.
    All of ``packed``, int32, differ, or those that do not are found together. ``slot`` numbers the
    places ``(tokens, copies, slots)`` or, of lanes, ``(lanes, tokens)``.
    """
    chosen = slot
    best = tl.zeros((packed.shape[1],), dtype=tl.int32)
    addend = best
    for j in range(TOPK):
        most = _most(packed, addend)
        best = most - addend
        found = best[None, :] if len(slot.shape) == 2 else best[:, None, None]
        chosen = tl.where(slot == j, found, chosen)
        addend = (-0x80000000 + addend) - most
    return chosen, best, _most(packed, addend) - addend
