"""Outputs of the expert GEMMs."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

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
    return a.new_empty(a.shape[0] * top_k, w.shape[1])


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
    """One row of ``I`` for each slot, in slot order or in expert order."""
    width = w.shape[1] // 2 if formula(activation).gated else w.shape[1]
    return a.new_empty(a.shape[0] * top_k, width)
