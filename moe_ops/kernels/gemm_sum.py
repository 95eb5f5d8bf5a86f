"""Launcher of the second expert GEMM with the weighted sum, in one kernel or in two."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops.dispatch.early import EARLY
from moe_ops.fake_impls.gemm_sum import gemm_sum as empty_tokens
from moe_ops.kernels._gemm.operands import GemmOperands
from moe_ops.kernels._gemm.run import call_gemm
from moe_ops.tensors import AnyTiles


def gemm_sum(
    a: Tensor,
    a_scale: Tensor | None,
    w: Tensor,
    w_scale: Tensor | None,
    bias: Tensor | None,
    topk_weights: Tensor | None,
    tiles: AnyTiles,
    scheme: str,
    out_dtype: torch.dtype | None = None,
    expert_order: bool = False,
    batch_invariant: bool = False,
    w_global_scale: Tensor | None = None,
) -> Tensor:
    """Run the kernel that also sums if it takes the GEMM, else a GEMM kernel and a sum kernel."""
    how = (scheme, out_dtype, expert_order, batch_invariant)
    call = (a, a_scale, w, w_scale, bias, topk_weights, tiles, *how, w_global_scale)
    scales = (a_scale, w_scale, None, w_global_scale)
    given = GemmOperands(a, w, tiles, bias, topk_weights, *scales, EARLY.get())
    return call_gemm(given, ("gemm_sum", *how), lambda: empty_tokens(*call))
