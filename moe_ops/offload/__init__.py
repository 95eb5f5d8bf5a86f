"""Whole models whose experts are in host memory."""

from moe_ops.offload.model import offload_, offload_stats

__all__ = ["offload_", "offload_stats"]
