"""The arguments of an expert GEMM kernel."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from moe_ops.tensors import AnyTiles, ExpertWeight


class GemmOperands(NamedTuple):
    """Rows, weight and tile plan of an expert GEMM."""

    a: Tensor
    """``(R, K)``, contiguous along K."""
    a_scale: Tensor | None
    """Scales of stored rows, or the given scale for quantizing rows."""
    weight: ExpertWeight
    """Stored values ``(E, N, K)``, or as their scheme packs them, with bias ``(E, N)`` and scales.
    """
    topk_weights: Tensor | None
    """One per slot; multiplies the slot's product before the bias is added."""
    tiles: AnyTiles
    """Plan, ``topk_ids`` and expert map."""
    early: bool = False
    """Whether the kernel may read the routing, the weight and the weight's scales and zero points
    before the kernels before it end: see `moe_ops.kernels._runtime.dependent`."""
    product: Tensor | None = None
    """``(R * top_k, N)``: where the result before the activation is stored, in slot order, beside
    the activated result. None: it is not. Only kernels of families that keep products store it."""

    column: int = 0
    """The first column to which products are added."""
    experts: int | None = None
    """El if the weight's tensors are the slots of experts in host memory; tiles then have rows of
    slots in place of experts: see `moe_ops.kernels._gemm.rows`."""

    @property
    def num_experts(self) -> int:
        """El."""
        return self.weight.data.shape[0] if self.experts is None else self.experts

    @property
    def facts(self) -> tuple[Any, ...]:
        """A cache key: all that size checks and the choice of a kernel read of the operands."""
        a, a_scale, (w, bias, *scales), weights, tiles, *_ = self
        facts = [a.shape, a.stride(), a.dtype, a.data_ptr() % 16]
        facts += (w.shape, w.stride(), w.dtype, w.data_ptr() % 16, len(tiles))
        facts += [None if x is None else x.shape for x in (bias, weights, *tiles)]
        for x in (a_scale, *scales):
            facts += (None,) if x is None else (x.shape, x.dtype)
        return tuple(facts)
