"""Triton kernels that adjust a routing after top-k."""

from __future__ import annotations

from functools import lru_cache

import triton
import triton.language as tl
from torch import Tensor

from moe_ops.dispatch.tiles import cdiv
from moe_ops.fake_impls.routing_adjust import adjust_routing as empty_routing
from moe_ops.fake_impls.routing_adjust import zero_experts as empty_split
from moe_ops.kernels._runtime.dependent import take_turn
from moe_ops.kernels._runtime.launch import Launch
from moe_ops.kernels._runtime.slots import dense, next_power_of_2

_BLOCK = 256


@triton.jit(do_not_specialize=["num_slots"])
def _adjust_kernel(
    topk_weights, topk_ids, per_expert_scale, is_padding, out_weights, out_ids, num_slots,
    NUM_EXPERTS, TOP_K: tl.constexpr, WIDTH: tl.constexpr, SHARED_WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program writes BLOCK slots; WIDTH of them belong to a token."""
    take_turn()
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = at < num_slots
    token, slot = at // WIDTH, at % WIDTH
    routed = valid & (slot < TOP_K)
    source = token * TOP_K + slot
    ids = tl.load(topk_ids + source, mask=routed, other=0)
    weights = tl.load(topk_weights + source, mask=routed, other=0.0).to(tl.float32)
    if per_expert_scale is not None:
        scaled = routed & (ids >= 0) & (ids < NUM_EXPERTS)
        scale = tl.load(per_expert_scale + ids, mask=scaled, other=1.0).to(tl.float32)
        weights = tl.where(scaled, weights * scale, weights)
    ids = tl.where(routed, ids, (NUM_EXPERTS + slot - TOP_K).to(ids.dtype))
    weights = tl.where(routed, weights, SHARED_WEIGHT)
    if is_padding is not None:
        padding = tl.load(is_padding + token, mask=valid, other=0) != 0
        ids = tl.where(padding, -1, ids)
        weights = tl.where(padding, 0.0, weights)
    tl.store(out_weights + at, weights, mask=valid)
    tl.store(out_ids + at, ids, mask=valid)


@lru_cache(maxsize=1024)
def _adjust_launch(top_k: int, width: int, shared_weight: float) -> Launch:
    return Launch(
        _adjust_kernel, TOP_K=top_k, WIDTH=width, SHARED_WEIGHT=float(shared_weight), BLOCK=_BLOCK
    )


def adjust_routing(
    topk_weights: Tensor,
    topk_ids: Tensor,
    per_expert_scale: Tensor | None,
    is_padding: Tensor | None,
    num_experts: int,
    num_shared_experts: int,
    shared_expert_weight: float,
) -> tuple[Tensor, Tensor]:
    """Launch one program for each block of slots."""
    weights, ids = empty_routing(
        topk_weights, topk_ids, per_expert_scale, is_padding, num_experts, num_shared_experts,
        shared_expert_weight,
    )  # fmt: skip
    if ids.numel():
        _adjust_launch(topk_ids.shape[1], ids.shape[1], shared_expert_weight)(
            (cdiv(ids.numel(), _BLOCK),),
            topk_weights.contiguous(),
            topk_ids.contiguous(),
            dense(per_expert_scale),
            dense(is_padding),
            weights,
            ids,
            ids.numel(),
            num_experts,
        )
    return weights, ids


@triton.jit
def _zero_experts_kernel(
    hidden_states, topk_weights, topk_ids, out_weights, out_ids, out, stride_hidden, NUM_EXPERTS,
    SIZE, SKIPPED_ID: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program writes a piece of one token's row; piece 0 also writes the token's slots."""
    take_turn()
    token = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    total = 0.0
    readable = 0
    for j in range(TOP_K):
        slot = token * TOP_K + j
        expert = tl.load(topk_ids + slot)
        weight = tl.load(topk_weights + slot).to(tl.float32)
        identity = expert >= NUM_EXPERTS
        total += tl.where(identity, weight, 0.0)
        readable = tl.where(identity, SIZE, readable)
        if piece == 0:
            tl.store(out_ids + slot, tl.where(identity, SKIPPED_ID, expert))
            tl.store(out_weights + slot, tl.where(identity, 0.0, weight))
    col = piece * BLOCK + tl.arange(0, BLOCK)
    row = hidden_states + token * stride_hidden
    value = tl.load(row + col, mask=col < readable, other=0.0).to(tl.float32)
    value = tl.where(col < readable, value * total, 0.0)
    tl.store(out + token * SIZE + col, value.to(out.dtype.element_ty), mask=col < SIZE)


@lru_cache(maxsize=1024)
def _zero_launch(top_k: int, size: int, skipped_id: int) -> tuple[Launch, int]:
    """The kernel, and programs along a row."""
    block = min(1024, next_power_of_2(max(size, 1)))
    launch = Launch(_zero_experts_kernel, SKIPPED_ID=skipped_id, TOP_K=top_k, BLOCK=block)
    return launch, max(cdiv(size, block), 1)


def zero_experts(
    hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor, num_experts: int, skipped_id: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch one program for each piece of a token's row."""
    result = empty_split(hidden_states, topk_weights, topk_ids, num_experts, skipped_id)
    tokens, size = hidden_states.shape
    if tokens:
        if hidden_states.stride(1) != 1:
            hidden_states = hidden_states.contiguous()
        launch, pieces = _zero_launch(topk_ids.shape[1], size, skipped_id)
        launch(
            (tokens, pieces),
            hidden_states,
            topk_weights.contiguous(),
            topk_ids.contiguous(),
            *result,
            hidden_states.stride(0),
            num_experts,
            size,
        )
    return result
