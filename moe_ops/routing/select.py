"""`select_experts`: the entry point to every router, which a layer calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from moe_ops import checks
from moe_ops.parallel.eplb import eplb_map_to_physical_and_record
from moe_ops.routing.adjust import adjust_routing, check_padding, zero_experts
from moe_ops.routing.arguments import check_indices_type
from moe_ops.routing.replay import check_replays, check_topk_ids, given_topk
from moe_ops.routing.shared_gate import check_gate, gate_shared_experts
from moe_ops.routing.topk import fused_topk, grouped_topk, hash_topk
from moe_ops.tensors import narrowed

CustomRouting = Callable[..., tuple[Tensor, Tensor]]
"""``f(hidden_states, gating_output, topk, renormalize) -> (topk_weights, topk_ids)``. A function
with a parameter ``topk_ids`` can weight given experts."""
CaptureFn = Callable[[Tensor], object]
"""``f(topk_ids)``, called with the chosen ids."""


class SelectedExperts(NamedTuple):
    """The result of `select_experts`."""

    topk_weights: Tensor
    """``(T, k)`` float32, already multiplied by ``routed_scaling_factor``."""
    topk_ids: Tensor
    """``(T, k)`` int32 or ``indices_type``: logical experts, or physical experts with EPLB; -1 in
    the skipped slots of padding tokens and identity experts."""
    zero_expert_result: Tensor | None
    """``(T, H)``: the output of the identity experts, to be added to the layer's output; None
    without identity experts."""

    def tokens(self, first: int, last: int) -> SelectedExperts:
        """The routing of tokens ``first .. last - 1``."""
        weights, ids, result = self
        part = slice(first, last)
        return SelectedExperts(weights[part], ids[part], None if result is None else result[part])

    def of_padding(self) -> SelectedExperts:
        """The routing of one token whose slots are all skipped, with the history of the weights."""
        weights, ids, _ = self
        return SelectedExperts(
            pad(weights[:0], (0, 0, 0, 1)), ids.new_full((1, ids.shape[1]), -1), None
        )


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
    routed_scaling_factor: float = 1,  # not 1.0: Dynamo turns float defaults into graph inputs
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
    *,
    hash_indices_table: Tensor | None = None,
    input_ids: Tensor | None = None,
    is_padding: Tensor | None = None,
    capture_fn: CaptureFn | None = None,
    record_enabled: Tensor | None = None,
    seed: int = 0,
    step: Tensor | None = None,
    shared_expert_gate: Tensor | None = None,
    topk_ids: Tensor | None = None,
) -> SelectedExperts:
    """Route with the method that the arguments select, then adjust the routing.

    The method is `grouped_topk` with ``use_grouped_topk``, else ``custom_routing_function``, else
    `hash_topk` with ``hash_indices_table``, else `fused_topk`. Given ``topk_ids`` replace the
    choice of every method. With every method the weights are multiplied once by
    ``routed_scaling_factor``. Then, in this order: every slot of a padding token
    is skipped; ``capture_fn`` is called; `zero_experts`; `eplb_map_to_physical_and_record`; shared
    experts are appended to every token's experts with weight 1, or that of their gate.

    Args:
        hidden_states: ``(T, H)``.
        router_logits: ``(T, E + zero_expert_num)``, bf16, fp16 or fp32.
        top_k: k.
        use_grouped_topk: see above.
        renormalize: see `fused_topk`.
        topk_group: see `grouped_topk`.
        num_expert_group: see `grouped_topk`.
        custom_routing_function: ``f(hidden_states, router_logits, top_k, renormalize) ->
            (weights, ids)``, each ``(T, k)``. Given ids are passed on as ``topk_ids=``, and the
            function returns them with their weights.
        scoring_func: see `fused_topk`.
        routed_scaling_factor: see above.
        e_score_correction_bias: see `fused_topk`.
        indices_type: dtype of the ids, int32 (the default) or int64.
        enable_eplb: whether ids are mapped to physical experts; needs ``expert_load_view`` (which
            is mutated), ``logical_to_physical_map`` and ``logical_replica_count``.
        expert_map: not used: ids are global, and the experts' kernels map them.
        expert_load_view: see `eplb_map_to_physical_and_record`.
        logical_to_physical_map: see `eplb_map_to_physical_and_record`.
        logical_replica_count: see `eplb_map_to_physical_and_record`.
        global_num_experts: number of experts without identity experts, with redundant experts.
        zero_expert_num: number of identity experts, which have the last logits.
        zero_expert_type: ``identity``, the only known type.
        num_fused_shared_experts: n shared experts ``E .. E + n - 1`` that every token goes to.
        hash_indices_table: see `hash_topk`.
        input_ids: ``(T,)``, with ``hash_indices_table``: see `hash_topk`.
        is_padding: ``(T,)`` bool, True for padding tokens. A padding token gets ids -1 and weights
            0 whatever its logits are, it is not counted in the load, and its row of
            ``hidden_states`` is not read.
        capture_fn: called with the ids ``(T, k)`` of logical experts, identity experts included; -1
            for padding tokens.
        record_enabled: see `eplb_map_to_physical_and_record`.
        seed: see `eplb_map_to_physical_and_record`.
        step: see `eplb_map_to_physical_and_record`.
        shared_expert_gate: ``(1, H)``: the shared experts of token t have the weight
            ``sigmoid(<hidden_states[t], gate>)``, computed in float32; None: 1.
        topk_ids: ``(T, k)`` int32 or int64, the experts of each token, such as ``capture_fn`` was
            called with (routing replay). Their weights are those that the method gives to these
            experts, with gradients to the logits; bias, groups and table, which only choose, are
            not used, and ``input_ids`` may be left out. The slot of an id that is no expert (-1,
            or out of range) is skipped.

    Returns:
        A `SelectedExperts`. k grows by ``num_fused_shared_experts``.

    Raises:
        TypeError: a wrong dtype.
        ValueError: as the routers; missing tensors for EPLB; a ``zero_expert_num`` that does not
            fit the logits, or an unknown ``zero_expert_type``.
        NotImplementedError: shared experts together with EPLB, which has no replicas of shared
            experts; ``topk_ids`` with a ``custom_routing_function`` that has no such parameter; and
            as the routers.

    Source:
        vLLM ``FusedMoE.select_experts`` and the routers of 0.33; only some of vLLM's routers apply
        ``routed_scaling_factor``.
    """
    shared, identity, result = num_fused_shared_experts, zero_expert_num or 0, None
    checks.flags(renormalize=renormalize, use_grouped_topk=use_grouped_topk)
    _check_sizes(hidden_states, router_logits, top_k, identity, shared, indices_type)
    _check_shared_experts(shared, enable_eplb, shared_expert_gate, hidden_states)
    tokens = _no_padding(custom_routing_function, is_padding, hidden_states, router_logits)
    weights, ids = _choose(
        (*tokens, top_k, renormalize),
        (num_expert_group, topk_group) if use_grouped_topk else None,
        custom_routing_function,
        (hash_indices_table, input_ids),
        (scoring_func, routed_scaling_factor, e_score_correction_bias),
        topk_ids,
    )
    num_experts = router_logits.shape[1] - identity
    if is_padding is not None:
        weights, ids = adjust_routing(weights, ids, num_experts, is_padding=is_padding)
    if capture_fn is not None:
        capture_fn(ids)
    if identity:
        _check_zero_experts(num_experts, zero_expert_type, enable_eplb, global_num_experts)
        weights, ids, result = zero_experts(hidden_states, weights, ids, num_experts)
    if enable_eplb:
        state = (expert_load_view, logical_to_physical_map, logical_replica_count)
        ids = _physical(ids, *state, indices_type, record_enabled, seed, step)
    shared_slots = (shared, is_padding, shared_expert_gate)
    weights, ids = _with_shared_experts(hidden_states, weights, ids, num_experts, *shared_slots)
    return SelectedExperts(weights, narrowed(ids, indices_type or torch.int32), result)


def _check_sizes(
    hidden_states: Tensor,
    router_logits: Tensor,
    top_k: int,
    identity: int,
    shared: int,
    indices_type: torch.dtype | None,
) -> None:
    """Check that tokens and logits agree, numbers of identity and shared experts, and the dtype."""
    check_indices_type(indices_type)
    checks.tensor("router_logits", router_logits, 2, checks.FLOATS)
    checks.tensor("hidden_states", hidden_states, 2, None)
    checks.same_tokens("router_logits", router_logits, "hidden_states", hidden_states)
    checks.at_least(0, zero_expert_num=identity)
    checks.between(0, checks.MAX_EXPERTS, num_fused_shared_experts=shared)
    checks.topk("top_k", top_k, router_logits.shape[1])


def _no_padding(
    function: CustomRouting | None,
    is_padding: Tensor | None,
    hidden_states: Tensor,
    router_logits: Tensor,
) -> tuple[Tensor, Tensor]:
    """Tokens and logits, in grad mode with zeros in rows of padding for the caller's function.

    Such a function multiplies the zero gradient of a row of padding by NaN if the row holds NaN.
    """
    if function is None or is_padding is None or not torch.is_grad_enabled():
        return hidden_states, router_logits
    check_padding(is_padding, "hidden_states", hidden_states)
    rows = is_padding[:, None]
    return hidden_states.masked_fill(rows, 0.0), router_logits.masked_fill(rows, 0.0)


def _choose(
    logits: tuple[Tensor, Tensor, int, bool],
    groups: tuple[int | None, int | None] | None,
    custom_routing_function: CustomRouting | None,
    hashed: tuple[Tensor | None, Tensor | None],
    scoring: tuple[str, float, Tensor | None],
    topk_ids: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Weights and ids from the method that the arguments select."""
    hidden_states, router_logits, top_k, renormalize = logits
    (table, input_ids), (scoring_func, factor, bias) = hashed, scoring
    if input_ids is not None and table is None:
        raise ValueError("input_ids must be None without hash_indices_table, got a Tensor")
    if topk_ids is not None:
        function = None if groups is not None else custom_routing_function
        return _weigh(topk_ids, logits, function, scoring_func, factor)
    if groups is not None:
        return grouped_topk(
            hidden_states, router_logits, top_k, renormalize, *groups, scoring_func, factor, bias
        )
    if custom_routing_function is not None:
        return _custom(custom_routing_function, logits, factor)
    if table is not None:
        return _hashed(table, input_ids, logits, scoring_func, factor)
    return fused_topk(
        hidden_states, router_logits, top_k, renormalize, None, scoring_func, bias, factor
    )


