"""Experts of the Batched format on fused kernels."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from moe_ops import checks
from moe_ops.activation import Activation, MoEActivation, kind_and_key
from moe_ops.pipeline.experts.base import FusedMoEExpertsModular
from moe_ops.pipeline.experts.differentiable import apply_to_batches
from moe_ops.pipeline.experts.supports import EVERY_SCHEME, Supports
from moe_ops.pipeline.formats import ExpertTokensMetadata, FusedMoEActivationFormat
from moe_ops.pipeline.gemms import expert_weights, gemm, gemm_act, stored
from moe_ops.pipeline.row_spaces import BatchedRows
from moe_ops.pipeline.weight_and_reduce import TopKWeightAndReduce, TopKWeightAndReduceDelegate
from moe_ops.scheme import Scheme
from moe_ops.tensors import ExpertWeights, Rows


def batched_input(
    prepared: Rows,
    meta: ExpertTokensMetadata | None,
    weights: ExpertWeights,
    scheme: Scheme,
    batch_invariant: bool,
) -> tuple[Rows, BatchedRows]:
    """Rows ``(El, M, H)`` as the GEMMs take them, and their `BatchedRows`.

    Raises:
        ValueError: no ``expert_tokens_meta``, not three axes, or rows of other experts.
    """
    if meta is None:
        raise ValueError("expert_tokens_meta must be given in the Batched format, got None")
    hidden_states, a1q_scale = prepared
    num_local_experts = weights.w1.data.shape[0]
    checks.tensor("hidden_states", hidden_states, 3, (hidden_states.dtype,))
    checks.size("hidden_states.shape[0]", hidden_states.shape[0], "w1.shape[0]", num_local_experts)
    counted = meta.expert_num_tokens.shape[0]
    checks.size("expert_num_tokens.shape[0]", counted, "w1.shape[0]", num_local_experts)
    count, most = meta.expert_num_tokens, hidden_states.shape[1]
    space = BatchedRows.of(count, most, scheme, batch_invariant)
    scale = None if a1q_scale is None else a1q_scale.flatten(0, 1)
    return stored(Rows(hidden_states.flatten(0, 1), scale), weights, space, scheme), space


class BatchedExperts(FusedMoEExpertsModular):
    """Base of the implementations in the Batched format."""

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
        """Shapes with all padded rows; M is the number of rows per expert."""
        width, rows = self.adjust_N_for_activation(N, activation), (local_num_experts, M)
        return (*rows, max(width, K)), (*rows, width), (*rows, K)


class BatchedTritonExperts(BatchedExperts):
    """The kernels of `TritonExperts` over the padded rows of each expert.

    The plan is made from the counts on the device, so no tile holds only padding.

    Source:
        vLLM ``BatchedTritonExperts``, where the int8 and int4 schemes and zero points are missing.
    """

    SUPPORTS: ClassVar[Supports] = Supports(schemes=EVERY_SCHEME, batch_invariant=True)
    ACTIVATES_IN_GEMM1: ClassVar[bool | None] = True
    differentiable_apply = apply_to_batches

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
    ) -> Tensor:
        """Return ``(El, M, H)``; rows past an expert's count are undefined."""
        weights = expert_weights(w1, w2, self.quant_config)
        scheme, dtype = self.quant_config.scheme, self.moe_config.in_dtype
        meta, shape = expert_tokens_meta, hidden_states.shape[:2]
        rows, space = batched_input(
            Rows(hidden_states, a1q_scale), meta, weights, scheme, self.moe_config.batch_invariant
        )
        key = kind_and_key(activation)[1]
        h = gemm_act(rows, weights, space, 1, scheme, dtype, key)
        del hidden_states, a1q_scale, rows  # as large as what the second GEMM returns
        y = gemm(h, weights.w2, space, 1, scheme, dtype)
        return y.view(*shape, y.shape[1])
