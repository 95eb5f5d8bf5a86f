"""Steps shared by the routing kernels: exact scores, top-k positions, final weights.

Scores are computed in float64 and rounded once to float32, so that the scores and the chosen
experts equal the reference's. Sums are taken over integers, whose result does not depend on the
order of addition: that order changes with the number of tokens per program, the result must not.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_ops.kernels._routing.lanes import load_lanes

LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def is_finite(x):
    return tl.abs(x) < float("inf")  # False for NaN


@triton.jit
def _log1p(z):
    """log(1 + z) for 0 <= z <= 1 in float64, accurate also if 1 + z is rounded."""
    rounded = 1.0 + z
    lost = rounded - 1.0
    return tl.where(lost > 0, tl.log(rounded) * (z / tl.where(lost > 0, lost, 1.0)), z)


@triton.jit
def _sum(x, per_bound, bound):
    """Sum float64 numbers from 0 to ``bound`` along the last axis, in any order the same.

    Each number is rounded to a multiple of the smallest unit with which the sum fits into an int64.
    ``bound`` and ``per_bound = 1 / bound`` are powers of two.
    """
    COUNT: tl.constexpr = x.shape[-1]
    PER_UNIT: tl.constexpr = 2.0**62 / COUNT
    UNIT: tl.constexpr = COUNT * 2.0**-62
    units = (x * (per_bound * PER_UNIT) + 0.5).to(tl.int64)
    return tl.sum(units, -1, keep_dims=True).to(tl.float64) * (bound * UNIT)


@triton.jit
def _power_of_two(exponent):
    """2**exponent as float64, for an int32 exponent."""
    return ((1023 + exponent).to(tl.int64) << 52).to(tl.float64, bitcast=True)


@triton.jit
def _total(weights):
    """Sum non-negative float32 numbers along the last axis, rounded to float32."""
    largest = tl.max(weights, -1, keep_dims=True)
    above = (largest.to(tl.int32, bitcast=True) >> 23) - 126  # largest < 2**above
    x = weights.to(tl.float64)
    return _sum(x, _power_of_two(-above), _power_of_two(above)).to(tl.float32)


@triton.jit
def _exp_parts(x):
    """``p`` and a power of two whose product is exp(x), for float64 x from -300 to 0.

    The library's float64 exponential branches per element; this one does not. Below -300 exp(x) is
    0 in float32.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    WHOLE: tl.constexpr = 1.5 * 2.0**52  # adding it rounds to an integer
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
    """int32 keys in the order of float32 numbers, -0.0 below 0.0."""
    key = x.to(tl.int32, bitcast=True)
    return key ^ ((key >> 31) & 0x7FFFFFFF)


@triton.jit
def ordered(choice, SIGNED: tl.constexpr):
    """int32 keys in the order of float32 numbers: a warp reduces integers in one instruction."""
    if SIGNED:  # other numbers than -inf may be negative
        return signed_key(choice + 0.0)
    return choice.to(tl.int32, bitcast=True)


@triton.jit
def key_number(key):
    """The float32 number of a `signed_key`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _shares(x, peak):
    """`_exp_parts` of ``x - peak``; the power of two is 0 unless x is within 300 of the peak."""
    near = tl.abs(x - peak) <= 300.0
    distance = tl.where(near, x, peak).to(tl.float64) - peak.to(tl.float64)
    p, power = _exp_parts(distance)
    return p, tl.where(near, power, 0.0)


@triton.jit
def _one_over_sum(x):
    """1 / sum of float64 numbers from 0 to 1 along the last axis; 0 if the sum is 0.

    Adding ONES gives all numbers the same exponent, and their bits are summed as int64. The axis
    has a power of two of at least 4 elements, so that the sum of the bits of ONES overflows to 0
    and the sum of the fractions is left.
    """
    COUNT: tl.constexpr = x.shape[-1]
    ONES: tl.constexpr = 2.0 if COUNT <= 2048 else COUNT / 1024.0
    units = tl.sum((x + ONES).to(tl.int64, bitcast=True), -1, keep_dims=True)
    total = units.to(tl.float64) * (ONES * 2.0**-52)
    return tl.where(total > 0, 1.0 / tl.where(total > 0, total, 1.0), 0.0)


@triton.jit
def _peak(x):
    """The maximum along the last axis, at least the lowest finite number."""
    return tl.maximum(key_number(tl.max(ordered(x, True), -1, keep_dims=True)), LOWEST)


@triton.jit
def _softmax(x, finite):
    """The terms of a softmax along the last axis: the peak, ``exp(x - peak)``, 1 / sum (or 0).

    A number that is not finite counts as -inf, whose exponential is 0.
    """
    x = tl.where(finite, x, float("-inf"))
    peak = _peak(x)
    p, power = _shares(x, peak)
    return peak, p * power, _one_over_sum(p * power)


@triton.jit
def softmax_terms(logits, finite):
    """The largest logit, and 1 / sum of ``exp(logit - largest)`` (0 without a finite logit)."""
    peak, _, inverse = _softmax(logits, finite)
    return peak, inverse


@triton.jit
def scores(logits, finite, peak, inverse, SCORING: tl.constexpr):
    """float32 scores of float32 logits; 0 where ``finite`` is false."""
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
    """The score plus the bias if there is one, by which experts are chosen."""
    choice = score
    if bias is not None:
        choice = choice + load_lanes(bias + expert, valid, 0.0).to(tl.float32)
        choice = tl.where(is_finite(choice), choice, LOWEST)
    return choice


@triton.jit
def scores_and_choice(logits, bias, expert, valid, SCORING: tl.constexpr):
    """The score plus bias by which experts are chosen (-inf: no expert), and a softmax's terms."""
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
    """Positions of the TOPK largest keys of each row of ``(rows, COUNT)``, ties to the lowest.

    Each round finds the maximum, then the lowest position that has it. Both are integer reductions,
    which a warp does in one instruction. (Halving the work by reducing pairs needs a reshape and a
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
def chosen_weights(rows, ids, real, peak, inverse, SCORING: tl.constexpr):
    """The scores of the experts ``ids`` of rows."""
    logits = tl.load(rows + ids, mask=real, other=0.0).to(tl.float32)
    return scores(logits, real & is_finite(logits), peak, inverse, SCORING)


@triton.jit
def store_routing(
    topk_weights, topk_ids, at, mask, weights, ids, RENORMALIZE: tl.constexpr, SCALE: tl.constexpr
):  # fmt: skip
    """Write the slots of tokens, with weights divided by their sum (RENORMALIZE), times SCALE."""
    if RENORMALIZE:
        total = _total(weights)
        weights = tl.div_rn(weights, tl.where(total > 0, total, 1.0))
    tl.store(topk_weights + at, weights * SCALE, mask=mask)
    tl.store(topk_ids + at, ids, mask=mask)
