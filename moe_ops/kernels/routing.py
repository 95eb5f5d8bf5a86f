"""Triton kernels of the routing stage: one program routes one token, or with top-k a few."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from moe_ops.dispatch.tiles import MANY_TOKENS, cdiv
from moe_ops.fake_impls.routing import check_groups
from moe_ops.fake_impls.routing import fused_topk as empty_topk
from moe_ops.fake_impls.routing import grouped_topk as empty_grouped
from moe_ops.fake_impls.routing import hash_topk as empty_hashed
from moe_ops.fake_impls.routing import sparsemixer as empty_pair
from moe_ops.fake_impls.routing import topk_backward as empty_gradient
from moe_ops.kernels._routing.backward import topk_backward_kernel
from moe_ops.kernels._routing.choice import route_tokens
from moe_ops.kernels._routing.grouped_topk import grouped_topk_kernel
from moe_ops.kernels._routing.scores import (
    LOWEST,
    chosen_weights,
    is_finite,
    softmax_terms,
    store_routing,
)
from moe_ops.kernels._runtime.dependent import take_turn
from moe_ops.kernels._runtime.launch import Launch
from moe_ops.kernels._runtime.slots import dense, next_power_of_2

REGISTERS = 64
"""Registers per thread with many tokens, so that 32 one-warp programs fit on an SM."""


@triton.jit(do_not_specialize=["num_tokens"])
def _fused_topk_kernel(
    gating_output, bias, topk_weights, topk_ids, num_tokens, stride_row, NUM_EXPERTS: tl.constexpr,
    SCALE: tl.constexpr, TOPK: tl.constexpr, RENORMALIZE: tl.constexpr, SCORING: tl.constexpr,
    TOKENS: tl.constexpr, EXPERTS: tl.constexpr, SLOTS: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    """One program routes TOKENS tokens."""
    take_turn()
    route_tokens(
        gating_output, bias, topk_weights, topk_ids, tl.program_id(0).to(tl.int64) * TOKENS,
        num_tokens, stride_row, NUM_EXPERTS,
        SCALE, TOPK, RENORMALIZE, SCORING, TOKENS, EXPERTS, SLOTS, MANY,
    )  # fmt: skip


@triton.jit
def _hash_topk_kernel(
    gating_output, input_ids, table, topk_weights, topk_ids, stride_row, NUM_EXPERTS, VOCABULARY,
    SCALE: tl.constexpr, TOPK: tl.constexpr, RENORMALIZE: tl.constexpr, SCORING: tl.constexpr,
    EXPERTS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Experts come from the table; only softmax reads the logits of experts not chosen."""
    take_turn()
    token = tl.program_id(0).to(tl.int64)
    row = gating_output + token * stride_row
    slot = tl.arange(0, SLOTS)
    word = tl.load(input_ids + token).to(tl.int64)
    listed = slot < tl.where((word >= 0) & (word < VOCABULARY), TOPK, 0)
    ids = tl.load(table + word * TOPK + slot, mask=listed, other=-1)
    listed = listed & (ids >= 0) & (ids < NUM_EXPERTS)
    peak, inverse = 0.0, 0.0
    if SCORING == "softmax":
        expert = tl.arange(0, EXPERTS)
        valid = expert < NUM_EXPERTS
        logits = tl.load(row + expert, mask=valid, other=0.0).to(tl.float32)
        peak, inverse = softmax_terms(logits, valid & is_finite(logits))
    weights = chosen_weights(row, ids, listed, peak, inverse, SCORING)
    ids = tl.where(listed, ids, -1).to(tl.int32)
    at = token * TOPK + slot
    store_routing(topk_weights, topk_ids, at, slot < TOPK, weights, ids, RENORMALIZE, SCALE)


@triton.jit
def _sparsemixer_kernel(
    gating_output, topk_weights, topk_ids, stride_row, NUM_EXPERTS, THRESHOLD: tl.constexpr,
    EXPERTS: tl.constexpr,
):  # fmt: skip
    """Choose two experts, one after the other.

    Each has the largest logit left, and its weight is a softmax over the logits left that are close
    to it.
    """
    take_turn()
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS)
    valid = expert < NUM_EXPERTS
    logits = tl.load(gating_output + token * stride_row + expert, mask=valid, other=0.0)
    logits = logits.to(tl.float32)
    left = valid & is_finite(logits)
    logits = tl.where(left, logits, 0.0)
    choice = tl.where(valid, tl.where(left, logits, LOWEST), float("-inf"))
    for j in tl.static_range(2):
        best = tl.argmax(choice, 0, tie_break_left=True)
        peak = tl.max(choice, 0)
        factor = tl.maximum(tl.abs(logits), peak)
        far = tl.div_rn(peak - logits, tl.where(factor == 0, 1.0, factor)) > THRESHOLD
        close = left & (far == 0)
        below = tl.where(close, logits.to(tl.float64) - peak.to(tl.float64), 0.0)
        total = tl.sum(tl.where(close, tl.exp(below), 0.0), 0)
        weight = tl.where(total > 0, 1.0 / tl.where(total > 0, total, 1.0), 0.0)
        tl.store(topk_weights + token * 2 + j, weight.to(tl.float32))
        tl.store(topk_ids + token * 2 + j, best)
        choice = tl.where(expert == best, float("-inf"), choice)
        left = left & (expert != best)


