"""The tensors of an expert GEMM, as its kernels get them."""

from __future__ import annotations

from typing import Any, NamedTuple

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

    @property
    def facts(self) -> tuple[Any, ...]:
        """What checks of sizes and the choice of a kernel may read of the operands, to compare."""
        a, w, tiles, bias, weights, *scales = self
        found = [a.shape, a.stride(), a.dtype, a.data_ptr() % 16]
        found += (w.shape, w.stride(), w.dtype, w.data_ptr() % 16, len(tiles))
        found += [None if x is None else x.shape for x in (bias, weights, *tiles)]
        for x in scales:
            found += (None,) if x is None else (x.shape, x.dtype)
        return tuple(found)
