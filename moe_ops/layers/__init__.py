"""What a layer is made of: its parameters in every scheme, and how they are used."""

from moe_ops.layers.collectives import RankGroup
from moe_ops.layers.describe import moe_config, summary
from moe_ops.layers.methods import (
    FusedMoEMethodBase,
    QuantizedFusedMoEMethod,
    UnquantizedFusedMoEMethod,
    shared_experts_of,
)
from moe_ops.layers.moving import KeepsBits
from moe_ops.layers.options import FusedMoEOptions, takes_options
from moe_ops.layers.parameters import (
    FusedMoeWeightScaleSupported,
    ParameterSpec,
    parameter_specs,
)
from moe_ops.layers.partition import LayerSizes, aligned_sizes
from moe_ops.layers.routing import RoutesTokens, token_arguments
from moe_ops.layers.state import SchemeState

__all__ = [
    "FusedMoEMethodBase",
    "FusedMoEOptions",
    "FusedMoeWeightScaleSupported",
    "KeepsBits",
    "LayerSizes",
    "ParameterSpec",
    "QuantizedFusedMoEMethod",
    "RankGroup",
    "RoutesTokens",
    "SchemeState",
    "UnquantizedFusedMoEMethod",
    "aligned_sizes",
    "moe_config",
    "parameter_specs",
    "shared_experts_of",
    "summary",
    "takes_options",
    "token_arguments",
]
