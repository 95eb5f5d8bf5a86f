"""Checks that the routers share."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops import checks
from moe_ops.routing.methods import SCORING_FUNCS


def check_logits(hidden_states: Tensor, gating_output: Tensor, topk: int) -> int:
    """Router logits ``(T, E)`` of which ``topk`` experts can be chosen; returns E."""
    checks.tensor("gating_output", gating_output, 2, checks.FLOATS)
    checks.inference_only(gating_output=gating_output)
    checks.same_tokens("gating_output", gating_output, "hidden_states", hidden_states)
    num_experts = gating_output.shape[1]
    checks.topk("topk", topk, num_experts)
    if num_experts > checks.MAX_EXPERTS:
        raise NotImplementedError(
            f"gating_output must have at most {checks.MAX_EXPERTS} experts, got {num_experts}"
        )
    return num_experts


def check_scoring(
    gating_output: Tensor, scoring_func: str, e_score_correction_bias: Tensor | None
) -> None:
    """A known scoring function, and a float32 bias for each expert or none."""
    checks.one_of("scoring_func", scoring_func, SCORING_FUNCS)
    if e_score_correction_bias is not None:
        name, bias = "e_score_correction_bias", e_score_correction_bias
        checks.tensor(name, bias, 1, (torch.float32,))
        checks.same_device(name, bias, "gating_output", gating_output)
        rows, num_experts = bias.shape[0], gating_output.shape[1]
        checks.size(f"{name}.shape[0]", rows, "the number of experts", num_experts)


def check_indices_type(indices_type: torch.dtype | None) -> None:
    """A dtype of ids, or None for int32."""
    if indices_type not in (None, *checks.INDICES):
        raise TypeError(f"indices_type must be one of {list(checks.INDICES)}, got {indices_type}")
