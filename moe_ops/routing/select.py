"""One entry to every router, as a layer calls it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from moe_ops import checks
from moe_ops.parallel.eplb import eplb_map_to_physical_and_record
from moe_ops.routing.adjust import adjust_routing, zero_experts
from moe_ops.routing.arguments import check_indices_type
from moe_ops.routing.topk import fused_topk, grouped_topk

CustomRouting = Callable[[Tensor, Tensor, int, bool], tuple[Tensor, Tensor]]
"""``f(hidden_states, gating_output, topk, renormalize) -> (topk_weights, topk_ids)``."""


class SelectedExperts(NamedTuple):
    """What `select_experts` returns."""

    topk_weights: Tensor
    """``(T, k)`` float32, scaled: whoever uses them does not scale again."""
    topk_ids: Tensor
    """``(T, k)`` int32 or ``indices_type``: logical experts; physical ones with EPLB."""
    zero_expert_result: Tensor | None
    """``(T, H)`` what the identity experts return, to be added to the output; None without any."""


def select_experts(
    hidden_states: Tensor,
    router_logits: Tensor,
    top_k: int,
    use_grouped_topk: bool,
    renormalize: bool,
    topk_group: int | None = None,
    num_expert_group: int | None = None,
    custom_routing_function: CustomRouting | None = None,
    scoring_func: str = "softmax",
    routed_scaling_factor: float = 1,  # no 1.0: Dynamo makes inputs of the graph of float defaults
    e_score_correction_bias: Tensor | None = None,
    indices_type: torch.dtype | None = None,
    enable_eplb: bool = False,
    expert_map: Tensor | None = None,
    expert_load_view: Tensor | None = None,
    logical_to_physical_map: Tensor | None = None,
    logical_replica_count: Tensor | None = None,
    global_num_experts: int | None = None,
    zero_expert_num: int | None = None,
    zero_expert_type: str | None = None,
    num_fused_shared_experts: int = 0,
) -> SelectedExperts:
    """Route with the method that the arguments name, then do what follows the choice.

    The method is `grouped_topk` with ``use_grouped_topk``, else ``custom_routing_function``, else
    `fused_topk`. ``routed_scaling_factor`` multiplies the weights once, whichever it is. Then, in
    this order: `zero_experts`; `eplb_map_to_physical_and_record`; shared experts, behind every
    token's experts with weight 1.

    Args:
        hidden_states: ``(T, H)``.
        router_logits: ``(T, E + zero_expert_num)``, bf16, fp16 or fp32.
        top_k: k.
        use_grouped_topk: see above.
        renormalize: see `fused_topk`.
        topk_group: see `grouped_topk`.
        num_expert_group: see `grouped_topk`.
        custom_routing_function: ``f(hidden_states, router_logits, top_k, renormalize) ->
            (weights, ids)``, each ``(T, k)``.
        scoring_func: see `fused_topk`.
        routed_scaling_factor: see above.
        e_score_correction_bias: see `fused_topk`.
        indices_type: dtype of the ids, int32 (the default) or int64.
        enable_eplb: whether ids become physical; needs the three tensors that follow. The load is
            mutated.
        expert_map: not used: ids are global, and the experts' kernels map them.
        expert_load_view: see `eplb_map_to_physical_and_record`.
        logical_to_physical_map: see `eplb_map_to_physical_and_record`.
        logical_replica_count: see `eplb_map_to_physical_and_record`.
        global_num_experts: the number of experts that compute something, redundant ones included.
        zero_expert_num: how many of the logits, the last ones, belong to identity experts.
        zero_expert_type: ``identity``, the only one.
        num_fused_shared_experts: n experts ``E .. E + n - 1`` that every token goes to.

    Returns:
        A `SelectedExperts`. k grows by ``num_fused_shared_experts``.

    Raises:
        TypeError: a wrong dtype.
        ValueError: as the routers; tensors that EPLB lacks; a ``zero_expert_num`` that does not fit
            the logits, or another ``zero_expert_type``.
        NotImplementedError: shared experts together with EPLB, which has no replicas of them; and
            as the routers.

    Source:
        vLLM ``FusedMoE.select_experts`` and the routers of 0.33; upstream applies
        ``routed_scaling_factor`` in some of them only.
    """
    shared, identity = num_fused_shared_experts, zero_expert_num or 0
    checks.tensor("router_logits", router_logits, 2, checks.FLOATS)
    check_indices_type(indices_type)
    checks.flags(use_grouped_topk=use_grouped_topk, enable_eplb=enable_eplb)
    checks.tensor("hidden_states", hidden_states, 2, None)
    checks.same_tokens("router_logits", router_logits, "hidden_states", hidden_states)
    checks.at_least(0, zero_expert_num=identity)
    checks.between(0, checks.MAX_EXPERTS, num_fused_shared_experts=shared)
    checks.topk("top_k", top_k, router_logits.shape[1])
    logits = (hidden_states, router_logits, top_k, renormalize)
    bias, scale = e_score_correction_bias, routed_scaling_factor
    if use_grouped_topk:
        groups = (num_expert_group, topk_group)
        weights, ids = grouped_topk(*logits, *groups, scoring_func, scale, bias)
    elif custom_routing_function is not None:
        weights, ids = _custom(custom_routing_function, *logits, scale)
    else:
        weights, ids = fused_topk(*logits, None, scoring_func, bias, scale)

    num_experts, result = router_logits.shape[1] - identity, None
    if identity:
        given = None if enable_eplb else global_num_experts
        _check_zero_experts(num_experts, given, zero_expert_type)
        weights, ids, result = zero_experts(hidden_states, weights, ids, num_experts)
    if enable_eplb:
        _check_no_shared_experts(shared)
        replicas = (logical_to_physical_map, logical_replica_count)
        ids = _physical(ids, expert_load_view, *replicas, indices_type)
    if shared:
        weights, ids = adjust_routing(weights, ids, num_experts, num_shared_experts=shared)
    return SelectedExperts(weights, ids.to(indices_type or torch.int32), result)


def _custom(
    function: CustomRouting,
    hidden_states: Tensor,
    router_logits: Tensor,
    top_k: int,
    renormalize: bool,
    routed_scaling_factor: float,
) -> tuple[Tensor, Tensor]:
    """What the caller's function returns, in float32, scaled, checked."""
    if not callable(function):
        name = type(function).__name__
        raise TypeError(f"custom_routing_function must be callable, got {name}")
    checks.number("routed_scaling_factor", routed_scaling_factor)
    weights, ids = function(hidden_states, router_logits, top_k, renormalize)
    checks.topk_pair(weights, ids)
    checks.size("custom_routing_function's k", ids.shape[1], "top_k", top_k)
    checks.same_tokens("custom_routing_function's ids", ids, "hidden_states", hidden_states)
    return weights.float() * routed_scaling_factor, ids


