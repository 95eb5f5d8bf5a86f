"""Launcher of the second expert GEMM with the weighted sum: of one token in one, else in two."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_ops.fake_impls.gemm_sum import gemm_sum as empty_tokens
from moe_ops.kernels._hopper import token_gemm
from moe_ops.kernels._hopper.token_gemm import Operands
from moe_ops.kernels.expert_gemm import expert_gemm
from moe_ops.kernels.scaled_gemm import scaled_gemm
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
    if token_gemm.summed(
        out, Operands(a, a_scale, w, w_scale, bias), topk_weights, tiles, row_tiles, scheme
    ):
        return out
    if w_scale is None:
        y = expert_gemm(a, w, bias, None, None, *tiles, row_tiles, 1, expert_order)
    else:
        operands = (a, a_scale, w, w_scale, bias)
        y = scaled_gemm(*operands, *tiles, row_tiles, 1, scheme, out.dtype)
    how = (topk_weights, topk_ids, expert_map, None, w.shape[0])
    moe_fused_mul_sum_out(y, *how, out=out)
    return out
