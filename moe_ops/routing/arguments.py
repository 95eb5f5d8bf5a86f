"""Argument checks shared by the routers."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops import checks
from moe_ops.routing.methods import SCORING_FUNCS


def check_logits(hidden_states: Tensor, gating_output: Tensor, topk: int) -> int:
    """Check router logits ``(T, E)`` from which ``topk`` experts are chosen; returns E."""
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
    """Check the axes of tokens ``(.., T, H)`` and of logits, ``(.., T, E)`` or ``(T, E)``.

    Where the logits alone are flat, their number is checked later, once the tokens are flat too.

    Raises:
        TypeError: not tensors, or not of a float dtype.
        ValueError: axes that do not match.
    """
    for name, x in (("hidden_states", hidden_states), ("router_logits", router_logits)):
        checks.tensor(name, x, None, checks.FLOATS)
    shape, other = hidden_states.shape, router_logits.shape
    if len(shape) not in (0, 2) and len(other) == 2:
        return
    if len(shape) < 1 or len(shape) != len(other):
        raise ValueError(
            "router_logits must be (T, E) or have the axes of hidden_states, (.., T, H), got shape "
            f"{tuple(other)} for {tuple(shape)}"
        )
    for axis in range(len(shape) - 1):
        if torch.compiler.is_compiling():
            torch._check(other[axis] == shape[axis])
        elif other[axis] != shape[axis]:
            rule = f"hidden_states.shape[{axis}]"
            checks.size(f"router_logits.shape[{axis}]", other[axis], rule, shape[axis])


def check_scoring(
    gating_output: Tensor, scoring_func: str, e_score_correction_bias: Tensor | None
) -> None:
    """Check for a known scoring function, and a bias that is None or ``(E,)`` float32."""
    checks.one_of("scoring_func", scoring_func, SCORING_FUNCS)
    if e_score_correction_bias is not None:
        name, bias = "e_score_correction_bias", e_score_correction_bias
        checks.tensor(name, bias, 1, (torch.float32,))
        checks.same_device(name, bias, "gating_output", gating_output)
        rows, num_experts = bias.shape[0], gating_output.shape[1]
        checks.size(f"{name}.shape[0]", rows, "the number of experts", num_experts)


def check_weighing(renormalize: bool, routed_scaling_factor: float) -> None:
    """Check the arguments that turn scores into weights."""
    checks.flags(renormalize=renormalize)
    checks.factor("routed_scaling_factor", routed_scaling_factor)


def check_indices_type(indices_type: torch.dtype | None) -> None:
    """Check the dtype of ids: int32, int64 or None (int32)."""
    if indices_type not in (None, *checks.INDICES):
        raise TypeError(f"indices_type must be one of {list(checks.INDICES)}, got {indices_type}")


def expert_groups(
    num_experts: int, num_expert_group: int | None, topk_group: int | None, **topk: int
) -> tuple[int, int] | None:
    """Check the groups of grouped top-k, and k by its name.

    Returns:
        The number of groups and of chosen groups; None: all experts are one group.

    Raises:
        ValueError, TypeError: numbers that no grouped top-k has.
    """
    if num_expert_group is None or topk_group is None:
        raise ValueError(
            f"num_expert_group and topk_group must be numbers, got {num_expert_group} and "
            f"{topk_group}"
        )
    checks.at_least(0, num_expert_group=num_expert_group, topk_group=topk_group)
    if num_expert_group in (0, 1) and topk_group in (0, 1):
        return None
    if num_expert_group < 1 or num_experts % num_expert_group:
        raise ValueError(
            f"num_expert_group must divide the {num_experts} experts, got {num_expert_group}"
        )
    if not 1 <= topk_group <= num_expert_group:
        raise ValueError(
            f"topk_group must be between 1 and num_expert_group = {num_expert_group}, "
            f"got {topk_group}"
        )
    for name, k in topk.items():
        checks.topk(name, k, num_experts // num_expert_group * topk_group)
    return num_expert_group, topk_group