def _weigh(
    topk_ids: Tensor,
    logits: tuple[Tensor, Tensor, int, bool],
    function: CustomRouting | None,
    scoring_func: str,
    factor: float,
) -> tuple[Tensor, Tensor]:
    """Weights of given ids from the method that the arguments select."""
    hidden_states, router_logits, top_k, renormalize = logits
    check_topk_ids(topk_ids, hidden_states, top_k)
    if function is None:
        return given_topk(hidden_states, router_logits, topk_ids, renormalize, scoring_func, factor)
    check_replays(function)
    return _custom(function, logits, factor, topk_ids=topk_ids)


def _custom(
    function: CustomRouting,
    logits: tuple[Tensor, Tensor, int, bool],
    routed_scaling_factor: float,
    **options: Tensor,
) -> tuple[Tensor, Tensor]:
    """The checked result of the caller's function, with weights in float32 and scaled."""
    if not callable(function):
        name = type(function).__name__
        raise TypeError(f"custom_routing_function must be callable, got {name}")
    checks.number("routed_scaling_factor", routed_scaling_factor)
    hidden_states, router_logits, top_k, renormalize = logits
    routed = function(hidden_states, router_logits, top_k, renormalize, **options)
    if not isinstance(routed, (tuple, list)) or len(routed) != 2:
        name = type(routed).__name__
        raise TypeError(f"custom_routing_function must return (weights, ids), got {name}")
    weights, ids = routed
    own = "custom_routing_function's"
    checks.topk_pair(weights, ids, f"{own} ids", f"{own} weights")
    checks.size(f"{own} k", ids.shape[1], "top_k", top_k)
    checks.same_tokens(f"{own} ids", ids, "hidden_states", hidden_states)
    return weights.float() * routed_scaling_factor, ids


