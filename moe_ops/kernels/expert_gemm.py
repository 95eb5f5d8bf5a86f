"""Launcher of the expert GEMM for operands that are not quantized."""

from __future__ import annotations

from torch import Tensor

from moe_ops.dispatch.hopper import KernelTiles
from moe_ops.dispatch.problem import GemmProblem, dense_problem
from moe_ops.fake_impls.expert_gemm import expert_matmul as empty_rows
from moe_ops.kernels._gemm.operands import GemmOperands
from moe_ops.kernels._gemm.run import call_gemm
from moe_ops.tensors import AnyTiles


def expert_matmul(
    a: Tensor,
    w: Tensor,
    bias: Tensor | None,
    topk_weights: Tensor | None,
    tiles: AnyTiles,
    top_k: int,
    activation: str = "",
    expert_order: bool = False,
    batch_invariant: bool = False,
    *,
    config: KernelTiles | None = None,
) -> Tensor:
    """Run the kernel that `plan_gemm` chooses, or the kernel of a given ``config``."""
    how = (top_k, activation, expert_order, batch_invariant)

    def prepare() -> tuple[Tensor, GemmProblem]:
        out = empty_rows(a, w, bias, topk_weights, tiles, *how)
        problem = dense_problem(
            a, w, tiles, top_k, activation,
            weighted=topk_weights is not None, expert_order=expert_order,
            batch_invariant=batch_invariant,
        )  # fmt: skip
        return out, problem

    return call_gemm(
        GemmOperands(a, w, tiles, bias, topk_weights), ("expert_matmul", *how), prepare, config
    )
