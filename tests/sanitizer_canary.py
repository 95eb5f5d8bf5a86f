"""A kernel that writes past the end of its memory: what a sanitizer that works must report."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def out_of_bounds_kernel(x, COUNT: tl.constexpr):
    """Right behind COUNT numbers."""
    tl.store(x + COUNT + tl.arange(0, COUNT), 1.0)


if __name__ == "__main__":
    out_of_bounds_kernel[(1,)](torch.zeros(128, device="cuda"), 128)
    torch.cuda.synchronize()
