"""Output of the expert GEMM whose operands are not quantized."""

from __future__ import annotations

from torch import Tensor

from moe_ops import sizes
from moe_ops.dispatch.row_tiles import gemm_rule
from moe_ops.scheme import UNQUANTIZED
from moe_ops.tensors import AnyTiles


def expert_matmul(
    a: Tensor,
    w: Tensor,
    bias: Tensor | None,
    topk_weights: Tensor | None,
    tiles: AnyTiles,
    top_k: int,
    activation: str = "",
    expert_order: bool = False,
    batch_invariant: bool = False,
) -> Tensor:
    """``(slots, N)``, or ``(slots, I)`` with a gated activation; in slot order or permuted."""
    rule = gemm_rule(UNQUANTIZED.key, a, tiles, batch_invariant)
    slots = sizes.gemm(a, w, (1, 1), bias, tiles, rule, top_k)
    sizes.entries("topk_weights", topk_weights, slots)
    return a.new_empty(slots, sizes.activated("w", w.shape[1], activation))
