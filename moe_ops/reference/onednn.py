"""Products of bf16 rows by oneDNN, in place of the reference's, which are their oracle.

Products are summed in float32, in another order than in `products`. Results that nothing follows
are rounded by oneDNN itself, once: its bf16 instructions read half the bytes, and take half the
time, of a product of float32 copies. PyTorch has no such product with a float32 result.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from moe_ops.reference.grouped import Product


def multiplies(a: Tensor, batch_invariant: bool) -> bool:
    """Whether oneDNN multiplies rows ``a`` that are not quantized.

    Not in batch-invariant mode: its order of sums depends on the number of rows.
    """
    return a.dtype == torch.bfloat16 and a.is_cpu and not batch_invariant and _has_bf16()


@cache
def _has_bf16() -> bool:
    """Whether this build and this processor have what `bf16_product` calls."""
    name = "_linear_pointwise"  # in builds for x86 only
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, name):
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def bf16_product(weight: Tensor) -> Product:
    """The product of an expert's bf16 rows, in the dtype of the tensor that it is written to.

    Args:
        weight: ``(E, N, K)`` bf16.
    """
    linear = torch.ops.mkldnn._linear_pointwise.default

    def product(expert: int, rows: Sequence[Tensor], out: Tensor) -> None:
        x, w = rows[0], weight[expert]
        if out.dtype == torch.bfloat16:
            torch.mm(x, w.t(), out=out)
        else:
            out.copy_(linear(x.float(), w.float(), None, "none", [], ""))

    return product
