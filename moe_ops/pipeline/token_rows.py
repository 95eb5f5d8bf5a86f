"""The rows that the first GEMM reads, made from the tokens of one rank."""

from __future__ import annotations

from torch import Tensor

from moe_ops import ops
from moe_ops.scheme import FusedMoEQuantConfig
from moe_ops.tensors import Routing


def quantize_tokens(
    a1: Tensor,
    quant_config: FusedMoEQuantConfig,
    routing: Routing,
    num_experts: int,
    weight_on_input: bool,
) -> tuple[Tensor, Tensor | None]:
    """Quantize rows as the scheme requires: tokens, or slots scaled by their router weights.

    Rows that no expert reads are not read here either: they are undefined, and a per-tensor scale
    must not depend on them.

    Args:
        a1: ``(T, H)``.
        quant_config: the scheme and, if it is static, the scale.
        routing: the tokens' routing.
        num_experts: El, or with an ``expert_map`` any larger number.
        weight_on_input: whether to scale rows by router weights, in float32, before quantizing.
    """
    topk_weights, topk_ids, expert_map = routing
    weights = topk_weights if weight_on_input else None
    quant = quant_config.scheme.activation
    if quant is not None:
        slots = (topk_ids, expert_map, num_experts)
        return ops.moe_quantize(a1, quant_config.input_scales[0], weights, *slots, quant.key)
    return (a1 if weights is None else weighted_rows(a1, weights)), None


def weighted_rows(a1: Tensor, topk_weights: Tensor) -> Tensor:
    """``(T * k, H)``: each slot's row times its weight, in float32, rounded once."""
    rows = a1[:, None].float() * topk_weights[:, :, None].float()
    return rows.to(a1.dtype).flatten(0, 1)
