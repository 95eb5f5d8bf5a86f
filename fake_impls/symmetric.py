"""Outputs of the operators that exchange rows through windows."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops import sizes
from moe_ops.checks import MAX_EXPERTS
from moe_ops.fake_impls.quantize import moe_quantize
from moe_ops.scheme import parse_quant
from moe_ops.windows import FAILED

MOST = 2**31 - 1


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
    ranks = ranks_of(peers, state)
    check_rows_sent(x, topk_weights, topk_ids, rows_per_rank)
    sizes.num_experts("num_experts", num_experts)
    if expert_ranks is not None:
        sizes.shaped("expert_ranks", expert_ranks, num_experts)
    check_scale(x, scale, on_input, quant)
    if on_input:
        sizes.equal("topk_ids.shape[1]", topk_ids.shape[1], 1)
    tokens = ranks * rows_per_rank
    if quant:
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
    ranks = ranks_of(peers, state)
    sizes.axes("sums", sums, 2)
    sizes.in_range("sums.shape[1]", sums.shape[1], 1, MOST)
    sizes.in_range("top_k", top_k, 1, MAX_EXPERTS)
    if expert_ranks is not None:
        sizes.axes("expert_ranks", expert_ranks, 1)
    if type(sums.shape[0]) is int and type(ranks) is int and sums.shape[0] % ranks:
        raise ValueError(
            f"sums must have equally many rows of each of {ranks} ranks, got shape "
            f"{tuple(sums.shape)}"
        )
    return sums.new_empty((sums.shape[0] // ranks, sums.shape[1]))


def ranks_of(peers: Tensor, state: Tensor) -> int:
    """R, of the addresses of R windows and of the host's word."""
    sizes.axes("peers", peers, 1)
    ranks = peers.shape[0] - 1
    sizes.in_range("peers.shape[0]", ranks + 1, 2, MOST)
    sizes.shaped("state", state, FAILED + 1)
    return ranks


def check_rows_sent(x: Tensor, topk_weights: Tensor, topk_ids: Tensor, rows_per_rank: int) -> None:
    """Check the rows that this rank sends, of P at most, and their slots."""
    sizes.axes("x", x, 2)
    sizes.in_range("x.shape[1]", x.shape[1], 1, MOST)
    sizes.shaped("topk_ids", topk_ids, x.shape[0], None)
    sizes.in_range("topk_ids.shape[1]", topk_ids.shape[1], 1, MAX_EXPERTS)
    sizes.shaped("topk_weights", topk_weights, *topk_ids.shape)
    sizes.in_range("rows_per_rank", rows_per_rank, 0, MOST)
    sizes.in_range("x.shape[0]", x.shape[0], 0, rows_per_rank)


def check_scale(x: Tensor, scale: Tensor | None, on_input: bool, quant: str) -> None:
    """Check the scales of rows that are quantized already, or the one with which rows are."""
    if not quant:
        if scale is None:
            return
        sizes.shaped("scale", scale, x.shape[0], None)
        if on_input:
            raise ValueError("on_input must be False for rows that have a scale, got True")
        return
    rule = parse_quant(quant)
    sizes.row_scale(scale, rule, x.shape[0])
    sizes.entries("scale", scale, 1)
    if scale is None and rule.per_tensor:
        raise ValueError("scale must be given if all rows have one, because ranks share it")
