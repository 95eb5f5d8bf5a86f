"""What the routing kernels share: scores of rows, the positions of the best, final weights.

Scores are computed in float64 and rounded once to float32, so that they, and the experts chosen by
them, are those of the reference. Sums are those of integers, whose order does not matter: how many
tokens a program routes decides how they are added, and must not decide what comes out.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def is_finite(x):
    return tl.abs(x) < float("inf")  # not so of NaN


@triton.jit
def _log1p(z):
    """log(1 + z) for 0 <= z <= 1 in float64, also where 1 + z rounds."""
    rounded = 1.0 + z
    lost = rounded - 1.0
    return tl.where(lost > 0, tl.log(rounded) * (z / tl.where(lost > 0, lost, 1.0)), z)


@triton.jit
def _sum(x, per_bound, bound):
    """Along the last axis, of float64 numbers from 0 to ``bound``.

    Each is rounded to a multiple of the smallest unit with which the sum of all fits into an int64.
    ``bound`` and ``per_bound``, one over it, are powers of two.
    """
    COUNT: tl.constexpr = x.shape[-1]
    PER_UNIT: tl.constexpr = 2.0**62 / COUNT
    UNIT: tl.constexpr = COUNT * 2.0**-62
    units = (x * (per_bound * PER_UNIT) + 0.5).to(tl.int64)
    return tl.sum(units, -1, keep_dims=True).to(tl.float64) * (bound * UNIT)


@triton.jit
def _power_of_two(exponent):
    """float64 2**exponent, of int32."""
    return ((1023 + exponent).to(tl.int64) << 52).to(tl.float64, bitcast=True)


@triton.jit
def _total(weights):
    """The sum along the last axis of float32 numbers from 0 on, rounded to float32."""
    largest = tl.max(weights, -1, keep_dims=True)
    above = (largest.to(tl.int32, bitcast=True) >> 23) - 126  # less than 2**above
    x = weights.to(tl.float64)
    return _sum(x, _power_of_two(-above), _power_of_two(above)).to(tl.float32)


@triton.jit
def _softmax(x, finite):
    """Along the last axis: the largest, ``exp(x - largest)``, and one over their sum (or 0).

    What is not finite counts as -inf, whose exponential is 0.
    """
    x = tl.where(finite, x, float("-inf"))
    peak = tl.maximum(tl.max(x, -1, keep_dims=True), LOWEST).to(tl.float64)
    weight = tl.exp(x.to(tl.float64) - peak)
    total = _sum(weight, 1.0, 1.0)
    return peak, weight, tl.where(total > 0, 1.0 / tl.where(total > 0, total, 1.0), 0.0)


@triton.jit
def softmax_terms(logits, finite):
    """The largest logit, and one over the sum of ``exp(logit - largest)`` (0 without any)."""
    peak, _, inverse = _softmax(logits, finite)
    return peak, inverse


@triton.jit
def scores(logits, finite, peak, inverse, SCORING: tl.constexpr):
    """float32 scores of float32 logits; what is not finite (or no expert) scores 0."""
    x = tl.where(finite, logits, 0.0).to(tl.float64)
    if SCORING == "softmax":
        score = tl.exp(tl.where(finite, x - peak, 0.0)) * inverse
    else:
        decayed = tl.exp(-tl.abs(x))
        if SCORING == "sigmoid":
            score = tl.where(x >= 0, 1.0, decayed) / (1.0 + decayed)
        else:
            tl.static_assert(SCORING == "sqrtsoftplus")
            score = tl.sqrt(tl.where(x > 20.0, x, tl.maximum(x, 0.0) + _log1p(decayed)))
    return tl.where(finite, score.to(tl.float32), 0.0)


@triton.jit
def biased(score, bias, expert, valid):
    """What experts are chosen by."""
    choice = score
    if bias is not None:
        choice = choice + tl.load(bias + expert, mask=valid, other=0.0).to(tl.float32)
        choice = tl.where(is_finite(choice), choice, LOWEST)
    return choice


@triton.jit
def scores_and_choice(logits, bias, expert, valid, SCORING: tl.constexpr):
    """What the experts of rows are chosen by (-inf is no expert), and a softmax's terms."""
    finite = valid & is_finite(logits)
    peak, inverse = 0.0, 0.0
    if SCORING == "softmax":
        peak, weight, inverse = _softmax(logits, finite)
        choice = (weight * inverse).to(tl.float32)
    else:
        choice = scores(logits, finite, peak, inverse, SCORING)
    return tl.where(valid, biased(choice, bias, expert, valid), float("-inf")), peak, inverse


