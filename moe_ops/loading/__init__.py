"""Weights into a layer: one tensor at a time, or a whole checkpoint."""

from moe_ops.loading.checkpoint import LoadReport, load_checkpoint
from moe_ops.loading.names import LAYOUTS, CheckpointLayout

__all__ = ["LAYOUTS", "CheckpointLayout", "LoadReport", "load_checkpoint"]
