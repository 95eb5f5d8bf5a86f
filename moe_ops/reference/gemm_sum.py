"""Reference of the second expert GEMM with the weighted sum, computed one after the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_ops.fake_impls.gemm_sum import gemm_sum as empty_tokens
from moe_ops.reference.expert_gemm import expert_matmul
from moe_ops.reference.scaled_gemm import scaled_matmul
from moe_ops.reference.weight_and_reduce import moe_fused_mul_sum_out


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
    """``out[t] = sum_j topk_weights[t, j] * y[t * k + j]``, where y is the result of the GEMM.

    The GEMM is `expert_matmul` if ``w_scale`` is None, else `scaled_matmul`.
    """
    tiles = (plan, topk_ids, expert_map)
    out = empty_tokens(
        a, a_scale, w, w_scale, bias, topk_weights, *tiles, row_tiles, scheme, out_dtype
    )
    if w_scale is None:
        y = expert_matmul(a, w, bias, None, *tiles, row_tiles, 1, "", expert_order)
    else:
        operands = (a, a_scale, w, w_scale, None, bias)
        y = scaled_matmul(*operands, *tiles, row_tiles, 1, scheme, out.dtype)
    moe_fused_mul_sum_out(y, topk_weights, topk_ids, expert_map, None, w.shape[0], out=out)
    return out
