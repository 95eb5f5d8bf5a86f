"""The Standard-format pipeline after prepare and alignment: one way, with and without gradients."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe_ops import ops
from moe_ops.pipeline.gemms import activated_gemm, gemm, gemm_then_sum, quantized, sums_at_once
from moe_ops.pipeline.row_spaces import SlotRows
from moe_ops.scheme import Scheme
from moe_ops.tensors import ExpertWeights, Rows


class Settings(NamedTuple):
    """What a call of the experts is given beside tensors."""

    scheme: Scheme
    activation: str
    """Key of the activation."""
    on_input: bool
    """Whether router weights multiply the rows of the first GEMM."""
    batch_invariant: bool
    summed: bool = True
    """Whether each token's rows are weighted and summed; else the result has the slots' rows."""
    rounds_product: bool = False
    """Whether the activation is a step of its own, which reads the rounded product."""


def slot_experts(
    rows: Rows,
    weights: ExpertWeights,
    settings: Settings,
    space: SlotRows,
    topk_weights: Tensor,
    dtype: torch.dtype,
    out: Tensor | None = None,
    products: list[Tensor] | None = None,
) -> Tensor:
    """Both GEMMs, and the weighted sum.

    The result is a new tensor, or ``out`` if that is given: ``(T, H)`` of ``dtype``; or the slots'
    rows ``(T * k, H)`` if they are not summed. For a backward pass the product of GEMM 1,
    ``(T * k, 2I)``, is appended to ``products``. It is stored by the kernel that applies the
    activation to the float32 sums, so that the result has the same bits with and without it.

    With router weights on the input, quantized rows (one per slot) already contain the weights.
    Rows that are not quantized are tokens, and GEMM 1 multiplies its product by the weights.

    Rows are freed after GEMM 1 if the caller holds no reference to them.
    """
    scheme, activation, weight_on_input, *_ = settings
    _, topk_ids, expert_map = space.tiles
    weighted = weight_on_input and scheme.activation is not None
    on_input = topk_weights if weight_on_input and not weighted else None
    top_k = 1 if weighted else topk_weights.shape[1]
    if rows.scale is None:
        rows = quantized(rows.data, weights.a1_scale, weights.w1, space, scheme, top_k, activation)
    space = space._replace(expert_order=scheme.weight is None)  # only the GEMMs touch rows between
    if products is None:
        activated = gemm(rows, weights.w1, space, top_k, scheme, dtype, activation, on_input)
    else:
        activated, product = activated_gemm(
            rows, weights.w1, space, top_k, scheme, dtype, activation, on_input
        )
        products.append(product)
    del rows
    h = quantized(activated, weights.a2_scale, weights.w2, space, scheme)
    del activated  # `h` is another tensor where it is quantized
    on_output = None if weight_on_input else topk_weights
    if settings.summed and sums_at_once(space, weights.w2, scheme):
        # After the launch of the first GEMM nothing is written but its results and `h`.
        total = gemm_then_sum(h, weights.w2, space, on_output, scheme, dtype, early=True)
        return total if out is None else out.copy_(total)
    y = gemm(h, weights.w2, space, 1, scheme, dtype)
    if not settings.summed:
        return y
    del h  # gone before the output is allocated: `workspace_nbytes` counts on it
    if out is None:
        return ops.moe_fused_mul_sum(
            y, on_output, topk_ids, expert_map, None, space.num_local_experts
        )
    ops.moe_fused_mul_sum_out(
        y, on_output, topk_ids, expert_map, None, space.num_local_experts, out=out
    )
    return out
