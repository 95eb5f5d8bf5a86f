"""Routers: which experts a token goes to, and with what weight."""

from moe_ops.routing.topk import fused_topk

__all__ = ["fused_topk"]
