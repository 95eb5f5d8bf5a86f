"""Outputs of routing with alignment."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops.fake_impls.align import plan_slots
from moe_ops.fake_impls.routing import fused_topk


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
    """The outputs of `fused_topk`, and of `plan_slots` of its ids."""
    weights, ids = fused_topk(
        gating_output,
        e_score_correction_bias,
        topk,
        renormalize,
        scoring_func,
        routed_scaling_factor,
    )
    plan = plan_slots(ids, expert_map, num_local_experts, scheme, dtype, batch_invariant)
    return weights, ids, plan
