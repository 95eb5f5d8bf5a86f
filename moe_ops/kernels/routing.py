"""Triton kernels of the routing stage."""

from __future__ import annotations

from functools import lru_cache

import triton
import triton.language as tl
from torch import Tensor

from moe_ops.fake_impls.routing import fused_topk as empty_topk
from moe_ops.kernels.launch import Launch
from moe_ops.kernels.slots import dense, next_power_of_2

_LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def _scores(logits, valid, SCORING: tl.constexpr):
    """float32 scores of one row; what is not finite (or no expert) scores 0."""
    finite = valid & (logits == logits) & (tl.abs(logits) != float("inf"))
    if SCORING == "sigmoid":
        score = tl.where(finite, tl.sigmoid(logits), 0.0)
    else:
        tl.static_assert(SCORING == "softmax")
        peak = tl.max(tl.where(finite, logits, _LOWEST), 0)
        weight = tl.where(finite, tl.exp(tl.where(finite, logits - peak, 0.0)), 0.0)
        total = tl.sum(weight, 0)
        score = tl.div_rn(weight, tl.where(total > 0, total, 1.0))
    return score


@triton.jit
def _fused_topk_kernel(
    gating_output, bias, topk_weights, topk_ids, stride_row, NUM_EXPERTS,
    SCALE: tl.constexpr, TOPK: tl.constexpr, RENORMALIZE: tl.constexpr, SCORING: tl.constexpr,
    EXPERTS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """One program routes one token: k rounds of argmax, ties to the lowest index."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS)
    valid = expert < NUM_EXPERTS
    logits = tl.load(gating_output + token * stride_row + expert, mask=valid, other=0.0)
    score = _scores(logits.to(tl.float32), valid, SCORING)
    choice = score
    if bias is not None:
        choice = choice + tl.load(bias + expert, mask=valid, other=0.0).to(tl.float32)
        finite = (choice == choice) & (tl.abs(choice) != float("inf"))
        choice = tl.where(finite, choice, _LOWEST)
    choice = tl.where(valid, choice, float("-inf"))

    slot = tl.arange(0, SLOTS)
    weights = tl.zeros((SLOTS,), dtype=tl.float32)
    ids = tl.zeros((SLOTS,), dtype=tl.int32)
    total = 0.0
    for j in tl.static_range(TOPK):
        best = tl.argmax(choice, 0, tie_break_left=True)
        weight = tl.sum(tl.where(expert == best, score, 0.0), 0)
        weights = tl.where(slot == j, weight, weights)
        ids = tl.where(slot == j, best, ids)
        total += weight
        choice = tl.where(expert == best, float("-inf"), choice)
    if RENORMALIZE:
        weights = tl.div_rn(weights, tl.where(total > 0, total, 1.0))
    at = token * TOPK + slot
    tl.store(topk_weights + at, weights * SCALE, mask=slot < TOPK)
    tl.store(topk_ids + at, ids, mask=slot < TOPK)


@lru_cache(maxsize=1024)
def _launch(
    num_experts: int, topk: int, renormalize: bool, scoring_func: str, scale: float
) -> Launch:
    experts = next_power_of_2(max(num_experts, 2))
    return Launch(
        _fused_topk_kernel,
        SCALE=scale,
        TOPK=topk,
        RENORMALIZE=renormalize,
        SCORING=scoring_func,
        EXPERTS=experts,
        SLOTS=next_power_of_2(max(topk, 2)),
        num_warps=1 if experts <= 512 else 4,
    )


def fused_topk(
    gating_output: Tensor,
    e_score_correction_bias: Tensor | None,
    topk: int,
    renormalize: bool,
    scoring_func: str,
    routed_scaling_factor: float,
) -> tuple[Tensor, Tensor]:
    """Launch one program a token."""
    topk_weights, topk_ids = empty_topk(
        gating_output,
        e_score_correction_bias,
        topk,
        renormalize,
        scoring_func,
        routed_scaling_factor,
    )
    tokens, num_experts = gating_output.shape
    if tokens:
        if gating_output.stride(1) != 1:
            gating_output = gating_output.contiguous()
        _launch(num_experts, topk, renormalize, scoring_func, routed_scaling_factor)(
            (tokens,),
            gating_output,
            dense(e_score_correction_bias),
            topk_weights,
            topk_ids,
            gating_output.stride(0),
            num_experts,
        )
    return topk_weights, topk_ids
