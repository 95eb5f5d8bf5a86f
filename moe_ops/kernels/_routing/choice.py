"""Ungrouped top-k: a program chooses the experts of its tokens among all experts."""

from __future__ import annotations

import triton
import triton.language as tl

from moe_ops.kernels._routing.lanes import (
    by_lanes,
    finalists,
    in_rounds,
    largest,
    load_lanes,
    of_tokens,
    sum_by_lanes,
)
from moe_ops.kernels._routing.near import exceeds, near_choice, near_exp
from moe_ops.kernels._routing.scores import (
    best_positions,
    biased,
    chosen_weights,
    exp64,
    is_finite,
    key_number,
    ordered,
    scores,
    scores_and_choice,
    signed_key,
    store_routing,
)


@triton.jit
def sort_key(key, position, COUNT: tl.constexpr):
    """Replace the low bits of keys by ``COUNT - 1 - position``: unique, ties to the lowest."""
    return (key | (COUNT - 1)) - position


@triton.jit
def chosen_of(keys, place, TOPK: tl.constexpr, EXPERTS: tl.constexpr, MANY: tl.constexpr):
    """The experts of the TOPK largest keys, the smallest of these keys, the largest key left.

    The experts are in descending order of their keys. With MANY tokens only the `finalists` of each
    lane compete, which takes fewer instructions. If a lane might hold a larger key than its last
    finalist, the largest key left is reported as ``0x7FFFFFFF`` (unknown), and the caller takes the
    exact path. With few tokens latency counts: all wait for the slowest, so all keys compete.
    """
    COUNT: tl.constexpr = keys.shape[0] * keys.shape[2] * keys.shape[3]
    if MANY and in_rounds(COUNT, TOPK):
        keys, last = finalists(keys)
        chosen, best, left = largest(keys, place, TOPK)
        left = tl.where(last >= best, 0x7FFFFFFF, left)
    else:
        chosen, best, left = largest(keys, place, TOPK)
    return EXPERTS - 1 - (chosen & (EXPERTS - 1)), best, left


@triton.jit
def _load_logits(rows, expert, EXPERTS: tl.constexpr, NUM_EXPERTS: tl.constexpr):
    """Logits in the layout of `by_lanes`, as float32; -inf past NUM_EXPERTS."""
    if NUM_EXPERTS == EXPERTS:
        logits = load_lanes(of_tokens(rows) + expert)
    else:
        logits = load_lanes(of_tokens(rows) + expert, expert < NUM_EXPERTS, float("-inf"))
    return logits.to(tl.float32)


@triton.constexpr_function
def _key_step(dtype):
    """The least difference between the keys of two different numbers of a dtype."""
    return {tl.bfloat16: 0x10000, tl.float16: 0x2000}.get(dtype, 1)


