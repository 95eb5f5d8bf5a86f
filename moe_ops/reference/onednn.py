"""Where oneDNN multiplies bf16 rows, in place of products in float32, which are its oracle.

It sums in float32, in another order than the reference, and rounds the result itself, once. Its
bf16 instructions take half the time of a product in float32. PyTorch has no such product with a
float32 result, so one that an activation or a bias follows is the reference's.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


def multiplies(a: Tensor, batch_invariant: bool) -> bool:
    """Whether oneDNN multiplies rows ``a`` that are not quantized, if nothing follows.

    Not in batch-invariant mode: its order of sums depends on the number of rows.
    """
    return a.dtype == torch.bfloat16 and a.is_cpu and not batch_invariant and _has_bf16()


@cache
def _has_bf16() -> bool:
    """Whether this is a build for x86 and a processor on which `torch.mm` of bf16 is oneDNN's."""
    name = "_linear_pointwise"  # in builds for x86 only
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, name):
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