def _hashed(
    table: Tensor,
    input_ids: Tensor | None,
    logits: tuple[Tensor, Tensor, int, bool],
    scoring_func: str,
    routed_scaling_factor: float,
) -> tuple[Tensor, Tensor]:
    """`hash_topk`, with a table of ``top_k`` columns."""
    hidden_states, router_logits, top_k, renormalize = logits
    checks.tensor("hash_indices_table", table, 2, checks.INDICES)
    checks.size("hash_indices_table.shape[1]", table.shape[1], "top_k", top_k)
    words = _required("input_ids", input_ids, "hash_indices_table")
    return hash_topk(
        hidden_states, router_logits, words, table, renormalize, scoring_func, routed_scaling_factor
    )


def _check_zero_experts(
    num_experts: int,
    zero_expert_type: str | None,
    enable_eplb: bool,
    global_num_experts: int | None,
) -> None:
    """Check the arguments of identity experts, which have the last ids."""
    checks.one_of("zero_expert_type", str(zero_expert_type), ("identity",))
    if num_experts < 1:
        raise ValueError(
            f"zero_expert_num must leave at least one other expert, got {num_experts} others"
        )
    if global_num_experts is not None and not enable_eplb:  # with EPLB: physical experts
        rule = "router_logits.shape[1] - zero_expert_num"
        checks.size("global_num_experts", global_num_experts, rule, num_experts)


