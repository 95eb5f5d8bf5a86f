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
def _exp_parts(x):
    """``p`` and a power of two whose product is exp(x), of float64 numbers from -300 to 0.

    A library's exponential branches, for one number after the other; this one does not. Below -300
    nothing is left in a float32.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    WHOLE: tl.constexpr = 1.5 * 2.0**52  # so large that what is added is rounded to an integer
    shifted = x * LOG2E + WHOLE
    power = ((shifted.to(tl.int64, bitcast=True) + 1023) << 52).to(tl.float64, bitcast=True)
    f = x * LOG2E - (shifted - WHOLE)  # from -1/2 to 1/2, where the polynomial is within 2**-53
    p = f * 4.4549605981865186e-10 + 7.072585949269223e-09
    p = p * f + 1.0178062445845774e-07
    p = p * f + 1.321544258792169e-06
    p = p * f + 1.525273382983612e-05
    p = p * f + 0.0001540353044173605
    p = p * f + 0.0013333558146416936
    p = p * f + 0.009618129107606888
    p = p * f + 0.0555041086648216
    p = p * f + 0.24022650695910097
    p = p * f + 0.6931471805599453
    return p * f + 1.0, power


@triton.jit
def exp64(x):
    p, power = _exp_parts(x)
    return p * power


@triton.jit
def signed_key(x):
    """int32 keys in the order of float32 numbers; a negative zero is less than another."""
    key = x.to(tl.int32, bitcast=True)
    return key ^ ((key >> 31) & 0x7FFFFFFF)


@triton.jit
def ordered(choice, SIGNED: tl.constexpr):
    """int32 keys in the order of float32 numbers, of which a warp finds the largest at once."""
    if SIGNED:  # not only -inf is negative
        return signed_key(choice + 0.0)
    return choice.to(tl.int32, bitcast=True)


@triton.jit
def number(key):
    """The float32 number that has this key among signed ones."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _shares(x, peak):
    """`_exp_parts` of ``x - peak``; of what is not finite or far below the power of two is 0."""
    near = tl.abs(x - peak) <= 300.0
    distance = tl.where(near, x, peak).to(tl.float64) - peak.to(tl.float64)
    p, power = _exp_parts(distance)
    return p, tl.where(near, power, 0.0)


@triton.jit
def _one_over_sum(x):
    """Along the last axis, of float64 numbers from 0 to 1; or 0.

    What is added up are the bits of float64 numbers of one exponent, from 2 to 3, whose sum is that
    of their fractions: the 2s of so many numbers (a power of two from 4 on) are lost above the
    highest bit.
    """
    COUNT: tl.constexpr = x.shape[-1]
    ONES: tl.constexpr = 2.0 if COUNT <= 2048 else COUNT / 1024.0
    units = tl.sum((x + ONES).to(tl.int64, bitcast=True), -1, keep_dims=True)
    total = units.to(tl.float64) * (ONES * 2.0**-52)
    return tl.where(total > 0, 1.0 / tl.where(total > 0, total, 1.0), 0.0)


@triton.jit
def _peak(x):
    """The largest along the last axis, as a finite number."""
    return tl.maximum(number(tl.max(ordered(x, True), -1, keep_dims=True)), LOWEST)


@triton.jit
def _softmax(x, finite):
    """Along the last axis: the largest, ``exp(x - largest)``, and one over their sum (or 0).

    What is not finite counts as -inf, whose exponential is 0.
    """
    x = tl.where(finite, x, float("-inf"))
    peak = _peak(x)
    p, power = _shares(x, peak)
    return peak, p * power, _one_over_sum(p * power)


@triton.jit
def softmax_terms(logits, finite):
    """The largest logit, and one over the sum of ``exp(logit - largest)`` (0 without any)."""
    peak, _, inverse = _softmax(logits, finite)
    return peak, inverse


@triton.jit
def scores(logits, finite, peak, inverse, SCORING: tl.constexpr):
    """float32 scores of float32 logits; what is not finite (or no expert) scores 0."""
    x = tl.where(finite, logits, 0.0)
    if SCORING == "softmax":
        p, power = _shares(x, peak)
        score = p * power * inverse
    else:
        decayed = exp64(tl.maximum(-tl.abs(x), -300.0).to(tl.float64))
        if SCORING == "sigmoid":
            score = tl.where(x >= 0, 1.0, decayed) / (1.0 + decayed)
        else:
            tl.static_assert(SCORING == "sqrtsoftplus")
            x = x.to(tl.float64)
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
