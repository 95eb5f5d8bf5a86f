"""Fast approximations of scores, for where only the order of scores counts, and their error.

`choice` checks whether an approximation decides the order, and computes exact scores if not.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_ops.kernels._routing.scores import biased, is_finite


@triton.jit
def near_exp(x):
    """exp(x) for float64 x from -600 to 256, with a relative error up to 2**-39; see `_exp_parts`.

    The power of two is added to the exponent bits of ``p``, which neither overflows nor underflows
    in this range. Other x, NaN included, give meaningless numbers that the caller discards.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    WHOLE: tl.constexpr = 1.5 * 2.0**52
    shifted = x * LOG2E + WHOLE
    f = x * LOG2E - (shifted - WHOLE)
    p = f * 1.3344183484134179e-06 + 1.5314209223349525e-05
    p = p * f + 0.0001540309828656179
    p = p * f + 0.0013333434157560176
    p = p * f + 0.009618129558838935
    p = p * f + 0.05550410959228811
    p = p * f + 0.2402265069474259
    p = p * f + 0.6931471805412327
    p = p * f + 1.0
    exponent = shifted.to(tl.int64, bitcast=True) << 52
    return (p.to(tl.int64, bitcast=True) + exponent).to(tl.float64, bitcast=True)


@triton.jit
def near_sigmoid(logits):
    """Approximate float32 scores, see `nearness`; a logit that is not finite scores 0."""
    score = 1.0 / (1.0 + tl.exp(-logits))
    return tl.where(is_finite(logits), score, 0.0)


@triton.jit
def near_sqrtsoftplus(logits):
    """Approximate float32 scores of logits up to 64; 2**100, above any score, for larger logits.

    A logit that is not finite scores 0. ``log(1 + z)`` is computed as ``2 * atanh(z / (2 + z))``,
    whose series has no cancellation, so that small results are accurate too.
    """
    z = tl.exp(-tl.abs(logits))
    s = z / (2.0 + z)
    q = s * s
    p = q * (1 / 11) + 1 / 9
    p = p * q + 1 / 7
    p = p * q + 1 / 5
    p = p * q + 1 / 3
    softplus = tl.maximum(logits, 0.0) + 2.0 * s * (p * q + 1.0)
    score = tl.where(logits <= 64.0, tl.sqrt(softplus), 2.0**100)
    return tl.where(is_finite(logits), score, 0.0)


@triton.constexpr_function
def nearness(scoring):
    """Largest absolute error of the approximate scores."""
    return {"sigmoid": 2.0**-20, "sqrtsoftplus": 2.0**-18}[scoring]


@triton.jit
def near_choice(logits, bias, expert, valid, SCORING: tl.constexpr):
    """Approximate score plus bias, by which experts are chosen; -inf where there is no expert."""
    if SCORING == "sigmoid":
        score = near_sigmoid(logits)
    else:
        tl.static_assert(SCORING == "sqrtsoftplus")
        score = near_sqrtsoftplus(logits)
    return tl.where(valid, biased(score, bias, expert, valid), float("-inf"))


@triton.jit
def exceeds(rank, bound, SCORING: tl.constexpr, COUNT: tl.constexpr):
    """Whether ranks surely exceed every exact value whose approximation is at most ``bound``.

    Ranks and bound are approximate sums of COUNT choices, each with an error of up to `nearness`.
    The second term allows for rounding: with COUNT = 1 one rounding relative to the rank; with
    COUNT = 2 three roundings of terms whose magnitudes add up to at most ``2 * abs(rank) + 2``.
    """
    rounding = (tl.abs(rank) + (COUNT - 1)) * 2.0**-20
    return rank - bound > 2 * COUNT * nearness(SCORING) + rounding