def _check_shared_experts(
    count: int, enable_eplb: bool, gate: Tensor | None, hidden_states: Tensor
) -> None:
    """Check that there is no EPLB, which has no replicas of shared experts, and check the gate."""
    checks.flags(enable_eplb=enable_eplb)
    if count and enable_eplb:
        raise NotImplementedError(
            f"num_fused_shared_experts must be 0 with enable_eplb, got {count}"
        )
    if gate is not None:
        check_gate(gate, hidden_states, count)


def _with_shared_experts(
    hidden_states: Tensor,
    weights: Tensor,
    ids: Tensor,
    num_experts: int,
    count: int,
    is_padding: Tensor | None,
    gate: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Append the shared experts to every token's experts, with weight 1 or that of the gate."""
    if count == 0:
        return weights, ids
    weights, ids = adjust_routing(
        weights, ids, num_experts, num_shared_experts=count, is_padding=is_padding
    )
    if gate is not None:
        weights = gate_shared_experts(hidden_states, gate, weights, ids, num_experts, count)
    return weights, ids


def _physical(
    ids: Tensor,
    expert_load_view: Tensor | None,
    logical_to_physical_map: Tensor | None,
    logical_replica_count: Tensor | None,
    indices_type: torch.dtype | None,
    record_enabled: Tensor | None,
    seed: int,
    step: Tensor | None,
) -> Tensor:
    """Map ids to physical experts and count the load; ValueError if a required tensor is None."""
    return eplb_map_to_physical_and_record(
        ids,
        _required("expert_load_view", expert_load_view, "enable_eplb"),
        _required("logical_to_physical_map", logical_to_physical_map, "enable_eplb"),
        _required("logical_replica_count", logical_replica_count, "enable_eplb"),
        indices_type,
        record_enabled=record_enabled,
        seed=seed,
        step=step,
    )


def _required(name: str, x: Tensor | None, option: str) -> Tensor:
    """The tensor, which ``option`` requires; ValueError if it is None."""
    if x is None:
        raise ValueError(f"{name} must be a Tensor with {option}, got None")
    return x
