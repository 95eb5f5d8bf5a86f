"""Launchers of expert GEMMs that dequantize their weights, and their rows if they are quantized."""

from __future__ import annotations

from torch import Tensor

from moe_ops.dispatch.early import EARLY
from moe_ops.dispatch.hopper import KernelTiles
from moe_ops.dispatch.problem import GemmProblem, stored_problem, sum_problem
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
    scales, how = (w_scale, w_zero_point, w_global_scale), (top_k, scheme, activation)

    def prepare() -> tuple[Tensor, GemmProblem]:
        out = empty_rows(a, w, *scales, bias, topk_weights, tiles, *how, batch_invariant)
        problem = stored_problem(
            a, w, tiles, *how, w_scale=w_scale, batch_invariant=batch_invariant
        )
        return out, problem

    given = GemmOperands(a, w, tiles, bias, topk_weights, None, *scales)
    return call_gemm(given, ("weight_only_matmul", *how, batch_invariant), prepare, config)


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

    def prepare() -> tuple[Tensor, GemmProblem]:
        out = empty_tokens(a, w, *scales, bias, topk_weights, tiles, *how)
        gemm = stored_problem(
            a, w, tiles, 1, scheme, w_scale=w_scale, batch_invariant=batch_invariant
        )
        return out, sum_problem(gemm, topk_weights is not None, out.element_size())

    given = GemmOperands(a, w, tiles, bias, topk_weights, None, *scales, EARLY.get())
    return call_gemm(given, ("weight_only_sum", *how), prepare)
