"""Outputs of the operators that exchange rows through windows."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops import sizes
from moe_ops.fake_impls.quantize import moe_quantize
from moe_ops.scheme import parse_quant


def symmetric_send(
    x: Tensor,
    scale: Tensor | None,
    topk_weights: Tensor,
    topk_ids: Tensor,
    expert_ranks: Tensor | None,
    peers: Tensor,
    state: Tensor,
    rows_per_rank: int,
    num_experts: int,
    on_input: bool,
    quant: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows of all ranks, their scales, weights and ids."""
    sizes.axes("x", x, 2)
    sizes.shaped("topk_ids", topk_ids, x.shape[0], None)
    sizes.shaped("topk_weights", topk_weights, *topk_ids.shape)
    sizes.between("x.shape[0]", x.shape[0], 0, rows_per_rank)
    if expert_ranks is not None:
        sizes.shaped("expert_ranks", expert_ranks, num_experts)
    if on_input:
        sizes.equal("topk_ids.shape[1]", topk_ids.shape[1], 1)
    tokens = (peers.shape[0] - 1) * rows_per_rank
    if quant:
        sizes.row_scale(scale, parse_quant(quant), x.shape[0])
        there = x.new_empty((tokens, x.shape[1]))
        rows, row_scale = moe_quantize(there, scale, None, None, None, 0, quant)
    else:
        rows, row_scale = x.new_empty((tokens, x.shape[1])), x.new_empty(0, dtype=torch.float32)
        if scale is not None:
            row_scale = scale.new_empty((tokens, scale.shape[1]))
    shape = (tokens, topk_ids.shape[1])
    weights = topk_weights.new_empty(shape, dtype=torch.float32)
    return rows, row_scale, weights, topk_ids.new_empty(shape, dtype=torch.int32)


def symmetric_return(
    sums: Tensor,
    expert_ranks: Tensor | None,
    peers: Tensor,
    state: Tensor,
    top_k: int,
) -> Tensor:
    """``(P, H)``."""
    sizes.axes("sums", sums, 2)
    ranks = peers.shape[0] - 1
    return sums.new_empty((sums.shape[0] // ranks, sums.shape[1]))
