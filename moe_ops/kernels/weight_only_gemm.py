"""Launchers of expert GEMMs that dequantize their weights, and their rows if they are quantized."""

from __future__ import annotations

from torch import Tensor

from moe_ops.dispatch.early import EARLY
from moe_ops.dispatch.hopper import KernelTiles
from moe_ops.fake_impls.weight_only_gemm import weight_only_matmul as empty_rows
from moe_ops.fake_impls.weight_only_gemm import weight_only_sum as empty_tokens
from moe_ops.kernels._gemm.operands import GemmOperands
from moe_ops.kernels._gemm.run import call_gemm
from moe_ops.tensors import AnyTiles


def weight_only_matmul(
    a: Tensor,
    w: Tensor,
    w_scale: Tensor,
    w_zero_point: Tensor | None,
    w_global_scale: Tensor | None,
    bias: Tensor | None,
    topk_weights: Tensor | None,
    tiles: AnyTiles,
    top_k: int,
    scheme: str,
    activation: str = "",
    batch_invariant: bool = False,
    *,
    config: KernelTiles | None = None,
) -> Tensor:
    """Run the kernel that `plan_gemm` chooses, or the kernel of a given ``config``."""
    scales = (w_scale, w_zero_point, w_global_scale)
    how = (top_k, scheme, activation, batch_invariant)
    return call_gemm(
        GemmOperands(a, w, tiles, bias, topk_weights, None, *scales),
        ("weight_only_matmul", *how),
        lambda: empty_rows(a, w, *scales, bias, topk_weights, tiles, *how),
        config,
    )


def weight_only_sum(
    a: Tensor,
    w: Tensor,
    w_scale: Tensor,
    w_zero_point: Tensor | None,
    w_global_scale: Tensor | None,
    bias: Tensor | None,
    topk_weights: Tensor | None,
    tiles: AnyTiles,
    scheme: str,
    batch_invariant: bool = False,
) -> Tensor:
    """Run the kernel that also sums if it takes the GEMM, else a GEMM kernel and a sum kernel."""
    scales, how = (w_scale, w_zero_point, w_global_scale), (scheme, batch_invariant)
    return call_gemm(
        GemmOperands(a, w, tiles, bias, topk_weights, None, *scales, EARLY.get()),
        ("weight_only_sum", *how),
        lambda: empty_tokens(a, w, *scales, bias, topk_weights, tiles, *how),
    )
