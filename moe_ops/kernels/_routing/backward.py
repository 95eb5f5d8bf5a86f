"""Kernel of the gradient of router logits: one program per token, in float64."""

from __future__ import annotations

import triton
import triton.language as tl

from moe_ops.kernels._routing.scores import exp64, is_finite, scores, softmax_terms
from moe_ops.kernels._runtime.dependent import take_turn


@triton.jit
def _sigmoid64(x):
    """Sigmoid of float32 numbers, in float64."""
    decayed = exp64(tl.maximum(-tl.abs(x), -300.0).to(tl.float64))
    return tl.where(x >= 0, 1.0, decayed) / (1.0 + decayed)


@triton.jit
def topk_backward_kernel(
    grad, gating_output, topk_ids, out, stride_row, NUM_EXPERTS,
    SCALE: tl.constexpr, TOPK: tl.constexpr, RENORMALIZE: tl.constexpr, SCORING: tl.constexpr,
    SLOTS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """The gradient of one token's logits through the weights of its chosen experts."""
    take_turn()
    token = tl.program_id(0).to(tl.int64)
    row = gating_output + token * stride_row
    expert, slot = tl.arange(0, EXPERTS), tl.arange(0, SLOTS)
    valid = expert < NUM_EXPERTS
    logits = tl.load(row + expert, mask=valid, other=0.0).to(tl.float32)
    finite = valid & is_finite(logits)
    peak, inverse = 0.0, 0.0
    if SCORING == "softmax":
        peak, inverse = softmax_terms(logits, finite)
    score = scores(logits, finite, peak, inverse, SCORING).to(tl.float64)

    at = token * TOPK + slot
    ids = tl.load(topk_ids + at, mask=slot < TOPK, other=-1)
    routed = (ids >= 0) & (ids < NUM_EXPERTS)
    chosen = tl.load(row + ids, mask=routed, other=0.0).to(tl.float32)
    chosen = scores(chosen, routed & is_finite(chosen), peak, inverse, SCORING).to(tl.float64)
    slope = tl.load(grad + at, mask=routed, other=0.0).to(tl.float64) * SCALE
    if RENORMALIZE:
        total = tl.sum(chosen, 0)
        total = tl.where(total > 0, total, 1.0)
        slope = (slope - tl.sum(slope * chosen / total, 0)) / total

    slopes = tl.zeros((EXPERTS,), dtype=tl.float64)
    for j in tl.static_range(TOPK):
        mine = tl.sum(tl.where((slot == j) & routed, slope, 0.0), 0)
        its = tl.max(tl.where((slot == j) & routed, ids, -1), 0)
        slopes += tl.where(expert == its, mine, 0.0)

    x = tl.where(finite, logits, 0.0)
    if SCORING == "softmax":
        result = score * (slopes - tl.sum(slopes * score, 0))
    elif SCORING == "sigmoid":
        result = slopes * _sigmoid64(x) * _sigmoid64(-x)
    else:
        inner = tl.where(x > 20.0, 1.0, _sigmoid64(x))
        result = tl.where(score > 0, slopes * inner / (2.0 * tl.where(score > 0, score, 1.0)), 0.0)
    result = tl.where(finite, result, 0.0)
    tl.store(out + token * NUM_EXPERTS + expert, result.to(out.dtype.element_ty), mask=valid)
