"""One rank, Standard format: tokens stay where they are and are quantized."""

from __future__ import annotations

from torch import Tensor

from moe_ops import ops
from moe_ops.pipeline.formats import FusedMoEActivationFormat, PrepareResult
from moe_ops.pipeline.prepare_finalize import (
    FusedMoEPrepareAndFinalizeModular,
    FusedMoEPrepareAndFinalizeMonolithic,
)
from moe_ops.pipeline.weight_and_reduce import (
    TopKWeightAndReduce,
    TopKWeightAndReduceContiguous,
    TopKWeightAndReduceDelegate,
)
from moe_ops.scheme import FusedMoEQuantConfig


def quantize_tokens(
    a1: Tensor, quant_config: FusedMoEQuantConfig, topk_weights: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Rows as the scheme takes them: of tokens, or of slots where weights are given."""
    quant = quant_config.scheme.activation
    if quant is not None:
        return ops.moe_quantize(a1, quant_config.a1_scale, topk_weights, None, None, 0, quant.key)
    return (a1 if topk_weights is None else weighted_rows(a1, topk_weights)), None


def weighted_rows(a1: Tensor, topk_weights: Tensor) -> Tensor:
    """``(T * k, H)``: each slot's row times its weight, in float32, rounded once."""
    rows = a1[:, None].float() * topk_weights[:, :, None].float()
    return rows.to(a1.dtype).flatten(0, 1)


class MoEPrepareAndFinalizeNoEP(FusedMoEPrepareAndFinalizeModular):
    """No communication.

    Source:
        vLLM ``MoEPrepareAndFinalizeNoEP``, which takes router weights on the input for k = 1 only.
    """

    @property
    def activation_format(self) -> FusedMoEActivationFormat:
        """Standard."""
        return FusedMoEActivationFormat.Standard

    def prepare(
        self,
        a1: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        num_experts: int,
        expert_map: Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: FusedMoEQuantConfig,
        defer_input_quant: bool = False,
    ) -> PrepareResult:
        """Scale by the router weight, then quantize, as far as asked."""
        weights = topk_weights if apply_router_weight_on_input else None
        if defer_input_quant:
            rows = a1 if weights is None else weighted_rows(a1, weights)
            return PrepareResult(rows, None, None, None, None)
        return PrepareResult(*quantize_tokens(a1, quant_config, weights), None, None, None)

    def finalize(
        self,
        fused_expert_output: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: TopKWeightAndReduce,
    ) -> Tensor:
        """Sum as the experts ask; rows in slot order where they leave it open."""
        reduce = weight_and_reduce_impl
        if isinstance(reduce, TopKWeightAndReduceDelegate):
            reduce = TopKWeightAndReduceContiguous()
        return reduce.apply(
            None, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input
        )


class MoEPrepareAndFinalizeNoEPMonolithic(FusedMoEPrepareAndFinalizeMonolithic):
    """No communication, for experts that route themselves."""

    @property
    def activation_format(self) -> FusedMoEActivationFormat:
        """Standard."""
        return FusedMoEActivationFormat.Standard

    def prepare(
        self,
        a1: Tensor,
        router_logits: Tensor,
        quant_config: FusedMoEQuantConfig,
        defer_input_quant: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Quantize, unless the experts do."""
        if defer_input_quant:
            return a1, None, router_logits
        return *quantize_tokens(a1, quant_config, None), router_logits

    def finalize(self, fused_expert_output: Tensor) -> Tensor:
        """Nothing is left to do."""
        return fused_expert_output
