"""Outputs of the routing operators."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops import checks, sizes


def _routing(
    gating_output: Tensor, topk: int, scoring_func: str = "softmax", bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Check the arguments of a top-k; ``(T, k)`` float32 weights and int32 ids."""
    checks.one_of("scoring_func", scoring_func, checks.SCORING_FUNCS)
    sizes.axes("gating_output", gating_output, 2)
    tokens, num_experts = gating_output.shape
    sizes.num_experts("gating_output.shape[1]", num_experts)
    sizes.in_range("topk", topk, 1, num_experts)
    if bias is not None:
        sizes.shaped("e_score_correction_bias", bias, num_experts)
    return (
        gating_output.new_empty(tokens, topk, dtype=torch.float32),
        gating_output.new_empty(tokens, topk, dtype=torch.int32),
    )


def fused_topk(
    gating_output: Tensor,
    e_score_correction_bias: Tensor | None,
    topk: int,
    renormalize: bool,
    scoring_func: str,
    routed_scaling_factor: float,
) -> tuple[Tensor, Tensor]:
    """``topk`` slots per token."""
    return _routing(gating_output, topk, scoring_func, e_score_correction_bias)


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
    """``topk`` slots per token."""
    result = _routing(gating_output, topk, scoring_func, e_score_correction_bias)
    check_groups(gating_output.shape[1], topk, num_expert_group, topk_group)
    return result


def check_groups(num_experts: int, topk: int, num_expert_group: int, topk_group: int) -> None:
    """Check that groups have equal sizes and that ``topk_group`` of them hold ``topk`` experts."""
    sizes.in_range("num_expert_group", num_expert_group, 1, num_experts)
    sizes.in_range("topk_group", topk_group, 1, num_expert_group)
    size = num_experts // num_expert_group
    sizes.equal("num_expert_group * (the experts of a group)", num_expert_group * size, num_experts)
    sizes.in_range("topk", topk, 1, topk_group * size)


def hash_topk(
    gating_output: Tensor,
    input_ids: Tensor,
    table: Tensor,
    renormalize: bool,
    scoring_func: str,
    routed_scaling_factor: float,
) -> tuple[Tensor, Tensor]:
    """``table.shape[1]`` slots per token, all of them skipped if the table has no rows."""
    sizes.axes("table", table, 2)
    words, topk = table.shape
    sizes.in_range("table.shape[0]", words, 0, 2**31 - 1)
    result = _routing(gating_output, topk, scoring_func)
    sizes.shaped("input_ids", input_ids, gating_output.shape[0])
    return result


def sparsemixer(gating_output: Tensor, jitter_eps: float) -> tuple[Tensor, Tensor]:
    """Two slots per token."""
    return _routing(gating_output, 2)


def topk_backward(
    grad: Tensor,
    gating_output: Tensor,
    topk_ids: Tensor,
    renormalize: bool,
    scoring_func: str,
    routed_scaling_factor: float,
) -> Tensor:
    """``(T, E)`` in the dtype of ``gating_output``."""
    sizes.axes("topk_ids", topk_ids, 2)
    tokens, topk = topk_ids.shape
    _routing(gating_output, topk, scoring_func)
    sizes.equal("topk_ids.shape[0]", tokens, gating_output.shape[0])
    sizes.shaped("grad", grad, tokens, topk)
    return gating_output.new_empty(gating_output.shape)
