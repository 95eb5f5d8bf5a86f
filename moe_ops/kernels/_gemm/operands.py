"""The arguments of an expert GEMM kernel."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from moe_ops.tensors import AnyTiles


class GemmOperands(NamedTuple):
    """Operands, bias, scales and tile plan of an expert GEMM."""

    a: Tensor
    """``(R, K)``, contiguous along K."""
    w: Tensor
    """``(E, N, K)``, or as its scheme packs it."""
    tiles: AnyTiles
    """Plan, ``topk_ids`` and expert map."""
    bias: Tensor | None = None
    """``(E, N)``."""
    topk_weights: Tensor | None = None
    """One per slot; multiplies the slot's product before the bias is added."""
    a_scale: Tensor | None = None
    """Scales of stored rows, or the given scale for quantizing rows."""
    w_scale: Tensor | None = None
    w_zero_point: Tensor | None = None
    w_global_scale: Tensor | None = None
    early: bool = False
    """Whether the kernel may read the routing, the weight and the weight's scales and zero points
    before the kernels before it end: see `moe_ops.kernels._runtime.dependent`."""

    @property
    def facts(self) -> tuple[Any, ...]:
        """A cache key: all that size checks and the choice of a kernel read of the operands."""
        a, w, tiles, bias, weights, *scales, _ = self
        found = [a.shape, a.stride(), a.dtype, a.data_ptr() % 16]
        found += (w.shape, w.stride(), w.dtype, w.data_ptr() % 16, len(tiles))
        found += [None if x is None else x.shape for x in (bias, weights, *tiles)]
        for x in scales:
            found += (None,) if x is None else (x.shape, x.dtype)
        return tuple(found)
