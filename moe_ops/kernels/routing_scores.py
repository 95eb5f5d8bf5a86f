"""What the routing kernels share: scores of a row, rounds of argmax, final weights.

Scores are computed in float64 and rounded once to float32, so that they, and the experts chosen by
them, are those of the reference.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def is_finite(x):
    return (x == x) & (tl.abs(x) != float("inf"))


@triton.jit
def _log1p(z):
    """log(1 + z) for 0 <= z <= 1 in float64, also where 1 + z rounds."""
    rounded = 1.0 + z
    lost = rounded - 1.0
    return tl.where(lost > 0, tl.log(rounded) * (z / tl.where(lost > 0, lost, 1.0)), z)


@triton.jit
def softmax_terms(logits, finite):
    """The largest logit, and one over the sum of ``exp(logit - largest)`` (0 without any)."""
    peak = tl.max(tl.where(finite, logits, LOWEST), 0).to(tl.float64)
    weight = tl.where(finite, tl.exp(tl.where(finite, logits.to(tl.float64) - peak, 0.0)), 0.0)
    total = tl.sum(weight, 0)
    return peak, tl.where(total > 0, 1.0 / tl.where(total > 0, total, 1.0), 0.0)


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
def scores_and_choice(gating_output, bias, expert, valid, SCORING: tl.constexpr):
    """A row's scores, and what its experts are chosen by: -inf is no expert."""
    logits = tl.load(gating_output + expert, mask=valid, other=0.0).to(tl.float32)
    finite = valid & is_finite(logits)
    peak, inverse = 0.0, 0.0
    if SCORING == "softmax":
        peak, inverse = softmax_terms(logits, finite)
    score = scores(logits, finite, peak, inverse, SCORING)
    choice = score
    if bias is not None:
        choice = choice + tl.load(bias + expert, mask=valid, other=0.0).to(tl.float32)
        choice = tl.where(is_finite(choice), choice, LOWEST)
    return score, tl.where(valid, choice, float("-inf"))


@triton.jit
def best_positions(choice, score, TOPK: tl.constexpr, COUNT: tl.constexpr, SLOTS: tl.constexpr):
    """TOPK rounds of argmax, ties to the lowest position; scores and positions of the chosen."""
    position = tl.arange(0, COUNT)
    slot = tl.arange(0, SLOTS)
    weights = tl.zeros((SLOTS,), dtype=tl.float32)
    chosen = tl.zeros((SLOTS,), dtype=tl.int32)
    for j in range(TOPK):
        best = tl.argmax(choice, 0, tie_break_left=True)
        weight = tl.sum(tl.where(position == best, score, 0.0), 0)
        weights = tl.where(slot == j, weight, weights)
        chosen = tl.where(slot == j, best, chosen)
        choice = tl.where(position == best, float("-inf"), choice)
    return weights, chosen


@triton.jit
def store_routing(
    topk_weights, topk_ids, weights, ids, TOPK: tl.constexpr, RENORMALIZE: tl.constexpr,
    SCALE: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Divide by the sum (in float64, rounded to float32), multiply, and write a token's slots."""
    if RENORMALIZE:
        total = tl.sum(weights.to(tl.float64), 0).to(tl.float32)
        weights = tl.div_rn(weights, tl.where(total > 0, total, 1.0))
    slot = tl.arange(0, SLOTS)
    tl.store(topk_weights + slot, weights * SCALE, mask=slot < TOPK)
    tl.store(topk_ids + slot, ids, mask=slot < TOPK)
