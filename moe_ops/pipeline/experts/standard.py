"""Experts of the Standard format on fused kernels, whose GEMMs gather rows by slot."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from moe_ops import ops
from moe_ops.activation import Activation, MoEActivation, kind_and_key
from moe_ops.pipeline.experts.base import FusedMoEExpertsModular
from moe_ops.pipeline.experts.differentiable import apply_to_tokens
from moe_ops.pipeline.experts.supports import EVERY_SCHEME, Supports
from moe_ops.pipeline.formats import ExpertTokensMetadata, FusedMoEActivationFormat
from moe_ops.pipeline.gemms import (
    expert_weights,
    gemm,
    gemm_then_sum,
    quantized,
    sums_at_once,
)
from moe_ops.pipeline.row_spaces import SlotRows
from moe_ops.pipeline.weight_and_reduce import TopKWeightAndReduce, TopKWeightAndReduceNoOP
from moe_ops.scheme import Scheme
from moe_ops.tensors import ExpertWeights, Routing, Rows


def slot_experts(
    rows: Rows,
    weights: ExpertWeights,
    scheme: Scheme,
    space: SlotRows,
    topk_weights: Tensor,
    activation: str,
    dtype: torch.dtype,
    weight_on_input: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """The Standard pipeline after prepare and alignment: both GEMMs, and the weighted sum.

    The result is a new tensor, or ``out`` if that is given: ``(T, H)`` of ``dtype``.

    With router weights on the input, quantized rows (one per slot) already contain the weights.
    Rows that are not quantized are tokens, and GEMM 1 multiplies its product by the weights.

    Rows are freed after GEMM 1 if the caller holds no reference to them.
    """
    _, topk_ids, expert_map = space.tiles
    weighted = weight_on_input and scheme.activation is not None
    on_input = topk_weights if weight_on_input and not weighted else None
    top_k = 1 if weighted else topk_weights.shape[1]
    if rows.scale is None:
        rows = quantized(rows.data, weights.a1_scale, weights.w1, space, scheme, top_k, activation)
    space = space._replace(expert_order=scheme.weight is None)  # only the GEMMs touch rows between
    on_output = None if weight_on_input else topk_weights
    product = gemm(rows, weights.w1, space, top_k, scheme, dtype, activation, on_input)
    del rows
    h = quantized(product, weights.a2_scale, weights.w2, space, scheme)
    del product  # `h` is another tensor where it is quantized
    if sums_at_once(space, weights.w2, scheme):
        # After the launch of the first GEMM nothing is written but `product` and `h`.
        total = gemm_then_sum(h, weights.w2, space, on_output, scheme, dtype, early=True)
        return total if out is None else out.copy_(total)
    y = gemm(h, weights.w2, space, 1, scheme, dtype)
    del h  # gone before the output is allocated: `workspace_nbytes` counts on it
    if out is None:
        return ops.moe_fused_mul_sum(
            y, on_output, topk_ids, expert_map, None, space.num_local_experts
        )
    ops.moe_fused_mul_sum_out(
        y, on_output, topk_ids, expert_map, None, space.num_local_experts, out=out
    )
    return out


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
        return slot_experts(
            rows.pop(),
            expert_weights(w1, w2, self.quant_config),
            scheme,
            SlotRows.of(routing, w1.shape[0], scheme, dtype, self.moe_config.batch_invariant),
            topk_weights,
            kind_and_key(activation)[1],
            dtype,
            apply_router_weight_on_input,
            out,
        )