def _block(count: int) -> int:
    """``count`` padded to a power of two, at least 4: reductions, also over pairs, need two."""
    return next_power_of_2(max(count, 4))


def _num_warps(lanes: int) -> int:
    return 1 if lanes <= 512 else 4 if lanes <= 2048 else 8


def _meaning(topk: int, renormalize: bool, scoring_func: str, scale: float) -> dict[str, Any]:
    """The constexpr arguments that all top-k kernels share."""
    return {
        "SCALE": scale,
        "TOPK": topk,
        "RENORMALIZE": renormalize,
        "SCORING": scoring_func,
        "SLOTS": _block(topk),
    }


def by_rows(gating_output: Tensor) -> Tensor:
    return gating_output if gating_output.stride(1) == 1 else gating_output.contiguous()


def topk_constants(
    tokens: int, num_experts: int, topk: int, renormalize: bool, scoring_func: str, scale: float
) -> dict[str, Any]:
    """The constexpr arguments of `route_tokens`."""
    meaning = _meaning(topk, renormalize, scoring_func, scale)
    experts = {"NUM_EXPERTS": num_experts, "EXPERTS": _block(num_experts)}
    return {**meaning, **experts, "TOKENS": tokens}


@lru_cache(maxsize=1024)
def _topk_launch(
    many: bool, num_experts: int, topk: int, renormalize: bool, scoring_func: str, scale: float
) -> tuple[int, Launch]:
    """Tokens per program, and the kernel.

    With many tokens a thread of a program has up to 16 experts and 4 slots. Only the
    exact path, which is rarely taken, needs more registers.
    """
    each = max(1, min(512 // _block(num_experts), 128 // _block(topk))) if many else 1
    limit = {"maxnreg": REGISTERS} if many and num_experts <= 512 else {}
    constants = topk_constants(each, num_experts, topk, renormalize, scoring_func, scale)
    return each, Launch(
        _fused_topk_kernel, **constants, MANY=many, **limit, num_warps=_num_warps(num_experts)
    )


def fused_topk(
    gating_output: Tensor,
    e_score_correction_bias: Tensor | None,
    topk: int,
    renormalize: bool,
    scoring_func: str,
    routed_scaling_factor: float,
) -> tuple[Tensor, Tensor]:
    """Launch one program per token, or one per few tokens if there are many."""
    bias, scale = e_score_correction_bias, routed_scaling_factor
    result = empty_topk(gating_output, bias, topk, renormalize, scoring_func, scale)
    tokens, num_experts = gating_output.shape
    if tokens:
        logits = by_rows(gating_output)
        each, launch = _topk_launch(
            tokens >= MANY_TOKENS, num_experts, topk, renormalize, scoring_func, scale
        )
        grid = (cdiv(tokens, each),)
        launch(grid, logits, dense(bias), *result, tokens, logits.stride(0))
    return result


@lru_cache(maxsize=1024)
def _grouped_launch(
    many: bool, num_experts: int, topk: int, renormalize: bool, scoring_func: str, scale: float,
    num_groups: int, topk_group: int, has_bias: bool,
) -> tuple[int, Launch]:  # fmt: skip
    """Tokens per program (one with softmax), and the kernel; see `_topk_launch`."""
    size, groups = num_experts // num_groups, _block(num_groups)
    width = max(_block(size), 128 // groups)
    lanes = groups * width
    many = many and lanes <= 512 and scoring_func != "softmax"
    meaning = _meaning(topk, renormalize, scoring_func, scale)
    each = max(1, min(512 // lanes, 128 // meaning["SLOTS"])) if many else 1
    # With padding, softmax also keeps masks in registers, which takes two warps.
    masked = scoring_func == "softmax" and 512 >= lanes > max(num_experts, 255)
    constants = dict(
        **meaning,
        NUM_GROUPS=num_groups,
        GROUP_SIZE=size,
        TOPK_GROUP=topk_group,
        BEST=2 if has_bias and size > 1 else 1,
        GROUPS=groups,
        WIDTH=width,
        TOKENS=each,
        **({"maxnreg": REGISTERS} if many else {}),
    )
    return each, Launch(
        grouped_topk_kernel, **constants, num_warps=2 if masked else _num_warps(lanes)
    )


def grouped_topk(
    gating_output: Tensor,
    e_score_correction_bias: Tensor | None,
    topk: int,
    renormalize: bool,
    scoring_func: str,
    routed_scaling_factor: float,
    num_expert_group: int,
    topk_group: int,
) -> tuple[Tensor, Tensor]:
    """Launch as `fused_topk` does; call `fused_topk` if every group is chosen."""
    bias, scale = e_score_correction_bias, routed_scaling_factor
    if topk_group == num_expert_group:
        check_groups(gating_output.shape[-1], topk, num_expert_group, topk_group)
        return fused_topk(gating_output, bias, topk, renormalize, scoring_func, scale)
    result = empty_grouped(
        gating_output, bias, topk, renormalize, scoring_func, scale, num_expert_group, topk_group
    )
    tokens, num_experts = gating_output.shape
    if tokens:
        logits, has_bias = by_rows(gating_output), bias is not None
        each, launch = _grouped_launch(
            tokens >= MANY_TOKENS,
            num_experts,
            topk,
            renormalize,
            scoring_func,
            scale,
            num_expert_group,
            topk_group,
            has_bias,
        )
        grid = (cdiv(tokens, each),)
        launch(grid, logits, dense(bias), *result, tokens, logits.stride(0))
    return result


@lru_cache(maxsize=1024)
def _hash_launch(
    num_experts: int, topk: int, renormalize: bool, scoring_func: str, scale: float
) -> Launch:
    return Launch(
        _hash_topk_kernel,
        **_meaning(topk, renormalize, scoring_func, scale),
        EXPERTS=_block(num_experts),
        num_warps=_num_warps(num_experts) if scoring_func == "softmax" else 1,
    )


def hash_topk(
    gating_output: Tensor,
    input_ids: Tensor,
    table: Tensor,
    renormalize: bool,
    scoring_func: str,
    routed_scaling_factor: float,
) -> tuple[Tensor, Tensor]:
    """Launch one program per token."""
    weighing = (renormalize, scoring_func, routed_scaling_factor)
    result = empty_hashed(gating_output, input_ids, table, *weighing)
    tokens, num_experts = gating_output.shape
    if tokens:
        logits, table = by_rows(gating_output), dense(table)
        vocabulary, topk = table.shape
        _hash_launch(num_experts, topk, *weighing)(
            (tokens,), logits, dense(input_ids), table, *result, logits.stride(0), num_experts,
            vocabulary
        )  # fmt: skip
    return result


@lru_cache(maxsize=1024)
def _sparsemixer_launch(num_experts: int, jitter_eps: float) -> Launch:
    return Launch(
        _sparsemixer_kernel,
        THRESHOLD=2 * jitter_eps,
        EXPERTS=_block(num_experts),
        num_warps=_num_warps(num_experts),
    )


def sparsemixer(gating_output: Tensor, jitter_eps: float) -> tuple[Tensor, Tensor]:
    """Launch one program per token."""
    result = empty_pair(gating_output, jitter_eps)
    tokens, num_experts = gating_output.shape
    if tokens:
        logits = by_rows(gating_output)
        _sparsemixer_launch(num_experts, jitter_eps)(
            (tokens,), logits, *result, logits.stride(0), num_experts
        )
    return result


@lru_cache(maxsize=1024)
def _topk_backward_launch(
    num_experts: int, topk: int, renormalize: bool, scoring_func: str, scale: float
) -> Launch:
    return Launch(
        topk_backward_kernel,
        **_meaning(topk, renormalize, scoring_func, scale),
        EXPERTS=_block(num_experts),
        num_warps=_num_warps(num_experts),
    )


def topk_backward(
    grad: Tensor,
    gating_output: Tensor,
    topk_ids: Tensor,
    renormalize: bool,
    scoring_func: str,
    routed_scaling_factor: float,
) -> Tensor:
    """Launch one program per token."""
    weighing = (renormalize, scoring_func, routed_scaling_factor)
    out = empty_gradient(grad, gating_output, topk_ids, *weighing)
    tokens, num_experts = gating_output.shape
    if tokens:
        logits = by_rows(gating_output)
        _topk_backward_launch(num_experts, topk_ids.shape[1], *weighing)(
            (tokens,), grad.contiguous(), logits, dense(topk_ids), out, logits.stride(0),
            num_experts
        )  # fmt: skip
    return out
