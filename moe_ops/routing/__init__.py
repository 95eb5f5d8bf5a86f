"""Routers: which experts a token goes to, and with what weight."""

from moe_ops.routing.topk import SCORING_FUNCS, fused_topk

__all__ = ["SCORING_FUNCS", "fused_topk"]
