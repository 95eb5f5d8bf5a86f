"""Triton kernel of the weighted sum."""

from __future__ import annotations

from functools import lru_cache

import triton
import triton.language as tl
from torch import Tensor

from moe_ops.dispatch.tiles import cdiv
from moe_ops.fake_impls.weight_and_reduce import moe_fused_mul_sum as empty_output
from moe_ops.fake_impls.weight_and_reduce import moe_fused_mul_sum_out as check_output
from moe_ops.kernels._runtime.dependent import take_turn
from moe_ops.kernels._runtime.launch import Launch
from moe_ops.kernels._runtime.slots import dense, local_experts, map_size, next_power_of_2


@triton.jit
def _mul_sum_kernel(
    inputs, topk_weights, topk_ids, expert_map, num_valid_tokens, out, num_experts,
    num_local_experts, WIDTH, stride_out, TOP_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program sums one piece (BLOCK columns) of a token's rows; skipped rows are not read."""
    take_turn()
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    width = WIDTH
    if num_valid_tokens is not None:
        width = tl.where(token < tl.load(num_valid_tokens), WIDTH, 0)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for j in tl.static_range(TOP_K):
        slot = token * TOP_K + j
        readable = width
        if topk_ids is not None:
            expert = local_experts(topk_ids, expert_map, slot, True, num_experts, num_local_experts)
            readable = tl.where(expert >= 0, width, 0)
        value = tl.load(inputs + slot * WIDTH + col, mask=col < readable, other=0.0)
        value = value.to(tl.float32)
        if topk_weights is not None:
            # The weight of a slot that is not read may be NaN.
            weight = tl.load(topk_weights + slot).to(tl.float32)
            value *= tl.where(readable > 0, weight, 0.0)
        total += value
    tl.store(out + token * stride_out + col, total.to(out.dtype.element_ty), mask=col < WIDTH)


@lru_cache(maxsize=1024)
def _reduce_launch(k: int, width: int) -> tuple[Launch, int]:
    """The kernel, and programs along a row."""
    block = min(1024, next_power_of_2(width))
    return Launch(_mul_sum_kernel, TOP_K=k, BLOCK=block), cdiv(width, block)


def moe_fused_mul_sum_out(
    inputs: Tensor,
    topk_weights: Tensor | None,
    topk_ids: Tensor | None,
    expert_map: Tensor | None,
    num_valid_tokens: Tensor | None,
    num_local_experts: int,
    *,
    out: Tensor,
) -> None:
    """Launch one program for each piece of a token's row."""
    check_output(
        inputs, topk_weights, topk_ids, expert_map, num_valid_tokens, num_local_experts, out=out
    )
    *slots, width = inputs.shape
    tokens, k = slots if topk_ids is None else topk_ids.shape
    if out.numel():
        kernel, pieces = _reduce_launch(k, width)
        kernel(
            (tokens, pieces),
            inputs.contiguous(),
            dense(topk_weights),
            dense(topk_ids),
            dense(expert_map),
            num_valid_tokens,
            out,
            map_size(expert_map, num_local_experts),
            num_local_experts,
            width,
            out.stride(0),
        )


def moe_fused_mul_sum(
    inputs: Tensor,
    topk_weights: Tensor | None,
    topk_ids: Tensor | None,
    expert_map: Tensor | None,
    num_valid_tokens: Tensor | None,
    num_local_experts: int,
) -> Tensor:
    """`moe_fused_mul_sum_out` into a new tensor."""
    out = empty_output(
        inputs, topk_weights, topk_ids, expert_map, num_valid_tokens, num_local_experts
    )
    moe_fused_mul_sum_out(
        inputs, topk_weights, topk_ids, expert_map, num_valid_tokens, num_local_experts, out=out
    )
    return out
