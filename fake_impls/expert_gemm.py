"""Output of the expert GEMMs whose operands are not quantized."""

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


def expert_matmul_add(
    a: Tensor,
    w: Tensor,
    topk_weights: Tensor | None,
    tiles: AnyTiles,
    top_k: int,
    batch_invariant: bool = False,
    *,
    out: Tensor,
) -> None:
    """Check ``out``, to which products are added: ``(slots, N)``, contiguous, dtype of ``a``."""
    rule = gemm_rule(UNQUANTIZED.key, a, tiles, batch_invariant)
    slots = sizes.gemm(a, w, (1, 1), None, tiles, rule, top_k)
    sizes.entries("topk_weights", topk_weights, slots)
    sizes.shaped("out", out, slots, w.shape[1])
    if out.dtype != a.dtype:
        raise TypeError(f"out must have the dtype of a, {a.dtype}, got {out.dtype}")
    if not out.is_contiguous():
        raise ValueError(f"out must be contiguous, got strides {out.stride()}")
