"""Routers: which experts a token goes to, and with which weights."""

from moe_ops.routing import simulate
from moe_ops.routing.adjust import adjust_routing, zero_experts
from moe_ops.routing.arguments import check_tokens, expert_groups
from moe_ops.routing.methods import SCORING_FUNCS, RoutingMethodType, get_routing_method_type
from moe_ops.routing.models import gemma4_routing, llama4_routing, sparsemixer, topk_softmax
from moe_ops.routing.select import CaptureFn, CustomRouting, SelectedExperts, select_experts
from moe_ops.routing.topk import fused_topk, grouped_topk, hash_topk

__all__ = [
    "SCORING_FUNCS",
    "CaptureFn",
    "CustomRouting",
    "RoutingMethodType",
    "SelectedExperts",
    "adjust_routing",
    "check_tokens",
    "expert_groups",
    "fused_topk",
    "gemma4_routing",
    "get_routing_method_type",
    "grouped_topk",
    "hash_topk",
    "llama4_routing",
    "select_experts",
    "simulate",
    "sparsemixer",
    "topk_softmax",
    "zero_experts",
]
