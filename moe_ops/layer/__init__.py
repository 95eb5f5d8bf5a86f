"""The Mixture-of-Experts layer as a module: parameters, routing, loading, and how experts run."""

from typing import TYPE_CHECKING

from moe_ops.layer.methods import (
    FusedMoEMethodBase,
    QuantizedFusedMoEMethod,
    UnquantizedFusedMoEMethod,
)
from moe_ops.layer.module import FusedMoE
from moe_ops.layer.options import FusedMoEOptions
from moe_ops.layer.parameters import (
    FusedMoeWeightScaleSupported,
    ParameterSpec,
    parameter_specs,
)
from moe_ops.layer.partition import LayerSizes
from moe_ops.on_demand import on_demand as _on_demand

_LATER = {"LoadReport": "checkpoint", "load_checkpoint": "checkpoint"}
"""Names whose module is imported when they are first used."""

if TYPE_CHECKING:
    from moe_ops.layer.checkpoint import LoadReport, load_checkpoint
else:  # a type checker would take any name for one of this module
    __getattr__, __dir__ = _on_demand(__name__, _LATER)

__all__ = [
    "FusedMoE",
    "FusedMoEMethodBase",
    "FusedMoEOptions",
    "FusedMoeWeightScaleSupported",
    "LayerSizes",
    "LoadReport",
    "ParameterSpec",
    "QuantizedFusedMoEMethod",
    "UnquantizedFusedMoEMethod",
    "load_checkpoint",
    "parameter_specs",
]