def _check_zero_experts(
    num_experts: int, global_num_experts: int | None, zero_expert_type: str | None
) -> None:
    """Identity experts come behind all others."""
    checks.one_of("zero_expert_type", str(zero_expert_type), ("identity",))
    if num_experts < 1:
        raise ValueError(
            f"zero_expert_num must leave an expert that computes something, got {num_experts} left"
        )
    if global_num_experts is not None:
        rule = "router_logits.shape[1] - zero_expert_num"
        checks.size("global_num_experts", global_num_experts, rule, num_experts)


def _check_no_shared_experts(count: int) -> None:
    """EPLB has no replicas of them."""
    if count:
        raise NotImplementedError(
            f"num_fused_shared_experts must be 0 with enable_eplb, got {count}"
        )


def _physical(
    ids: Tensor,
    expert_load_view: Tensor | None,
    logical_to_physical_map: Tensor | None,
    logical_replica_count: Tensor | None,
    indices_type: torch.dtype | None,
) -> Tensor:
    """Ids of replicas, counted; the three tensors are not missing."""
    return eplb_map_to_physical_and_record(
        ids,
        _given("expert_load_view", expert_load_view),
        _given("logical_to_physical_map", logical_to_physical_map),
        _given("logical_replica_count", logical_replica_count),
        indices_type,
    )


def _given(name: str, x: Tensor | None) -> Tensor:
    if x is None:
        raise ValueError(f"{name} must be a Tensor with enable_eplb, got None")
    return x
