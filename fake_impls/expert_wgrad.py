"""Outputs of the gradients of expert weights, biases and router weights."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops import sizes
from moe_ops.dispatch.row_tiles import gemm_rule
from moe_ops.scheme import UNQUANTIZED
from moe_ops.tensors import AnyTiles


def expert_wgrad(
    dy: Tensor,
    x: Tensor,
    topk_weights: Tensor | None,
    tiles: AnyTiles,
    num_experts: int,
    scheme: str,
    out_dtype: torch.dtype,
    batch_invariant: bool = False,
) -> Tensor:
    """``(E, N, K)`` for rows ``(R, N)`` and ``(R, K)``."""
    _check_grouped((dy, x), topk_weights, tiles, num_experts, scheme, batch_invariant)
    return dy.new_empty((num_experts, dy.shape[1], x.shape[1]), dtype=out_dtype)


def expert_wgrad_out(
    dy: Tensor,
    x: Tensor,
    topk_weights: Tensor | None,
    tiles: AnyTiles,
    num_experts: int,
    batch_invariant: bool = False,
    *,
    out: Tensor,
) -> None:
    """Check ``out``, to which gradients are added: float32 ``(E, N, K)``, contiguous."""
    _check_grouped((dy, x), topk_weights, tiles, num_experts, UNQUANTIZED.key, batch_invariant)
    sizes.shaped("out", out, num_experts, dy.shape[1], x.shape[1])
    sizes.added_to(out, torch.float32, "of sums")


def expert_bias_grad(
    dy: Tensor,
    topk_weights: Tensor | None,
    tiles: AnyTiles,
    num_experts: int,
    scheme: str,
    batch_invariant: bool = False,
) -> Tensor:
    """float32 ``(E, N)`` for rows ``(R, N)``."""
    _check_grouped((dy,), topk_weights, tiles, num_experts, scheme, batch_invariant)
    return dy.new_empty((num_experts, dy.shape[1]), dtype=torch.float32)


def _check_grouped(
    rows: tuple[Tensor, ...],
    topk_weights: Tensor | None,
    tiles: AnyTiles,
    num_experts: int,
    scheme: str,
    batch_invariant: bool,
) -> None:
    """Check rows that a plan groups by expert, and their router weights."""
    rule = gemm_rule(scheme, rows[0], tiles, batch_invariant)
    slots = sizes.planned(rows, tiles, num_experts, rule)
    sizes.entries("topk_weights", topk_weights, slots)


def slot_products(
    x: Tensor,
    y: Tensor,
    topk_ids: Tensor,
    expert_map: Tensor | None,
    num_local_experts: int,
    by_expert: bool,
) -> Tensor:
    """float32 ``(T, k)`` for rows ``(T, H)`` and ``(T * k, H)``, or ``(El, H)`` by expert."""
    tokens, k = sizes.slots(topk_ids, expert_map)
    sizes.num_experts("num_local_experts", num_local_experts)
    sizes.axes("x", x, 2)
    sizes.equal("x.shape[0]", x.shape[0], tokens)
    sizes.shaped("y", y, num_local_experts if by_expert else tokens * k, x.shape[1])
    return x.new_empty((tokens, k), dtype=torch.float32)
