"""Launcher of the expert GEMM whose operands are not quantized."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from moe_ops.dispatch.hopper import KernelTiles
from moe_ops.dispatch.problem import dense_problem
from moe_ops.fake_impls.expert_gemm import expert_matmul as empty_rows
from moe_ops.kernels._gemm.operands import GemmOperands
from moe_ops.kernels._gemm.run import run_gemm


def expert_matmul(
    a: Tensor,
    w: Tensor,
    bias: Tensor | None,
    topk_weights: Tensor | None,
    plan: Tensor | None,
    topk_ids: Tensor | None,
    expert_map: Tensor | None,
    row_tiles: Sequence[int],
    top_k: int,
    activation: str = "",
    expert_order: bool = False,
    *,
    config: KernelTiles | None = None,
) -> Tensor:
    """Run the kernel that `plan_gemm` chooses, or that of a given ``config``."""
    tiles = (plan, topk_ids, expert_map)
    out = empty_rows(a, w, bias, topk_weights, *tiles, row_tiles, top_k, activation)
    weighted = topk_weights is not None
    problem = dense_problem(a, w, tiles, row_tiles, top_k, activation, weighted, expert_order)
    return run_gemm(out, GemmOperands(a, w, tiles, bias, topk_weights), problem, config)