@triton.jit
def in_best_groups(
    choice, NUM_GROUPS: tl.constexpr, TOPK_GROUP: tl.constexpr, BEST: tl.constexpr,
    GROUPS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """``choice`` with -inf outside of the groups whose BEST (one or two) largest sum is best."""
    members = tl.reshape(choice, (GROUPS, WIDTH))
    group_score = tl.max(members, 1)
    if BEST == 2:
        first = tl.argmax(members, 1, tie_break_left=True)
        others = tl.where(tl.arange(0, WIDTH)[None, :] == first[:, None], float("-inf"), members)
        group_score = group_score + tl.max(others, 1)
    group = tl.arange(0, GROUPS)
    group_score = tl.where(group < NUM_GROUPS, tl.maximum(group_score, LOWEST), float("-inf"))
    # No reshape back: Triton 3.6 reorders one that only an argmax reads, and so its positions.
    own_group = tl.arange(0, GROUPS * WIDTH) // WIDTH
    kept = tl.zeros((GROUPS * WIDTH,), dtype=tl.int32)
    for _ in range(TOPK_GROUP):
        best = tl.argmax(group_score, 0, tie_break_left=True)
        kept = tl.where(own_group == best, 1, kept)
        group_score = tl.where(group == best, float("-inf"), group_score)
    return tl.where(kept > 0, choice, float("-inf"))


@triton.jit
def ordered(choice, SIGNED: tl.constexpr):
    """int32 keys in the order of float32 numbers, of which a warp finds the largest at once."""
    if SIGNED:  # not only -inf is negative
        choice = choice + 0.0  # no negative zero
    key = choice.to(tl.int32, bitcast=True)
    if SIGNED:
        key = key ^ ((key >> 31) & 0x7FFFFFFF)
    return key


@triton.jit
def best_positions(key, TOPK: tl.constexpr, COUNT: tl.constexpr, SLOTS: tl.constexpr):
    """The TOPK largest of each row of ``(rows, COUNT)``, ties to the lowest position.

    Rounds of a maximum and of the lowest position that has it, both of integers, which a warp
    reduces in one instruction. (Halving the rounds' work by looking at pairs needs a reshape and a
    split, which Triton 3.6 gets wrong for some sizes on the GPU.)
    """
    at, slot = tl.arange(0, COUNT)[None, :], tl.arange(0, SLOTS)[None, :]
    chosen = tl.zeros((key.shape[0], SLOTS), dtype=tl.int32)
    for j in range(TOPK):
        best = tl.max(key, 1, keep_dims=True)
        position = tl.min(tl.where(key == best, at, COUNT), 1, keep_dims=True)
        chosen = tl.where(slot == j, position, chosen)
        key = tl.where(at == position, -0x80000000, key)  # less than -inf
    return chosen


@triton.jit
def likely_positions(key, TOPK: tl.constexpr, COUNT: tl.constexpr, SLOTS: tl.constexpr):
    """What `best_positions` finds, unless keys differ in their lowest bits only.

    In place of those bits goes the position, so that one maximum a round finds both. To pass over
    what was found, no key need change: an addend makes the last one found the least of all, modulo
    2**32, and keeps the order of the others.

    Returns:
        The positions, and for each row 1 if no key left is larger than a chosen one: then these are
        the best, though perhaps in another order.
    """
    at, slot = tl.arange(0, COUNT)[None, :], tl.arange(0, SLOTS)[None, :]
    packed = (key & -COUNT) | (COUNT - 1 - at)
    chosen = tl.zeros((key.shape[0], SLOTS), dtype=tl.int32)
    best = tl.zeros((key.shape[0], 1), dtype=tl.int32)
    addend = best
    for j in range(TOPK):
        best = tl.max(packed + addend, 1, keep_dims=True) - addend
        chosen = tl.where(slot == j, best, chosen)
        addend = -0x80000000 - best
    left = tl.max(tl.where(packed < best, key, -0x80000000), 1)
    least = tl.min(tl.where(packed < best, 0x7FFFFFFF, key), 1)
    return COUNT - 1 - (chosen & (COUNT - 1)), (left <= least).to(tl.int32)


@triton.jit
def _smaller(x, y):
    return tl.minimum(x, y)


@triton.jit
def in_falling_order(x):
    """``(rows, copies)`` of ``(rows, copies, SLOTS)``: 1 if none is larger than one before it."""
    return tl.min((x <= tl.associative_scan(x, 2, _smaller)).to(tl.int32), 2)


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
def chosen_weights(rows, ids, known, peak, inverse, SCORING: tl.constexpr):
    """The scores of some experts of rows."""
    logits = tl.load(rows + ids, mask=known, other=0.0).to(tl.float32)
    return scores(logits, known & is_finite(logits), peak, inverse, SCORING)


@triton.jit
def store_routing(
    topk_weights, topk_ids, at, mask, weights, ids, RENORMALIZE: tl.constexpr, SCALE: tl.constexpr
):  # fmt: skip
    """Divide by the sum, multiply, and write tokens' slots."""
    if RENORMALIZE:
        total = _total(weights)
        weights = tl.div_rn(weights, tl.where(total > 0, total, 1.0))
    tl.store(topk_weights + at, weights * SCALE, mask=mask)
    tl.store(topk_ids + at, ids, mask=mask)


@triton.jit
def route_tokens(
    gating_output, bias, topk_weights, topk_ids, first_token, num_tokens, stride_row, NUM_EXPERTS,
    SCALE: tl.constexpr, TOPK: tl.constexpr, RENORMALIZE: tl.constexpr, SCORING: tl.constexpr,
    TOKENS: tl.constexpr, EXPERTS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """All experts compete, for each of TOKENS tokens: the chosen ``(TOKENS, SLOTS)``.

    A quick way finds nearly always what the slow one would. Where it need not have (the chosen are
    not in falling order, or a better one is left), all tokens of the program take the slow one.
    """
    token = first_token.to(tl.int64) + tl.arange(0, TOKENS)[:, None]
    expert, slot = tl.arange(0, EXPERTS)[None, :], tl.arange(0, SLOTS)[None, :]
    rows = gating_output + token * stride_row
    valid = expert < tl.where(token < num_tokens, NUM_EXPERTS, 0)
    logits = tl.load(rows + expert, mask=valid, other=0.0).to(tl.float32)
    choice, peak, inverse = scores_and_choice(logits, bias, expert, valid, SCORING)
    key = ordered(choice, bias is not None)
    chosen, complete = likely_positions(key, TOPK, EXPERTS, SLOTS)
    mask = slot < tl.where(token < num_tokens, TOPK, 0)
    known, at = one_a_thread(mask), one_a_thread(token * TOPK + slot)
    rows = rows[:, None]
    if SCORING == "softmax":
        peak, inverse = peak[:, None], inverse[:, None]
    ids = one_a_thread(chosen)
    weights = chosen_weights(rows, ids, known, peak, inverse, SCORING)
    choice = tl.where(known, biased(weights, bias, ids, known), float("-inf"))
    if tl.min(complete, 0) * tl.min(tl.min(in_falling_order(choice), 1), 0) == 0:
        chosen = best_positions(key, TOPK, EXPERTS, SLOTS)
        ids = one_a_thread(chosen)
        weights = chosen_weights(rows, ids, known, peak, inverse, SCORING)
    store_routing(topk_weights, topk_ids, at, known, weights, ids, RENORMALIZE, SCALE)
    return tl.where(mask, chosen, -1)
