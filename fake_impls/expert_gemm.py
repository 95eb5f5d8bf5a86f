"""Output of the expert GEMM whose operands are not quantized."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from moe_ops import sizes


def expert_matmul(
    a: Tensor,
    w: Tensor,
    bias: Tensor | None,
    topk_weights: Tensor | None,
    plan: Tensor | None,
    topk_ids: Tensor | None,
    expert_map: Tensor | None,
    row_tiles: Sequence[int],
    top_k: int,
    activation: str = "",
    expert_order: bool = False,
) -> Tensor:
    """``(slots, N)``, or ``(slots, I)`` with a gated activation; in slot order or permuted."""
    slots = sizes.gemm(a, w, (1, 1), bias, (plan, topk_ids, expert_map), row_tiles, top_k)
    sizes.entries("topk_weights", topk_weights, slots)
    return a.new_empty(slots, sizes.activated("w", w.shape[1], activation))
