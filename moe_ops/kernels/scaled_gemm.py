"""Launcher of the expert GEMM with two quantized operands."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops.dispatch.hopper import KernelTiles
from moe_ops.fake_impls.scaled_gemm import scaled_matmul as empty_rows
from moe_ops.kernels._gemm.operands import GemmOperands
from moe_ops.kernels._gemm.run import call_gemm
from moe_ops.tensors import AnyTiles


def scaled_matmul(
    a: Tensor,
    a_scale: Tensor | None,
    w: Tensor,
    w_scale: Tensor,
    w_global_scale: Tensor | None,
    bias: Tensor | None,
    tiles: AnyTiles,
    top_k: int,
    scheme: str,
    out_dtype: torch.dtype,
    activation: str = "",
    batch_invariant: bool = False,
    *,
    config: KernelTiles | None = None,
) -> Tensor:
    """Run the kernel that `plan_gemm` chooses; rows are quantized before the kernel or in it."""
    how = (top_k, scheme, out_dtype, activation, batch_invariant)
    scales = (a_scale, w_scale, None, w_global_scale)
    return call_gemm(
        GemmOperands(a, w, tiles, bias, None, *scales),
        ("scaled_matmul", *how),
        lambda: empty_rows(a, a_scale, w, w_scale, w_global_scale, bias, tiles, *how),
        config,
    )
