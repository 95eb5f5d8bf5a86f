"""Triton kernel that routes and aligns few tokens in one launch."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_ops.dispatch.row_tiles import tile_rule
from moe_ops.dispatch.tiles import few_tokens, is_direct, plan_sizes, row_tile
from moe_ops.fake_impls.topk_align import topk_plan as empty_routing
from moe_ops.kernels._routing.choice import route_tokens
from moe_ops.kernels._runtime.dependent import take_turn
from moe_ops.kernels._runtime.launch import Launch
from moe_ops.kernels._runtime.slots import dense, experts_of, map_size, next_power_of_2
from moe_ops.kernels._sort.plan import place_buckets, plan_programs
from moe_ops.kernels.align import plan_slots
from moe_ops.kernels.routing import by_rows, fused_topk, topk_constants
from moe_ops.sizes import axes


@triton.jit(do_not_specialize=["num_tokens", "num_rows", "num_tiles"])
def _topk_align_kernel(
    gating_output, bias, expert_map, topk_weights, topk_ids, plan,
    num_tokens, num_rows, num_tiles, stride_row, num_ids, num_buckets,
    NUM_EXPERTS: tl.constexpr,
    SCALE: tl.constexpr, TOPK: tl.constexpr, RENORMALIZE: tl.constexpr, SCORING: tl.constexpr,
    TOKENS: tl.constexpr, EXPERTS: tl.constexpr, SLOTS: tl.constexpr,
    TILE: tl.constexpr, BUCKETS: tl.constexpr,
):  # fmt: skip
    """Each program routes all tokens (all write the same), then places its experts' slots."""
    take_turn()
    ids = route_tokens(
        gating_output, bias, topk_weights, topk_ids, tl.program_id(0) * 0, num_tokens, stride_row,
        NUM_EXPERTS, SCALE, TOPK, RENORMALIZE, SCORING, TOKENS, EXPERTS, SLOTS, False,
    )  # fmt: skip
    place = tl.arange(0, TOKENS * SLOTS)
    slot = place // SLOTS * TOPK + place % SLOTS
    buckets = experts_of(ids, expert_map, num_ids, num_buckets)
    place_buckets(
        tl.reshape(buckets, (TOKENS * SLOTS,)), slot, None, plan, None, None,
        num_tokens * TOPK, num_rows, num_tiles, num_buckets, TILE, BUCKETS,
    )  # fmt: skip


@lru_cache(maxsize=4096)
def _launch(
    tokens: int, num_experts: int, settings: tuple[int, bool, str, float], tile: int, buckets: int
) -> Launch:
    """The launch of the kernel for up to ``tokens`` tokens."""
    topk, renormalize, scoring_func, scale = settings
    return Launch(
        _topk_align_kernel,
        **topk_constants(tokens, num_experts, topk, renormalize, scoring_func, scale),
        TILE=tile,
        BUCKETS=next_power_of_2(max(buckets, 2)),
        num_warps=1,
    )


def topk_plan(
    gating_output: Tensor,
    e_score_correction_bias: Tensor | None,
    topk: int,
    renormalize: bool,
    scoring_func: str,
    routed_scaling_factor: float,
    expert_map: Tensor | None,
    num_local_experts: int,
    scheme: str,
    dtype: torch.dtype,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Route and align in one launch for few tokens, else with the launches of the two operators.

    If there are so few slots that no GEMM reads a plan, tokens are only routed.
    """
    bias, scale = e_score_correction_bias, routed_scaling_factor
    settings = (topk, renormalize, scoring_func, scale)
    axes("gating_output", gating_output, 2)
    tokens, num_experts = gating_output.shape
    if is_direct(tokens * topk, num_local_experts) or not few_tokens(tokens, num_experts):
        weights, ids = fused_topk(gating_output, bias, topk, renormalize, scoring_func, scale)
        plan = plan_slots(ids, expert_map, num_local_experts, scheme, dtype, batch_invariant)
        return weights, ids, plan
    result = empty_routing(
        gating_output,
        bias,
        topk,
        renormalize,
        scoring_func,
        scale,
        expert_map,
        num_local_experts,
        scheme,
        dtype,
        batch_invariant,
    )
    gating_output = by_rows(gating_output)
    rule = tile_rule(scheme, dtype, gating_output.device, batch_invariant)
    tile = row_tile(rule, tokens * topk, num_local_experts)
    _launch(few_tokens(tokens, num_experts), num_experts, settings, tile, num_local_experts)(
        (plan_programs(num_local_experts),),
        gating_output, dense(bias), dense(expert_map), *result,
        tokens, *plan_sizes(tokens * topk, num_local_experts, rule)[:2],
        gating_output.stride(0),
        map_size(expert_map, num_local_experts), num_local_experts
    )  # fmt: skip
    return result
