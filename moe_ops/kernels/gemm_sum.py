"""Launcher of the second expert GEMM with the weighted sum: in one kernel, or in two."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_ops.dispatch.device import device_facts
from moe_ops.dispatch.gemm_plan import TOKEN_SUM, plan_gemm
from moe_ops.dispatch.problem import dense_problem, scaled_problem, sum_problem
from moe_ops.fake_impls.gemm_sum import gemm_sum as empty_tokens
from moe_ops.kernels._gemm.operands import GemmOperands
from moe_ops.kernels._gemm.run import run_gemm
from moe_ops.kernels.weight_and_reduce import moe_fused_mul_sum_out


def gemm_sum(
    a: Tensor,
    a_scale: Tensor | None,
    w: Tensor,
    w_scale: Tensor | None,
    bias: Tensor | None,
    topk_weights: Tensor | None,
    plan: Tensor | None,
    topk_ids: Tensor,
    expert_map: Tensor | None,
    row_tiles: Sequence[int],
    scheme: str,
    out_dtype: torch.dtype | None = None,
    expert_order: bool = False,
) -> Tensor:
    """The kernel that sums where it serves; else that of the GEMM, then that of the sum."""
    tiles = (plan, topk_ids, expert_map)
    out = empty_tokens(
        a, a_scale, w, w_scale, bias, topk_weights, *tiles, row_tiles, scheme, out_dtype
    )
    if w_scale is None:
        gemm = dense_problem(a, w, tiles, row_tiles, 1, "", False, expert_order)
    else:
        gemm = scaled_problem(a, a_scale, w, w_scale, tiles, row_tiles, 1, scheme)
    given = GemmOperands(a, w, tiles, bias, None, a_scale, w_scale)
    if topk_ids.shape[0] == 1:
        problem = sum_problem(gemm, topk_weights is not None, out.element_size())
        if plan_gemm(problem, device_facts(out.device)).kernel == TOKEN_SUM:
            return run_gemm(out, given._replace(topk_weights=topk_weights), problem)
    y = run_gemm(out.new_empty(a.shape[0], out.shape[1]), given, gemm)
    moe_fused_mul_sum_out(y, topk_weights, topk_ids, expert_map, None, w.shape[0], out=out)
    return out