@triton.jit
def _choose_by_logits(
    rows, place,
    TOPK: tl.constexpr, EXPERTS: tl.constexpr, NUM_EXPERTS: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    """The experts with the largest logits, a bound for the logits left, the sum of exponentials.

    No logit left exceeds the bound, except one that equals a chosen logit and loses the tie. Ties
    are known exactly where STEP >= EXPERTS: keys of different logits then differ by more than the
    position bits that `sort_key` puts into them.

    Exponentials are of the logits themselves, not relative to the maximum, so that the sum need not
    wait for the maximum: see `near_exp`. A positive infinity or a NaN that is the largest key makes
    the sum wrong; `_near_softmax` then reports that it is not sure. Any other NaN counts as -inf,
    because the maximum of NaN and a number is the number.
    """
    STEP: tl.constexpr = _key_step(rows.dtype.element_ty)
    expert = by_lanes(EXPERTS)
    logits = _load_logits(rows, expert, EXPERTS, NUM_EXPERTS)
    total = sum_by_lanes(near_exp(tl.maximum(logits, -600.0).to(tl.float64)))
    key = signed_key(logits)
    if NUM_EXPERTS != EXPERTS:  # padding below -inf, as negative NaN are
        key = tl.where(expert < NUM_EXPERTS, key, -0x80000000)
    ids, best, left = chosen_of(sort_key(key, expert, EXPERTS), place, TOPK, EXPERTS, MANY)
    bound = left | (EXPERTS - 1)
    if STEP >= EXPERTS:
        equal = (left & -STEP) == (best & -STEP)
        bound = tl.where(equal, (best & -STEP) + ((best >> 31) & (STEP - 1)) - STEP, bound)
    return ids, key_number(bound)[:, None, None], total[:, None, None]


@triton.jit
def _near_softmax(picked, real, total):
    """float32 scores from a sum accurate to 2**-39, and which of them are surely rounded right.

    Those are larger than 2**-100, so that logits that differ by more than 2**-20 have scores that
    differ.
    """
    score = tl.where(real, exp64(picked.to(tl.float64)) / total, 0.0)
    above, below = (score * (1 + 2.0**-38)).to(tl.float32), (score * (1 - 2.0**-38)).to(tl.float32)
    return above, (above == below) & (above > 2.0**-100) & (tl.abs(picked) <= 256.0)


@triton.jit
def _choose_by_near_scores(
    rows, bias, place, TOPK: tl.constexpr, EXPERTS: tl.constexpr, NUM_EXPERTS: tl.constexpr,
    SCORING: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    """Top-k by approximate score plus bias, and a bound for the approximate sums left."""
    expert = by_lanes(EXPERTS)
    logits = _load_logits(rows, expert, EXPERTS, NUM_EXPERTS)
    choice = near_choice(logits, bias, expert, expert < NUM_EXPERTS, SCORING)
    keys = sort_key(signed_key(choice), expert, EXPERTS)
    ids, _, left = chosen_of(keys, place, TOPK, EXPERTS, MANY)
    return ids, key_number(left | (EXPERTS - 1))[:, None, None]


@triton.jit
def _choose_by_scores(
    rows, bias, expert, place, TOPK: tl.constexpr, NUM_EXPERTS: tl.constexpr, SCORING: tl.constexpr
):
    """Top-k by exact scores, from sort keys, whose lowest bits are positions.

    Returns:
        The experts; for each token 1 if no full key left is larger than a chosen one (the experts
        are then the right ones, though perhaps in another order); the terms of a softmax.
    """
    COUNT: tl.constexpr = expert.shape[1]
    valid = expert < NUM_EXPERTS
    logits = tl.load(rows + expert, mask=valid, other=float("-inf")).to(tl.float32)
    choice, peak, inverse = scores_and_choice(logits, bias, expert, valid, SCORING)
    key = ordered(choice, bias is not None)
    keys = sort_key(key, expert, COUNT)
    chosen, best, _ = largest(keys[None, :, :, None], place, TOPK)
    others = keys < best[:, None]
    left = tl.max(tl.where(others, key, -0x80000000), 1)
    least = tl.min(tl.where(others, 0x7FFFFFFF, key), 1)
    complete = (left <= least)[:, None, None]
    return COUNT - 1 - (chosen & (COUNT - 1)), complete, peak, inverse


@triton.jit
def in_falling_order(x, ids):
    """Which entries of each row are less than the entry before, or equal to it with a later id."""
    before = tl.maximum(tl.arange(0, x.shape[2]) - 1, 0)[None, None, :]
    before = tl.broadcast_to(before, x.shape)
    x_before, id_before = tl.gather(x, before, 2), tl.gather(ids, before, 2)
    return (x < x_before) | ((x == x_before) & (ids >= id_before))


@triton.jit
def one_a_thread(x):
    """Broadcast ``(rows, SLOTS)`` to ``(rows, copies, SLOTS)``, at least an element per thread.

    With fewer elements than threads of a warp, Triton 3.6 gives the tensor the layout of the row of
    experts, with all elements in every thread.
    """
    ROWS: tl.constexpr = x.shape[0]
    SLOTS: tl.constexpr = x.shape[1]
    COPIES: tl.constexpr = 32 // (ROWS * SLOTS) if ROWS * SLOTS < 32 else 1
    return tl.broadcast_to(x[:, None, :], (ROWS, COPIES, SLOTS))


@triton.jit
def _best_of(
    rows, bias, expert, real,
    TOPK: tl.constexpr, NUM_EXPERTS: tl.constexpr, SLOTS: tl.constexpr, SCORING: tl.constexpr,
):  # fmt: skip
    """The exact path: the top-k by the scores of all experts, and the scores of the chosen."""
    valid = expert < NUM_EXPERTS
    logits = tl.load(rows + expert, mask=valid, other=0.0).to(tl.float32)
    choice, peak, inverse = scores_and_choice(logits, bias, expert, valid, SCORING)
    key = ordered(choice, bias is not None)
    ids = one_a_thread(best_positions(key, TOPK, expert.shape[1], SLOTS))
    if SCORING == "softmax":
        peak, inverse = peak[:, None], inverse[:, None]
    return ids, chosen_weights(rows[:, None], ids, real, peak, inverse, SCORING)


@triton.jit
def route_tokens(
    gating_output, bias, topk_weights, topk_ids, first_token, num_tokens, stride_row,
    NUM_EXPERTS: tl.constexpr,
    SCALE: tl.constexpr, TOPK: tl.constexpr, RENORMALIZE: tl.constexpr, SCORING: tl.constexpr,
    TOKENS: tl.constexpr, EXPERTS: tl.constexpr, SLOTS: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    """Route TOKENS tokens among all experts; returns the chosen ids ``(TOKENS, SLOTS)``.

    A fast path nearly always finds what the exact path (`_best_of`) would. If it cannot prove so
    for every token of the program, all of them take the exact path.

    * Softmax without a bias chooses by logits. Their order is the order of the scores, except for
      close logits, whose scores may be equal, and for very small scores.
    * Other scoring with a bias chooses by approximate float32 scores (`near_choice`), whose order
      may be wrong where scores are close.
    * The rest (softmax with a bias, other scoring without one) chooses by exact scores in sort
      keys, whose order may be wrong where scores differ in their lowest bits only.
    """
    BY_LOGITS: tl.constexpr = bias is None and SCORING == "softmax"
    NEAR: tl.constexpr = bias is not None and SCORING != "softmax"
    token = first_token.to(tl.int64) + tl.arange(0, TOKENS)[:, None]
    expert, slot = tl.arange(0, EXPERTS)[None, :], tl.arange(0, SLOTS)[None, :]
    rows = gating_output + tl.minimum(token, num_tokens - 1) * stride_row
    mask = slot < tl.where(token < num_tokens, TOPK, 0)
    real, at = one_a_thread(mask), one_a_thread(token * TOPK + slot)
    place = one_a_thread(tl.zeros((TOKENS, 1), dtype=tl.int32) + slot)
    near, peak, inverse = rows[:, None], 0.0, 0.0
    if BY_LOGITS:
        ids, bound, total = _choose_by_logits(rows, place, TOPK, EXPERTS, NUM_EXPERTS, MANY)
    elif NEAR:
        ids, bound = _choose_by_near_scores(
            rows, bias, place, TOPK, EXPERTS, NUM_EXPERTS, SCORING, MANY
        )
    else:
        ids, sure, peak, inverse = _choose_by_scores(
            rows, bias, expert, place, TOPK, NUM_EXPERTS, SCORING
        )
        if SCORING == "softmax":
            peak, inverse = peak[:, None], inverse[:, None]
    picked = tl.load(near + ids, mask=real, other=0.0).to(tl.float32)
    if BY_LOGITS:
        weights, sure = _near_softmax(picked, real, total)
        sure = sure & (picked - bound > 2.0**-20)
        rank = weights
    else:
        weights = scores(picked, real & is_finite(picked), peak, inverse, SCORING)
        rank = tl.where(real, biased(weights, bias, ids, real), float("-inf"))
    if NEAR:
        sure = exceeds(rank, bound, SCORING, 1)
    sure = tl.where(real, (sure & in_falling_order(rank, ids)).to(tl.int32), 1)
    if tl.min(sure) == 0:
        ids, weights = _best_of(rows, bias, expert, real, TOPK, NUM_EXPERTS, SLOTS, SCORING)
    store_routing(topk_weights, topk_ids, at, real, weights, ids, RENORMALIZE, SCALE)
    return tl.max(tl.where(real, ids, -1), 1)
