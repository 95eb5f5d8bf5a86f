"""How a program chooses the experts of its tokens, when all of them compete."""

from __future__ import annotations

import triton
import triton.language as tl

from moe_ops.kernels.routing_scores import (
    best_positions,
    biased,
    chosen_weights,
    is_finite,
    near_softmax,
    number,
    ordered,
    scores,
    scores_and_choice,
    store_routing,
)


@triton.jit
def _pack(key, COUNT: tl.constexpr):
    """Keys with the position in place of their lowest bits: all differ, ties to the lowest."""
    return (key | (COUNT - 1)) - tl.arange(0, COUNT)[None, :]


@triton.jit
def _largest(packed, TOPK: tl.constexpr, SLOTS: tl.constexpr):
    """The TOPK largest of each row, falling, the last of them, and the largest of the others.

    One maximum a round. To pass over what was found, no key need change: an addend makes the last
    one found the least of all, modulo 2**32, and keeps the order of the others.
    """
    ROWS: tl.constexpr = packed.shape[0]
    slot = one_a_thread(tl.zeros((ROWS, 1), dtype=tl.int32) + tl.arange(0, SLOTS)[None, :])
    chosen = slot
    best = tl.zeros((ROWS, 1), dtype=tl.int32)
    addend = best
    for j in range(TOPK):
        best = tl.max(packed + addend, 1, keep_dims=True) - addend
        chosen = tl.where(slot == j, best[:, None], chosen)
        addend = -0x80000000 - best
    return chosen, best, tl.max(packed + addend, 1, keep_dims=True) - addend


@triton.jit
def likely_positions(key, TOPK: tl.constexpr, COUNT: tl.constexpr, SLOTS: tl.constexpr):
    """What `best_positions` finds, unless keys differ in their lowest bits only.

    Returns:
        The positions, and for each row 1 if no key left is larger than a chosen one: then these are
        the best, though perhaps in another order.
    """
    packed = _pack(key, COUNT)
    chosen, best, _ = _largest(packed, TOPK, SLOTS)
    left = tl.max(tl.where(packed < best, key, -0x80000000), 1)
    least = tl.min(tl.where(packed < best, 0x7FFFFFFF, key), 1)
    return COUNT - 1 - (chosen & (COUNT - 1)), (left <= least).to(tl.int32)


@triton.constexpr_function
def _step(dtype):
    """Between the keys of different numbers of a type, at least."""
    return {tl.bfloat16: 0x10000, tl.float16: 0x2000}.get(dtype, 1)


@triton.jit
def _largest_logits(key, STEP: tl.constexpr, TOPK: tl.constexpr, SLOTS: tl.constexpr):
    """Positions of the largest, and for each row a number that no other logit exceeds.

    Other than those that equal a chosen one and come after it: that is known where positions take
    no bits of keys that differ, STEP or more from each other.
    """
    COUNT: tl.constexpr = key.shape[1]
    packed = _pack(key, COUNT)
    chosen, best, left = _largest(packed, TOPK, SLOTS)
    bound = left | (COUNT - 1)
    if STEP >= COUNT:
        equal = (left & -STEP) == (best & -STEP)
        bound = tl.where(equal, (best & -STEP) + ((best >> 31) & (STEP - 1)) - STEP, bound)
    return COUNT - 1 - (chosen & (COUNT - 1)), number(bound)


@triton.jit
def _smaller(x, y):
    return tl.minimum(x, y)


@triton.jit
def in_falling_order(x):
    """Which ones of each row's are no larger than any before them."""
    return x <= tl.associative_scan(x, 2, _smaller)


@triton.jit
def one_a_thread(x):
    """``(rows, SLOTS)`` as ``(rows, copies, SLOTS)``: enough elements for the threads of a warp.

    With fewer, Triton 3.6 keeps them as the row of experts is kept, all of them in every thread.
    """
    ROWS: tl.constexpr = x.shape[0]
    SLOTS: tl.constexpr = x.shape[1]
    COPIES: tl.constexpr = 32 // (ROWS * SLOTS) if ROWS * SLOTS < 32 else 1
    return tl.broadcast_to(x[:, None, :], (ROWS, COPIES, SLOTS))


