"""Checks that the routers share."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops import checks
from moe_ops.routing.methods import SCORING_FUNCS


def check_logits(hidden_states: Tensor, gating_output: Tensor, topk: int) -> int:
    """Router logits ``(T, E)`` of which ``topk`` experts can be chosen; returns E."""
    checks.tensor("hidden_states", hidden_states, 2, None)
    checks.tensor("gating_output", gating_output, 2, checks.FLOATS)
    checks.same_tokens("gating_output", gating_output, "hidden_states", hidden_states)
    num_experts = gating_output.shape[1]
    checks.topk("topk", topk, num_experts)
    if num_experts > checks.MAX_EXPERTS:
        raise NotImplementedError(
            f"gating_output must have at most {checks.MAX_EXPERTS} experts, got {num_experts}"
        )
    return num_experts


def check_tokens(hidden_states: Tensor, router_logits: Tensor) -> None:
    """Tokens and their logits: ``(T, E)``, or of the tokens' axes but for the last one.

    How many tokens there are is checked where both are flat.
    """
    for name, x in (("hidden_states", hidden_states), ("router_logits", router_logits)):
        checks.tensor(name, x, None, checks.FLOATS)
    shape, other = hidden_states.shape, router_logits.shape
    if len(shape) > 0 and len(other) == 2:
        return
    if len(shape) < 1 or len(shape) != len(other):
        raise ValueError(
            "router_logits must be (T, E) or have the axes of hidden_states, (.., T, H), got shape "
            f"{tuple(other)} for {tuple(shape)}"
        )
    for axis in range(len(shape) - 2):
        if torch.compiler.is_compiling():
            torch._check(other[axis] == shape[axis])
        else:
            rule = f"hidden_states.shape[{axis}]"
            checks.size(f"router_logits.shape[{axis}]", other[axis], rule, shape[axis])


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


def check_weighing(renormalize: bool, routed_scaling_factor: float) -> None:
    """What becomes of the scores of the chosen."""
    checks.flags(renormalize=renormalize)
    checks.factor("routed_scaling_factor", routed_scaling_factor)


def check_indices_type(indices_type: torch.dtype | None) -> None:
    """A dtype of ids, or None for int32."""
    if indices_type not in (None, *checks.INDICES):
        raise TypeError(f"indices_type must be one of {list(checks.INDICES)}, got {indices_type}")
