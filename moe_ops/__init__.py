"""moe_ops: fused Mixture-of-Experts as `torch.library` operators.

Legend of shapes, used everywhere: ``T`` tokens, ``H`` hidden size, ``I`` intermediate size, ``E``
global experts, ``El`` local experts, ``k`` experts of a token; slot ``t * k + j`` is the j-th
choice of token t. In GEMM kernels ``M`` counts rows, ``N`` weight rows, ``K`` the contraction.
``num_*`` is a count, ``*_ids`` are indices, ``*_offset`` an exclusive prefix sum with its total
last, and -1 means "no expert here".
"""

from moe_ops import ops as _ops  # noqa: F401  (registers the operators)
from moe_ops.activation import Activation, MoEActivation
from moe_ops.functional import (
    apply_moe_activation,
    batched_moe_kernel_quantize_input,
    count_expert_num_tokens,
    moe_align_block_size,
    moe_fused_mul_sum,
    moe_kernel_quantize_input,
    moe_permute,
    moe_unpermute,
)
from moe_ops.layer import (
    FusedMoE,
    FusedMoEMethodBase,
    FusedMoEOptions,
    FusedMoeWeightScaleSupported,
    LoadReport,
    QuantizedFusedMoEMethod,
    UnquantizedFusedMoEMethod,
    load_checkpoint,
)
from moe_ops.loading import CheckpointLayout
from moe_ops.parallel import (
    EplbState,
    FusedMoEParallelConfig,
    compute_logical_maps,
    determine_expert_map,
    eplb_map_to_physical_and_record,
    get_compressed_expert_map,
    initial_physical_to_logical_map,
    make_expert_params_mapping,
    maybe_roundup_hidden_size,
    move_experts,
    rebalance_experts,
    remap_topk_to_local,
)
from moe_ops.pipeline.async_prepare import AsyncPrepareAndFinalize
from moe_ops.pipeline.batched_prepare import BatchedPrepareAndFinalize
from moe_ops.pipeline.calls import Call
from moe_ops.pipeline.checking import checking
from moe_ops.pipeline.config import FusedMoEConfig
from moe_ops.pipeline.exchange.all_gather import AllGatherPrepareAndFinalize
from moe_ops.pipeline.exchange.exact import ExactAllToAllPrepareAndFinalize
from moe_ops.pipeline.exchange.fixed_capacity import FixedCapacityPrepareAndFinalize
from moe_ops.pipeline.exchange.symmetric import SymmetricPrepareAndFinalize
from moe_ops.pipeline.exchange.symmetric_batched import BatchedSymmetricPrepareAndFinalize
from moe_ops.pipeline.experts import (
    BatchedGroupedGemmExperts,
    BatchedTritonExperts,
    FusedMoEExperts,
    FusedMoEExpertsModular,
    FusedMoEExpertsMonolithic,
    GroupedGemmExperts,
    MonolithicExperts,
    NaiveBatchedExperts,
    Supports,
    TritonExperts,
)
from moe_ops.pipeline.explanation import Explanation, explain
from moe_ops.pipeline.formats import (
    ExpertTokensMetadata,
    FusedMoEActivationFormat,
    PrepareResult,
)
from moe_ops.pipeline.fused_experts import fused_experts, fused_moe
from moe_ops.pipeline.micro_batches import run_micro_batches
from moe_ops.pipeline.modular_kernel import FusedMoEKernel
from moe_ops.pipeline.no_ep import (
    MoEPrepareAndFinalizeNoEP,
    MoEPrepareAndFinalizeNoEPMonolithic,
)
from moe_ops.pipeline.prepare_finalize import (
    FusedMoEPrepareAndFinalize,
    FusedMoEPrepareAndFinalizeModular,
    FusedMoEPrepareAndFinalizeMonolithic,
)
from moe_ops.pipeline.selection import select_kernel
from moe_ops.pipeline.warmup import warmup
from moe_ops.pipeline.weight_and_reduce import (
    TopKWeightAndReduce,
    TopKWeightAndReduceContiguous,
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNaiveBatched,
    TopKWeightAndReduceNoOP,
)
from moe_ops.pipeline.workspace import workspace_nbytes
from moe_ops.quantization import quantize_
from moe_ops.routing import (
    RoutingMethodType,
    SelectedExperts,
    adjust_routing,
    fused_topk,
    get_routing_method_type,
    grouped_topk,
    hash_topk,
    select_experts,
    zero_experts,
)
from moe_ops.scheme import (
    FLOAT4_E2M1_MAX,
    FLOAT8_E4M3_MAX,
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
from moe_ops.tensors import Permutation, QTensor, TilePlan
from moe_ops.version import __version__

__all__ = [
    "FLOAT4_E2M1_MAX",
    "FLOAT8_E4M3_MAX",
    "SCHEMES",
    "Activation",
    "AllGatherPrepareAndFinalize",
    "AsyncPrepareAndFinalize",
    "BatchedGroupedGemmExperts",
    "BatchedPrepareAndFinalize",
    "BatchedSymmetricPrepareAndFinalize",
    "BatchedTritonExperts",
    "Call",
    "CheckpointLayout",
    "EplbState",
    "ExactAllToAllPrepareAndFinalize",
    "ExpertTokensMetadata",
    "Explanation",
    "FixedCapacityPrepareAndFinalize",
    "FusedMoE",
    "FusedMoEActivationFormat",
    "FusedMoEConfig",
    "FusedMoEExperts",
    "FusedMoEExpertsModular",
    "FusedMoEExpertsMonolithic",
    "FusedMoEKernel",
    "FusedMoEMethodBase",
    "FusedMoEOptions",
    "FusedMoEParallelConfig",
    "FusedMoEPrepareAndFinalize",
    "FusedMoEPrepareAndFinalizeModular",
    "FusedMoEPrepareAndFinalizeMonolithic",
    "FusedMoEQuantConfig",
    "FusedMoeWeightScaleSupported",
    "GroupedGemmExperts",
    "LoadReport",
    "MoEActivation",
    "MoEPrepareAndFinalizeNoEP",
    "MoEPrepareAndFinalizeNoEPMonolithic",
    "MonolithicExperts",
    "NaiveBatchedExperts",
    "Permutation",
    "PrepareResult",
    "QTensor",
    "Quant",
    "QuantizedFusedMoEMethod",
    "RoutingMethodType",
    "Scheme",
    "SelectedExperts",
    "Supports",
    "SymmetricPrepareAndFinalize",
    "TilePlan",
    "TopKWeightAndReduce",
    "TopKWeightAndReduceContiguous",
    "TopKWeightAndReduceDelegate",
    "TopKWeightAndReduceNaiveBatched",
    "TopKWeightAndReduceNoOP",
    "TritonExperts",
    "UnquantizedFusedMoEMethod",
    "__version__",
    "adjust_routing",
    "apply_moe_activation",
    "batched_moe_kernel_quantize_input",
    "checking",
    "compute_logical_maps",
    "count_expert_num_tokens",
    "dequantize_weight",
    "determine_expert_map",
    "eplb_map_to_physical_and_record",
    "explain",
    "fused_experts",
    "fused_moe",
    "fused_topk",
    "get_compressed_expert_map",
    "get_routing_method_type",
    "get_scheme",
    "grouped_topk",
    "hash_topk",
    "initial_physical_to_logical_map",
    "load_checkpoint",
    "make_expert_params_mapping",
    "maybe_roundup_hidden_size",
    "moe_align_block_size",
    "moe_fused_mul_sum",
    "moe_kernel_quantize_input",
    "moe_permute",
    "moe_unpermute",
    "move_experts",
    "pack_weight",
    "packs",
    "quantize_",
    "quantize_weight",
    "rebalance_experts",
    "remap_topk_to_local",
    "run_micro_batches",
    "select_experts",
    "select_kernel",
    "unpack_weight",
    "warmup",
    "workspace_nbytes",
    "zero_experts",
]
