"""Experts over permuted rows, in separate steps.

This is the counterpart of vLLM's CUTLASS experts: permute, GEMM 1, activation (with quantization),
GEMM 2, unpermute with weights. Each step is an operator of its own, so any step can be replaced.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from moe_ops import ops
from moe_ops.activation import Activation, MoEActivation, kind_and_key
from moe_ops.pipeline.experts.base import FusedMoEExpertsModular
from moe_ops.pipeline.experts.batched import BatchedExperts, batched_input
from moe_ops.pipeline.experts.differentiable import apply_to_batches, apply_to_tokens
from moe_ops.pipeline.experts.supports import EVERY_SCHEME, Supports
from moe_ops.pipeline.formats import ExpertTokensMetadata, FusedMoEActivationFormat
from moe_ops.pipeline.gemms import activated, expert_weights, gemm, stored
from moe_ops.pipeline.row_spaces import permuted_rows
from moe_ops.pipeline.weight_and_reduce import TopKWeightAndReduce, TopKWeightAndReduceNoOP
from moe_ops.tensors import Permutation, Rows


class GroupedGemmExperts(FusedMoEExpertsModular):
    """Experts that permute rows by expert, and unpermute them with their weights.

    Source:
        vLLM ``CutlassExpertsFp8``.
    """

    SUPPORTS: ClassVar[Supports] = Supports(schemes=EVERY_SCHEME, batch_invariant=True)
    ACTIVATES_IN_GEMM1: ClassVar[bool | None] = False
    differentiable_apply = apply_to_tokens
    TAKES_LORA: ClassVar[bool] = True

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
        """GEMM outputs; the permuted input and the activated intermediate; tokens."""
        width = self.adjust_N_for_activation(N, activation)
        return (M * topk, max(N, K)), (M * topk, max(width, K)), (M, K)

    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduce:
        """No operation: unpermuting sums."""
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
    ) -> Tensor:
        """Return ``(T, H)``, weighted and summed."""
        weights = expert_weights(w1, w2, self.quant_config)
        scheme, dtype = self.quant_config.scheme, self.moe_config.in_dtype
        k = topk_ids.shape[1]
        order = Permutation(*ops.moe_permutation(topk_ids, expert_map, w1.shape[0]))
        top_k = 1 if apply_router_weight_on_input else k
        per_tensor = scheme.activation is not None and scheme.activation.per_tensor
        rows = Rows(_permuted(hidden_states, order, top_k), a1q_scale)
        if a1q_scale is not None and not per_tensor:
            rows = rows._replace(scale=_permuted(a1q_scale, order, top_k))
        space = permuted_rows(
            order.expert_first_token_offset,
            topk_ids.numel(),
            scheme,
            self.moe_config.batch_invariant,
        )
        rows = stored(rows, weights, space, scheme)
        key = kind_and_key(activation)[1]
        product = gemm(rows, weights.w1, space, 1, scheme, dtype)
        del rows
        h = activated(product, weights, space, scheme, key)
        del product
        y = gemm(h, weights.w2, space, 1, scheme, dtype)
        del h
        return ops.moe_unpermute(
            y,
            None if apply_router_weight_on_input else topk_weights,
            order.inv_permuted_idx,
            order.expert_first_token_offset,
        )


def _permuted(x: Tensor, order: Permutation, top_k: int) -> Tensor:
    """Each slot's row (the row of token ``slot // top_k``), permuted by expert."""
    rows = x.view(torch.uint8) if x.element_size() == 1 else x
    rows = ops.gather_rows(rows, order.permuted_idx, order.expert_first_token_offset, top_k)
    return rows.view(x.dtype)


class BatchedGroupedGemmExperts(BatchedExperts):
    """The steps of `GroupedGemmExperts` over the padded rows of each expert.

    Source:
        vLLM ``CutlassBatchedExpertsFp8``.
    """

    SUPPORTS: ClassVar[Supports] = Supports(schemes=EVERY_SCHEME, batch_invariant=True)
    ACTIVATES_IN_GEMM1: ClassVar[bool | None] = False
    differentiable_apply = apply_to_batches

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
        """Shapes with all padded rows; GEMM 1's product is stored before the activation."""
        width, rows = self.adjust_N_for_activation(N, activation), (local_num_experts, M)
        return (*rows, max(N, K)), (*rows, max(width, K)), (*rows, K)

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
        product = gemm(rows, weights.w1, space, 1, scheme, dtype)
        del hidden_states, a1q_scale, rows
        h = activated(product, weights, space, scheme, key)
        del product
        y = gemm(h, weights.w2, space, 1, scheme, dtype)
        return y.view(*shape, y.shape[1])
