"""moe_ops: fused Mixture-of-Experts as `torch.library` operators.

Legend of shapes, used everywhere: ``T`` tokens, ``H`` hidden size, ``I`` intermediate size, ``E``
global experts, ``El`` local experts, ``k`` experts of a token; slot ``t * k + j`` is the j-th
choice of token t. In GEMM kernels ``M`` counts rows, ``N`` weight rows, ``K`` the contraction.
``num_*`` is a count, ``*_ids`` are indices, ``*_offset`` an exclusive prefix sum with its total
last, and -1 means "no expert here".

The names here are what most programs need. The rest is in `moe_ops.functional` (single stages),
`moe_ops.routing`, `moe_ops.pipeline` (the modular kernel and exchanges between ranks),
`moe_ops.inspect` (what a layer runs, costs and allocates), `moe_ops.parallel`, `moe_ops.layer`,
`moe_ops.loading`, `moe_ops.scheme`, `moe_ops.tensors`, `moe_ops.training`, `moe_ops.testing` and
`moe_ops.integrations`.
"""

from typing import TYPE_CHECKING

from moe_ops import ops as _ops  # noqa: F401  (registers the operators)
from moe_ops.activation import Activation, MoEActivation
from moe_ops.functional import (
    apply_moe_activation,
    moe_align_block_size,
    moe_fused_mul_sum,
    moe_kernel_quantize_input,
    moe_permute,
    moe_unpermute,
)
from moe_ops.on_demand import import_after as _import_after
from moe_ops.on_demand import on_demand as _on_demand
from moe_ops.parallel import EplbState, FusedMoEParallelConfig
from moe_ops.pipeline.checking import checking
from moe_ops.pipeline.config import FusedMoEConfig
from moe_ops.pipeline.fused_experts import fused_experts, fused_moe
from moe_ops.routing import RoutingMethodType, fused_topk, grouped_topk, select_experts
from moe_ops.scheme import (
    SCHEMES,
    FusedMoEQuantConfig,
    Quant,
    Scheme,
    dequantize_weight,
    get_scheme,
    pack_weight,
    packs,
    quantize_weight,
    unpack_weight,
)
from moe_ops.tensors import QTensor
from moe_ops.version import __version__

_LATER = {
    "FusedMoE": "layer",
    "FusedMoEKernel": "pipeline.modular_kernel",
    "FusedMoEOptions": "layer",
    "LoadReport": "layer.checkpoint",
    "expert_lora": "training",
    "explain": "inspect.explanation",
    "load_checkpoint": "layer.checkpoint",
    "offload_": "offload",
    "offload_stats": "offload",
    "quantize_": "quantization",
    "select_kernel": "pipeline.selection",
    "warmup": "inspect.warmup",
    "workspace_nbytes": "inspect.workspace",
}
"""Names whose modules are imported when they are first used."""
_ALSO = {
    "functional": (
        "batched_moe_kernel_quantize_input",
        "count_expert_num_tokens",
    ),
    "layer": (
        "FusedMoEMethodBase",
        "FusedMoeWeightScaleSupported",
        "QuantizedFusedMoEMethod",
        "UnquantizedFusedMoEMethod",
    ),
    "parallel": (
        "determine_expert_map",
        "eplb_map_to_physical_and_record",
        "get_compressed_expert_map",
        "make_expert_params_mapping",
        "maybe_roundup_hidden_size",
        "rebalance_experts",
    ),
    "inspect.explanation": ("Explanation",),
    "pipeline": (
        "AllGatherPrepareAndFinalize",
        "BatchedGroupedGemmExperts",
        "BatchedPrepareAndFinalize",
        "BatchedTritonExperts",
        "ExpertTokensMetadata",
        "FusedMoEActivationFormat",
        "FusedMoEExperts",
        "FusedMoEExpertsModular",
        "FusedMoEExpertsMonolithic",
        "FusedMoEPrepareAndFinalize",
        "FusedMoEPrepareAndFinalizeModular",
        "FusedMoEPrepareAndFinalizeMonolithic",
        "GroupedGemmExperts",
        "MoEPrepareAndFinalizeNoEP",
        "MonolithicExperts",
        "NaiveBatchedExperts",
        "PrepareResult",
        "SymmetricPrepareAndFinalize",
        "TopKWeightAndReduce",
        "TopKWeightAndReduceContiguous",
        "TopKWeightAndReduceDelegate",
        "TopKWeightAndReduceNaiveBatched",
        "TopKWeightAndReduceNoOP",
        "TritonExperts",
    ),
    "routing": ("get_routing_method_type",),
    "scheme": (
        "FLOAT4_E2M1_MAX",
        "FLOAT8_E4M3_MAX",
    ),
}
"""Names that are in this module, too, by the module that has them; programs rely on both."""

if TYPE_CHECKING:
    from moe_ops.inspect.explanation import explain
    from moe_ops.inspect.warmup import warmup
    from moe_ops.inspect.workspace import workspace_nbytes
    from moe_ops.layer import FusedMoE, FusedMoEOptions
    from moe_ops.layer.checkpoint import LoadReport, load_checkpoint
    from moe_ops.offload import offload_, offload_stats
    from moe_ops.pipeline.modular_kernel import FusedMoEKernel
    from moe_ops.pipeline.selection import select_kernel
    from moe_ops.quantization import quantize_
    from moe_ops.training import expert_lora
else:  # a type checker would take any name for one of this module
    __getattr__, __dir__ = _on_demand(__name__, _LATER, _ALSO)

__all__ = [
    "SCHEMES",
    "Activation",
    "EplbState",
    "FusedMoE",
    "FusedMoEConfig",
    "FusedMoEKernel",
    "FusedMoEOptions",
    "FusedMoEParallelConfig",
    "FusedMoEQuantConfig",
    "LoadReport",
    "MoEActivation",
    "QTensor",
    "Quant",
    "RoutingMethodType",
    "Scheme",
    "__version__",
    "apply_moe_activation",
    "checking",
    "dequantize_weight",
    "expert_lora",
    "explain",
    "fused_experts",
    "fused_moe",
    "fused_topk",
    "get_scheme",
    "grouped_topk",
    "load_checkpoint",
    "moe_align_block_size",
    "moe_fused_mul_sum",
    "moe_kernel_quantize_input",
    "moe_permute",
    "moe_unpermute",
    "offload_",
    "offload_stats",
    "pack_weight",
    "packs",
    "quantize_",
    "quantize_weight",
    "select_experts",
    "select_kernel",
    "unpack_weight",
    "warmup",
    "workspace_nbytes",
]

_import_after("transformers.modeling_utils", "moe_ops.integrations.transformers")
