"""Prepare and finalize on one rank, Standard format: quantize the tokens, then sum the rows."""

from __future__ import annotations

from torch import Tensor

from moe_ops import ops
from moe_ops.pipeline.formats import FusedMoEActivationFormat, PrepareResult
from moe_ops.pipeline.prepare_finalize import (
    FusedMoEPrepareAndFinalizeModular,
    FusedMoEPrepareAndFinalizeMonolithic,
)
from moe_ops.pipeline.token_rows import quantize_tokens, weighted_rows
from moe_ops.pipeline.weight_and_reduce import (
    TopKWeightAndReduce,
    TopKWeightAndReduceContiguous,
    TopKWeightAndReduceDelegate,
)
from moe_ops.scheme import FusedMoEQuantConfig
from moe_ops.tensors import Routing


class MoEPrepareAndFinalizeNoEP(FusedMoEPrepareAndFinalizeModular):
    """Prepare and finalize without communication.

    Source:
        vLLM ``MoEPrepareAndFinalizeNoEP``, which takes router weights on the input for k = 1 only.
    """

    @property
    def activation_format(self) -> FusedMoEActivationFormat:
        """Standard."""
        return FusedMoEActivationFormat.Standard

    def has_gradients(self) -> bool:
        """True."""
        return True

    def takes_lora(self) -> bool:
        """True."""
        return True

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
        *,
        lora_ids: Tensor | None = None,
    ) -> PrepareResult:
        """Scale rows by router weights and quantize them, each if asked to.

        Tokens stay where they are, and so do their ``lora_ids``.
        """
        on_input = apply_router_weight_on_input
        if defer_input_quant:
            rows = weighted_rows(a1, topk_weights) if on_input else a1
            return PrepareResult(rows, None, None, None, None)
        routing = Routing(topk_weights, topk_ids, expert_map)
        rows, scale = quantize_tokens(a1, quant_config, routing, num_experts, on_input)
        return PrepareResult(rows, scale, None, None, None)

    def finalize(
        self,
        fused_expert_output: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: TopKWeightAndReduce,
    ) -> Tensor:
        """Sum as the experts specify; if they do not, sum rows in slot order."""
        reduce = weight_and_reduce_impl
        if isinstance(reduce, TopKWeightAndReduceDelegate):
            reduce = TopKWeightAndReduceContiguous()
        return reduce.apply(
            None, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input
        )


class MoEPrepareAndFinalizeNoEPMonolithic(FusedMoEPrepareAndFinalizeMonolithic):
    """Prepare and finalize without communication, for experts that route themselves."""

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
        quant = quant_config.scheme.activation
        if defer_input_quant or quant is None:
            return a1, None, router_logits
        # Tokens are not routed yet, so all of them count for the scale.
        scale = quant_config.input_scales[0]
        rows = ops.moe_quantize(a1, scale, None, None, None, 0, quant.key)
        return *rows, router_logits

    def finalize(self, fused_expert_output: Tensor) -> Tensor:
        """Return the experts' output unchanged."""
        return fused_expert_output
