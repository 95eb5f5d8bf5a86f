"""Experts on the operators of this library: one class for both formats, and its policies.

All of them run `moe_ops.pipeline.forward.forward`. They differ in how rows lie between the GEMMs
(``GATHER``) and in whether the activation is a step of its own (``ACTIVATES_IN_GEMM1``).
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from moe_ops.activation import Activation, MoEActivation, kind_and_key
from moe_ops.pipeline.autocast import autocast_dtype
from moe_ops.pipeline.backward import differentiable_experts
from moe_ops.pipeline.experts.base import FusedMoEExpertsModular
from moe_ops.pipeline.experts.supports import EVERY_SCHEME, Supports
from moe_ops.pipeline.formats import ExpertTokensMetadata, FusedMoEActivationFormat
from moe_ops.pipeline.forward import Pass, forward
from moe_ops.pipeline.gathering import Settings, by_permutation, by_slot, counts_of, rows_by_expert
from moe_ops.pipeline.gemms import expert_weights
from moe_ops.pipeline.lora import ExpertLora
from moe_ops.pipeline.weight_and_reduce import (
    TopKWeightAndReduce,
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNoOP,
)
from moe_ops.tensors import Routing


class OperatorExperts(FusedMoEExpertsModular):
    """Experts on the operators of this library; in the Standard format by default."""

    SUPPORTS: ClassVar[Supports] = Supports(schemes=EVERY_SCHEME, batch_invariant=True)
    ACTIVATES_IN_GEMM1: ClassVar[bool | None] = True
    TAKES_LORA: ClassVar[bool] = True
    GATHER: ClassVar[Any] = staticmethod(by_slot)
    """The function of `moe_ops.pipeline.gathering` that lays out the rows."""

    @staticmethod
    def activation_format() -> FusedMoEActivationFormat:
        """Standard."""
        return FusedMoEActivationFormat.Standard

    @property
    def applies_router_weight_on_input(self) -> bool:
        """True for slots whose rows are not quantized: GEMM 1 applies the weights in float32."""
        standard = self.activation_format() is FusedMoEActivationFormat.Standard
        return standard and self.quant_config.scheme.activation is None

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
        """The larger GEMM output; the activated intermediate, with copied rows of it; the result.

        M is the number of rows per expert in the Batched format.
        """
        width = self.adjust_N_for_activation(N, activation)
        fused = self.ACTIVATES_IN_GEMM1 is not False
        batched = self.activation_format() is FusedMoEActivationFormat.BatchedExperts
        rows = (local_num_experts, M) if batched else (M * topk,)
        first, second = (max(width, K), width) if fused else (max(N, K), max(width, K))
        return (*rows, first), (*rows, second), (*rows, K) if batched else (M, K)

    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduce:
        """No operation: ``apply`` sums."""
        return TopKWeightAndReduceNoOP()

    def step(
        self, w1: Tensor, w2: Tensor, activation: MoEActivation | Activation | str, on_input: bool
    ) -> Pass:
        """What `forward` is given for these weights."""
        config, layer = self.quant_config, self.moe_config
        dtype = layer.in_dtype
        if torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"):
            dtype = autocast_dtype(w1) or dtype
        settings = Settings(
            config.scheme,
            kind_and_key(activation)[1],
            on_input,
            layer.batch_invariant,
            dtype,
            rounds_product=not self.ACTIVATES_IN_GEMM1,
        )
        return Pass(expert_weights(w1, w2, config), settings, self.GATHER)

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
        """Return ``(T, H)``, weighted and summed, or ``(El, M, H)`` in the Batched format.

        The result is a new tensor, or ``out`` if that is given. In the Batched format rows past an
        expert's count are undefined.
        """
        rows = [hidden_states]
        del hidden_states  # `forward` gets the only reference
        result: Tensor = forward(
            self.step(w1, w2, activation, apply_router_weight_on_input),
            rows.pop(),
            Routing(topk_weights, topk_ids, expert_map),
            scale=a1q_scale,
            meta=expert_tokens_meta,
            out=out,
        )
        return result

    def differentiable_apply(
        self,
        rows: Tensor,
        w1: Tensor,
        w2: Tensor,
        routing: Routing,
        activation: Any,
        meta: ExpertTokensMetadata | None,
        on_input: bool,
        lora: ExpertLora | None = None,
    ) -> Tensor:
        """`apply` with gradients, and adapters; all classes of a format compute the same."""
        step = self.step(w1, w2, activation, on_input)
        return differentiable_experts(
            rows, step.weights, routing, step.settings, self.quant_config, lora
        )


class TritonExperts(OperatorExperts):
    """The fused kernels of `fused_experts`: GEMM 1 gathers rows and applies the activation.

    Source:
        vLLM ``TritonExperts``.
    """


class GroupedGemmExperts(OperatorExperts):
    """Experts that permute rows by expert, and unpermute them with their weights.

    The steps are permute, GEMM 1, activation (with quantization), GEMM 2, unpermute with weights.
    Each of them is an operator of its own, so any step can be replaced.

    Source:
        vLLM ``CutlassExpertsFp8``.
    """

    ACTIVATES_IN_GEMM1: ClassVar[bool | None] = False
    GATHER: ClassVar[Any] = staticmethod(by_permutation)


class BatchedExperts(OperatorExperts):
    """Base of the implementations in the Batched format."""

    TAKES_LORA: ClassVar[bool] = False
    GATHER: ClassVar[Any] = staticmethod(rows_by_expert)

    @staticmethod
    def activation_format() -> FusedMoEActivationFormat:
        """BatchedExperts."""
        return FusedMoEActivationFormat.BatchedExperts

    def supports_expert_map(self) -> bool:
        """False, because prepare has already sorted the rows by local expert."""
        return False

    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduce:
        """Delegated to prepare-finalize, which knows where the rows came from."""
        return TopKWeightAndReduceDelegate()

    def differentiable_apply(  # type: ignore[override]  # without adapters: `takes_lora`
        self,
        rows: Tensor,
        w1: Tensor,
        w2: Tensor,
        routing: Routing,
        activation: Any,
        meta: ExpertTokensMetadata | None,
        on_input: bool,
    ) -> Tensor:
        """`apply` with gradients: each row in use is a token of one slot, whose weight is 1.

        Prepare and finalize apply the routing's weights.
        """
        counts_E, (experts, most, _) = counts_of(meta), rows.shape
        used = torch.arange(most, device=rows.device) < counts_E[:, None]
        expert = torch.arange(experts, dtype=torch.int32, device=rows.device)[:, None]
        ids = torch.where(used, expert, -1).view(-1, 1)
        each = Routing(rows.new_ones(ids.shape, dtype=torch.float32), ids)
        y = super().differentiable_apply(
            rows.flatten(0, 1), w1, w2, each, activation, meta, on_input=False
        )
        return y.view(rows.shape)


class BatchedTritonExperts(BatchedExperts):
    """The kernels of `TritonExperts` over the padded rows of each expert.

    The plan is made from the counts on the device, so no tile holds only padding.

    Source:
        vLLM ``BatchedTritonExperts``, where the int8 and int4 schemes and zero points are missing.
    """


class BatchedGroupedGemmExperts(BatchedExperts):
    """The steps of `GroupedGemmExperts` over the padded rows of each expert.

    Source:
        vLLM ``CutlassBatchedExpertsFp8``.
    """

    ACTIVATES_IN_GEMM1: ClassVar[bool | None] = False