@triton.jit
def _best_of(
    rows, bias, expert, valid, TOPK: tl.constexpr, SLOTS: tl.constexpr, SCORING: tl.constexpr
):
    """Whom the scores of all experts choose, and a softmax's terms."""
    logits = tl.load(rows + expert, mask=valid, other=0.0).to(tl.float32)
    choice, peak, inverse = scores_and_choice(logits, bias, expert, valid, SCORING)
    key = ordered(choice, bias is not None)
    return one_a_thread(best_positions(key, TOPK, expert.shape[1], SLOTS)), peak, inverse


@triton.jit
def route_tokens(
    gating_output, bias, topk_weights, topk_ids, first_token, num_tokens, stride_row, NUM_EXPERTS,
    SCALE: tl.constexpr, TOPK: tl.constexpr, RENORMALIZE: tl.constexpr, SCORING: tl.constexpr,
    TOKENS: tl.constexpr, EXPERTS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """All experts compete, for each of TOKENS tokens: the chosen ``(TOKENS, SLOTS)``.

    A quick way finds nearly always what the slow one would. Where it need not have, all tokens of
    the program take the slow one. A softmax without a bias chooses by the logits: their order is
    that of the scores, but for close ones, whose scores may be equal, and very small scores.
    """
    BY_LOGITS: tl.constexpr = bias is None and SCORING == "softmax"
    token = first_token.to(tl.int64) + tl.arange(0, TOKENS)[:, None]
    expert, slot = tl.arange(0, EXPERTS)[None, :], tl.arange(0, SLOTS)[None, :]
    rows = gating_output + token * stride_row
    valid = expert < tl.where(token < num_tokens, NUM_EXPERTS, 0)
    logits = tl.load(rows + expert, mask=valid, other=float("-inf")).to(tl.float32)
    if BY_LOGITS:
        logits = tl.where(is_finite(logits), logits, float("-inf"))
        peak, inverse = near_softmax(logits)
        key = ordered(logits, True)
        ids, bound = _largest_logits(key, _step(gating_output.dtype.element_ty), TOPK, SLOTS)
    else:
        choice, peak, inverse = scores_and_choice(logits, bias, expert, valid, SCORING)
        key = ordered(choice, bias is not None)
        ids, complete = likely_positions(key, TOPK, EXPERTS, SLOTS)
    mask = slot < tl.where(token < num_tokens, TOPK, 0)
    known, at = one_a_thread(mask), one_a_thread(token * TOPK + slot)
    near = rows[:, None]
    if SCORING == "softmax":
        peak, inverse = peak[:, None], inverse[:, None]
    picked = tl.load(near + ids, mask=known, other=0.0).to(tl.float32)
    weights = scores(picked, known & is_finite(picked), peak, inverse, SCORING)
    if BY_LOGITS:
        sure = (picked - bound[:, None] > 2.0**-20) & (weights > 2.0**-100)
        sure = sure & (tl.abs(peak) < 2.0**24)
        rank = (weights.to(tl.int32, bitcast=True).to(tl.int64) << 32) - ids
    else:
        sure = complete[:, None, None] > 0
        rank = tl.where(known, biased(weights, bias, ids, known), float("-inf"))
    sure = tl.where(known, (sure & in_falling_order(rank)).to(tl.int32), 1)
    if tl.min(tl.min(tl.min(sure, 2), 1), 0) == 0:
        ids, peak, inverse = _best_of(rows, bias, expert, valid, TOPK, SLOTS, SCORING)
        if SCORING == "softmax":
            peak, inverse = peak[:, None], inverse[:, None]
        weights = chosen_weights(near, ids, known, peak, inverse, SCORING)
    store_routing(topk_weights, topk_ids, at, known, weights, ids, RENORMALIZE, SCALE)
    return tl.max(tl.where(known, ids, -1), 1)
