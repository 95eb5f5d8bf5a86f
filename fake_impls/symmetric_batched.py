"""Outputs of the operator that writes slots' rows into the Batched format of other ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops import sizes
from moe_ops.fake_impls.quantize import check_width
from moe_ops.fake_impls.symmetric import check_rows_sent, check_scale, ranks_of
from moe_ops.scheme import parse_quant


def symmetric_send_batched(
    x: Tensor,
    scale: Tensor | None,
    topk_weights: Tensor,
    topk_ids: Tensor,
    placement: Tensor,
    held: Tensor,
    peers: Tensor,
    state: Tensor,
    rows_per_rank: int,
    on_input: bool,
    quant: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Rows, scales, counts and dropped slots of experts; local ids and weights of all tokens."""
    ranks = ranks_of(peers, state)
    check_rows_sent(x, topk_weights, topk_ids, rows_per_rank)
    sizes.shaped("placement", placement, 2, None)
    sizes.num_experts("placement.shape[1]", placement.shape[1])
    sizes.axes("held", held, 1)
    if not quant and scale is not None:
        raise ValueError("scale must be None for rows that are not quantized, got a Tensor")
    local, tokens = held.shape[0], ranks * rows_per_rank
    width, dtype, scales = x.shape[1], x.dtype, x.new_empty(0, dtype=torch.float32)
    if quant:
        rule = parse_quant(quant)
        check_scale(x, scale, on_input, quant)
        check_width(width, rule)
        scales = x.new_empty(rule.batched_scale_shape(local, tokens, width), dtype=rule.scale_dtype)
        width, dtype = rule.data_width(width), rule.dtype
    counts = x.new_empty(local, dtype=torch.int32)
    shape = (tokens, topk_ids.shape[1])
    return (
        x.new_empty((local, tokens, width), dtype=dtype),
        scales,
        counts,
        torch.empty_like(counts),
        topk_ids.new_empty(shape, dtype=torch.int32),
        topk_weights.new_empty(shape, dtype=torch.float32),
    )
