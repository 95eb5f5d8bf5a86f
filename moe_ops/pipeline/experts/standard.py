"""Experts of the Standard format on fused kernels, whose GEMMs gather rows by slot."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from moe_ops.activation import Activation, MoEActivation, kind_and_key
from moe_ops.pipeline.experts.base import FusedMoEExpertsModular
from moe_ops.pipeline.experts.differentiable import apply_to_tokens
from moe_ops.pipeline.experts.supports import EVERY_SCHEME, Supports
from moe_ops.pipeline.formats import ExpertTokensMetadata, FusedMoEActivationFormat
from moe_ops.pipeline.gemms import expert_weights
from moe_ops.pipeline.row_spaces import SlotRows
from moe_ops.pipeline.slot_experts import Settings, slot_experts
from moe_ops.pipeline.weight_and_reduce import TopKWeightAndReduce, TopKWeightAndReduceNoOP
from moe_ops.tensors import Routing, Rows


class TritonExperts(FusedMoEExpertsModular):
    """The fused kernels of `fused_experts`: GEMM 1 gathers rows and applies the activation.

    Source:
        vLLM ``TritonExperts``.
    """

    SUPPORTS: ClassVar[Supports] = Supports(schemes=EVERY_SCHEME, batch_invariant=True)
    ACTIVATES_IN_GEMM1: ClassVar[bool | None] = True
    differentiable_apply = apply_to_tokens
    TAKES_LORA: ClassVar[bool] = True

    @property
    def applies_router_weight_on_input(self) -> bool:
        """True if rows are not quantized: GEMM 1 then applies the weights in float32."""
        return self.quant_config.scheme.activation is None

    @staticmethod
    def activation_format() -> FusedMoEActivationFormat:
        """Standard."""
        return FusedMoEActivationFormat.Standard

    def workspace_shapes(
        self,
        M: int,
        N: int,
        K: int,
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta: ExpertTokensMetadata | None,
        activation: MoEActivation,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Expert rows, the activated intermediate (GEMM 1's only output), and tokens."""
        width = self.adjust_N_for_activation(N, activation)
        return (M * topk, max(width, K)), (M * topk, width), (M, K)

    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduce:
        """No operation: ``apply`` sums."""
        return TopKWeightAndReduceNoOP()

    def apply(
        self,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: MoEActivation | Activation | str,
        global_num_experts: int,
        expert_map: Tensor | None,
        a1q_scale: Tensor | None,
        expert_tokens_meta: ExpertTokensMetadata | None,
        apply_router_weight_on_input: bool,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return ``(T, H)``, weighted and summed: a new tensor, or ``out`` if that is given."""
        routing = Routing(topk_weights, topk_ids, expert_map)
        scheme, dtype = self.quant_config.scheme, self.moe_config.in_dtype
        rows = [Rows(hidden_states, a1q_scale)]
        del hidden_states, a1q_scale  # `slot_experts` gets the only reference
        invariant = self.moe_config.batch_invariant
        key = kind_and_key(activation)[1]
        return slot_experts(
            rows.pop(),
            expert_weights(w1, w2, self.quant_config),
            Settings(scheme, key, apply_router_weight_on_input, invariant),
            SlotRows.of(routing, w1.shape[0], scheme, dtype, invariant),
            topk_weights,
            dtype,
            out,
        )
