"""The Mixture-of-Experts layer as a module: parameters, routing, loading, and how experts run."""

from moe_ops.layer.checkpoint import LoadReport, load_checkpoint
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
