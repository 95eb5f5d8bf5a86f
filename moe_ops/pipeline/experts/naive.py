"""Experts of the Batched format in plain PyTorch, to read and to compare with."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from moe_ops import ops
from moe_ops.activation import Activation, MoEActivation, kind_and_key
from moe_ops.pipeline.autocast import autocast_dtype
from moe_ops.pipeline.experts.own import BatchedExperts
from moe_ops.pipeline.experts.supports import EVERY_SCHEME, Supports
from moe_ops.pipeline.formats import ExpertTokensMetadata
from moe_ops.pipeline.gathering import counts_of
from moe_ops.pipeline.gemms import expert_weights
from moe_ops.scheme import Quant, Scheme, dequantize_rows, dequantize_weight
from moe_ops.tensors import ExpertWeight


class NaiveBatchedExperts(BatchedExperts):
    """Experts one by one over all padded rows: dequantize, multiply, activate.

    Products are summed in float64 and rounded to float32, so the result depends neither on the
    order in which a BLAS adds nor on whether it may use TF32. The product of GEMM 1 is rounded to
    the activations' dtype, and the intermediate is quantized again, as in the other
    implementations.

    Source:
        vLLM ``NaiveBatchedExperts``, which does not quantize the intermediate.
    """

    SUPPORTS: ClassVar[Supports] = Supports(schemes=EVERY_SCHEME)
    ACTIVATES_IN_GEMM1: ClassVar[bool | None] = None

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
        """Return ``(El, M, H)``; rows past an expert's count are zeros."""
        counts = counts_of(expert_tokens_meta)
        scheme = self.quant_config.scheme
        dtype = autocast_dtype(hidden_states) or self.moe_config.in_dtype
        weights = expert_weights(w1, w2, self.quant_config)
        used = torch.arange(hidden_states.shape[1], device=counts.device) < counts[:, None]
        quant = scheme.activation

        if quant is not None and a1q_scale is None:
            rows = (hidden_states, weights.a1_scale, counts)
            hidden_states, a1q_scale = ops.batched_quantize(*rows, quant.key)
        x = _dequantized(hidden_states, a1q_scale, quant)
        product = _weight_products(x, weights.w1, scheme).to(dtype)
        h = ops.batched_activation(product, counts, kind_and_key(activation)[1])
        h_scale = None
        if quant is not None:
            h, h_scale = ops.batched_quantize(h, weights.a2_scale, counts, quant.key)
        y = _weight_products(_dequantized(h, h_scale, quant), weights.w2, scheme)
        y = torch.where(used[..., None], y, 0.0).to(dtype)
        return y if out is None else out.copy_(y)


def _weight_products(x: Tensor, weight: ExpertWeight, scheme: Scheme) -> Tensor:
    """``x[e] @ w[e].T + bias[e]`` as float32, summed in float64; one expert after the other."""
    w = dequantize_weight(weight.stored, scheme)
    y = torch.stack([(x[e].double() @ w[e].double().t()).float() for e in range(len(w))])
    return y if weight.bias is None else y + weight.bias[:, None].float()


def _dequantized(x: Tensor, scale: Tensor | None, quant: Quant | None) -> Tensor:
    """Rows in float32, dequantized if they have scales."""
    if scale is None or quant is None:
        return x.float()
    return dequantize_rows(x, scale, quant)
