"""Products of an expert's weight through a buffer that stays in a core's cache.

BLAS and oneDNN read a weight in blocks, and wait for memory at each of them; a copy reads it in one
go. So a weight that the cache holds is copied first, and one that must be widened is widened piece
by piece. ``benchmarks/NOTES.md`` has the times ("Experts on a CPU").
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_ops.reference.grouped import Product
from moe_ops.reference.slots import LINE, multiply

CACHED = 2**20
"""Bytes of the largest weight that is copied whole."""
WIDENED = 2**19
"""Numbers of a weight that are widened at a time."""
LANES = 32
"""Pieces have a multiple of this many rows: other rows have other bits than in the whole weight."""


def plain_product(weight: Tensor, dtype: torch.dtype, batch_invariant: bool) -> Product:
    """The product of operands that are not quantized, multiplied and written in ``dtype``.

    Args:
        weight: ``(E, N, K)``, of ``dtype`` or widened to it.
        dtype: that of the rows and of the result.
        batch_invariant: see `multiply`.
    """
    _, n, k = weight.shape
    nbytes = n * k * dtype.itemsize
    if weight.dtype == dtype and (nbytes > CACHED or nbytes % LINE):  # else other products
        w_EKN = weight.mT

        def product(expert: int, rows: Sequence[Tensor], out: Tensor) -> None:
            multiply(rows[0], w_EKN[expert], out, batch_invariant)

        return product
    size = n if weight.dtype == dtype else max(LANES, WIDENED // k // LANES * LANES)
    sizes = [min(size, n - first) for first in range(0, n, size)]
    parts = weight.split_with_sizes(sizes, 1)
    # The buffer has the layout of the weight, which BLAS takes as it is.
    buffer = torch.empty_like(weight[:1, :size], dtype=dtype)[0]
    buffers = [buffer[:count] for count in sizes]
    turned = [held.t() for held in buffers]

    def copied(expert: int, rows: Sequence[Tensor], out: Tensor) -> None:
        columns = out.split_with_sizes(sizes, 1) if len(sizes) > 1 else (out,)
        for part, held, w, result in zip(parts, buffers, turned, columns, strict=True):
            held.copy_(part[expert])
            multiply(rows[0], w, result, batch_invariant)

    return copied
