"""Outputs of the expert GEMMs."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from moe_ops import sizes
from moe_ops.activation import formula


def expert_gemm(
    a: Tensor,
    w: Tensor,
    bias: Tensor | None,
    input_weights: Tensor | None,
    output_weights: Tensor | None,
    plan: Tensor | None,
    topk_ids: Tensor | None,
    expert_map: Tensor | None,
    row_tiles: Sequence[int],
    top_k: int,
    expert_order: bool = False,
) -> Tensor:
    """One row of ``N`` for each slot, in slot order."""
    slots = sizes.gemm(a, w, (1, 1), bias, (plan, topk_ids, expert_map), row_tiles, top_k)
    sizes.entries("input_weights", input_weights, slots)
    sizes.entries("output_weights", output_weights, slots)
    return a.new_empty(slots, w.shape[1])


def expert_gemm_act(
    a: Tensor,
    w: Tensor,
    bias: Tensor | None,
    input_weights: Tensor | None,
    plan: Tensor | None,
    topk_ids: Tensor | None,
    expert_map: Tensor | None,
    row_tiles: Sequence[int],
    top_k: int,
    activation: str,
    expert_order: bool = False,
) -> Tensor:
    """One row of ``I`` for each slot, in slot order or permuted (``expert_order``)."""
    slots = sizes.gemm(a, w, (1, 1), bias, (plan, topk_ids, expert_map), row_tiles, top_k)
    sizes.entries("input_weights", input_weights, slots)
    return a.new_empty(slots, sizes.activated("w", w.shape[1], formula(activation)))
