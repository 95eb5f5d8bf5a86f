"""The tensors of an expert GEMM, as its kernels get them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from moe_ops.tensors import AnyTiles


class GemmOperands(NamedTuple):
    """What is multiplied, what is added, and which rows belong to which expert."""

    a: Tensor
    """``(R, K)`` with entries of a row side by side."""
    w: Tensor
    """``(E, N, K)``, or as its scheme packs it."""
    tiles: AnyTiles
    """Plan, ``topk_ids`` and expert map."""
    bias: Tensor | None = None
    """``(E, N)``."""
    topk_weights: Tensor | None = None
    """One for each slot, which multiplies the slot's product before the bias."""
    a_scale: Tensor | None = None
    """Scales of stored rows; or the given one to quantize rows with."""
    w_scale: Tensor | None = None
    w_zero_point: Tensor | None = None
    w_global_scale: Tensor | None = None
