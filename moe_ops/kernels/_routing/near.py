"""What stands for scores where only their order counts, and how near to them it is.

`choice` looks whether that decides, and takes the scores themselves where it does not.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_ops.kernels._routing.scores import biased, is_finite


@triton.jit
def near_exp(x):
    """exp(x) of float64 numbers from -600 to 256, within 2**-39 of it; see `_exp_parts`.

    The power of two is added to the exponent of ``p``: of such numbers that neither over- nor
    underflows. Others, NaN too, come to nothing of use, without harm.
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
    """float32 scores, as near as `nearness` says; what is not finite scores 0."""
    score = 1.0 / (1.0 + tl.exp(-logits))
    return tl.where(is_finite(logits), score, 0.0)


@triton.jit
def near_sqrtsoftplus(logits):
    """float32 scores of logits up to 64; 2**100, more than any score, for those above.

    What is not finite scores 0. ``log(1 + z)`` is ``2 * atanh(z / (2 + z))``: a series without
    differences, so that small ones are as exact.
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
    """How far from the scores these are at most."""
    return {"sigmoid": 2.0**-20, "sqrtsoftplus": 2.0**-18}[scoring]


@triton.jit
def near_choice(logits, bias, expert, valid, SCORING: tl.constexpr):
    """What experts are nearly chosen by: the sums of scores and a bias; -inf is no expert."""
    if SCORING == "sigmoid":
        score = near_sigmoid(logits)
    else:
        tl.static_assert(SCORING == "sqrtsoftplus")
        score = near_sqrtsoftplus(logits)
    return tl.where(valid, biased(score, bias, expert, valid), float("-inf"))


@triton.jit
def exceeds(rank, bound, SCORING: tl.constexpr, COUNT: tl.constexpr):
    """Whether ranks are larger than whatever is nearly no larger than a bound.

    Both are nearly sums of COUNT choices. These are rounded, which the second term allows for: of
    one, by as little of it; of two, which add up to no more than twice the sum and 2 without signs,
    three times.
    """
    rounding = (tl.abs(rank) + (COUNT - 1)) * 2.0**-20
    return rank - bound > 2 * COUNT * nearness(SCORING) + rounding
