"""A layer as a value, and as a line of text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe_ops.pipeline.config import FusedMoEConfig
from moe_ops.routing import RoutingMethodType, get_routing_method_type

if TYPE_CHECKING:
    from moe_ops.layer import FusedMoE


def moe_config(layer: FusedMoE) -> FusedMoEConfig:
    """What the choice of a kernel needs to know of a layer."""
    sizes, routing = layer.sizes, layer.routing
    method = RoutingMethodType.Custom
    if routing["custom_routing_function"] is None and layer.hash_indices_table is None:
        bias = layer.e_score_correction_bias is not None
        groups = routing["num_expert_group"] if routing["use_grouped_topk"] else None
        arguments = (layer.scoring_func, layer.top_k, layer.renormalize, groups, bias)
        method = get_routing_method_type(*arguments)
    return FusedMoEConfig(
        layer.global_num_experts,
        layer.top_k,
        layer.hidden_size,
        sizes.intermediate_size,
        sizes.num_experts,
        layer.activation,
        layer.w13_weight.device,
        method,
        layer.moe_parallel_config,
        in_dtype=sizes.dtype,
        renormalize=layer.renormalize,
        scoring_func=layer.scoring_func,
        has_bias=sizes.has_bias,
        is_act_and_mul=sizes.gated,
        batch_invariant=layer.batch_invariant,
    )


def summary(layer: FusedMoE) -> str:
    """Sizes, ranks, scheme and routing."""
    parallel, sizes, routing = layer.moe_parallel_config, layer.sizes, layer.routing
    facts = {
        "num_experts": layer.num_experts,
        "top_k": layer.top_k,
        "hidden_size": layer.hidden_size,
        "global_num_experts": layer.global_num_experts,
        "local_num_experts": sizes.num_experts,
        "intermediate_size_per_partition": sizes.intermediate_size,
        "tp_size": parallel.tp_size,
        "ep_size": parallel.ep_size,
        "reduce_results": layer.reduce_results,
        "scheme": sizes.scheme.name,
        "activation": layer.activation,
        "scoring_func": layer.scoring_func,
        "renormalize": layer.renormalize,
        "use_grouped_topk": routing["use_grouped_topk"],
        "batch_invariant": layer.batch_invariant,
    }
    return ", ".join(f"{name}={value}" for name, value in facts.items())
