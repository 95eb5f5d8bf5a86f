"""The stages put together: the modular kernel, its parts, and exchanges of tokens between ranks."""

from typing import TYPE_CHECKING

from moe_ops.on_demand import on_demand as _on_demand

_LATER = {
    "AllGatherPrepareAndFinalize": "exchange.all_gather",
    "AsyncPrepareAndFinalize": "async_prepare",
    "BatchedGroupedGemmExperts": "experts",
    "BatchedPrepareAndFinalize": "batched_prepare",
    "BatchedSymmetricPrepareAndFinalize": "exchange.symmetric_batched",
    "BatchedTritonExperts": "experts",
    "Call": "calls",
    "ExactAllToAllPrepareAndFinalize": "exchange.exact",
    "ExpertTokensMetadata": "formats",
    "FixedCapacityPrepareAndFinalize": "exchange.fixed_capacity",
    "FusedMoEActivationFormat": "formats",
    "FusedMoEExperts": "experts",
    "FusedMoEExpertsModular": "experts",
    "FusedMoEExpertsMonolithic": "experts",
    "FusedMoEPrepareAndFinalize": "prepare_finalize",
    "FusedMoEPrepareAndFinalizeModular": "prepare_finalize",
    "FusedMoEPrepareAndFinalizeMonolithic": "prepare_finalize",
    "GroupedGemmExperts": "experts",
    "MoEPrepareAndFinalizeNoEP": "no_ep",
    "MoEPrepareAndFinalizeNoEPMonolithic": "no_ep",
    "MonolithicExperts": "experts",
    "NaiveBatchedExperts": "experts",
    "PrepareResult": "formats",
    "Supports": "experts",
    "SymmetricPrepareAndFinalize": "exchange.symmetric",
    "TopKWeightAndReduce": "weight_and_reduce",
    "TopKWeightAndReduceContiguous": "weight_and_reduce",
    "TopKWeightAndReduceDelegate": "weight_and_reduce",
    "TopKWeightAndReduceNaiveBatched": "weight_and_reduce",
    "TopKWeightAndReduceNoOP": "weight_and_reduce",
    "TritonExperts": "experts",
    "attach_lora_ids": "lora",
    "run_micro_batches": "micro_batches",
}
"""Names by the module that has them, which is imported when the name is first used."""

if TYPE_CHECKING:
    from moe_ops.pipeline.async_prepare import AsyncPrepareAndFinalize
    from moe_ops.pipeline.batched_prepare import BatchedPrepareAndFinalize
    from moe_ops.pipeline.calls import Call
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
    from moe_ops.pipeline.formats import (
        ExpertTokensMetadata,
        FusedMoEActivationFormat,
        PrepareResult,
    )
    from moe_ops.pipeline.lora import attach_lora_ids
    from moe_ops.pipeline.micro_batches import run_micro_batches
    from moe_ops.pipeline.no_ep import (
        MoEPrepareAndFinalizeNoEP,
        MoEPrepareAndFinalizeNoEPMonolithic,
    )
    from moe_ops.pipeline.prepare_finalize import (
        FusedMoEPrepareAndFinalize,
        FusedMoEPrepareAndFinalizeModular,
        FusedMoEPrepareAndFinalizeMonolithic,
    )
    from moe_ops.pipeline.weight_and_reduce import (
        TopKWeightAndReduce,
        TopKWeightAndReduceContiguous,
        TopKWeightAndReduceDelegate,
        TopKWeightAndReduceNaiveBatched,
        TopKWeightAndReduceNoOP,
    )
else:
    __getattr__, __dir__ = _on_demand(__name__, _LATER)

__all__ = [
    "AllGatherPrepareAndFinalize",
    "AsyncPrepareAndFinalize",
    "BatchedGroupedGemmExperts",
    "BatchedPrepareAndFinalize",
    "BatchedSymmetricPrepareAndFinalize",
    "BatchedTritonExperts",
    "Call",
    "ExactAllToAllPrepareAndFinalize",
    "ExpertTokensMetadata",
    "FixedCapacityPrepareAndFinalize",
    "FusedMoEActivationFormat",
    "FusedMoEExperts",
    "FusedMoEExpertsModular",
    "FusedMoEExpertsMonolithic",
    "FusedMoEPrepareAndFinalize",
    "FusedMoEPrepareAndFinalizeModular",
    "FusedMoEPrepareAndFinalizeMonolithic",
    "GroupedGemmExperts",
    "MoEPrepareAndFinalizeNoEP",
    "MoEPrepareAndFinalizeNoEPMonolithic",
    "MonolithicExperts",
    "NaiveBatchedExperts",
    "PrepareResult",
    "Supports",
    "SymmetricPrepareAndFinalize",
    "TopKWeightAndReduce",
    "TopKWeightAndReduceContiguous",
    "TopKWeightAndReduceDelegate",
    "TopKWeightAndReduceNaiveBatched",
    "TopKWeightAndReduceNoOP",
    "TritonExperts",
    "attach_lora_ids",
    "run_micro_batches",
]
