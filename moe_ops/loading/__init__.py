"""Checkpoints: their files, the names of their tensors, and how their weights are stored.

Nothing here knows a layer; `moe_ops.layer` places the tensors.
"""

from moe_ops.loading.names import LAYOUTS, CheckpointLayout

__all__ = ["LAYOUTS", "CheckpointLayout"]
