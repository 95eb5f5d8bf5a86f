"""Routers: which experts a token goes to, and with what weight."""

from moe_ops.routing.methods import RoutingMethodType, get_routing_method_type
from moe_ops.routing.topk import SCORING_FUNCS, fused_topk

__all__ = ["SCORING_FUNCS", "RoutingMethodType", "fused_topk", "get_routing_method_type"]
