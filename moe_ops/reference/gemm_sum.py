"""Reference of the second expert GEMM with the weighted sum, computed one after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops.reference.expert_gemm import expert_matmul
from moe_ops.reference.scaled_gemm import scaled_matmul
from moe_ops.reference.weight_and_reduce import moe_fused_mul_sum
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
    """``out[t] = sum_j topk_weights[t, j] * y[t * k + j]``, where y is the result of the GEMM.

    The GEMM is `expert_matmul` if ``w_scale`` is None, else `scaled_matmul`.
    """
    if w_scale is None:
        y = expert_matmul(a, w, bias, None, tiles, 1, "", expert_order, batch_invariant)
    else:
        operands = (a, a_scale, w, w_scale, w_global_scale, bias)
        y = scaled_matmul(*operands, tiles, 1, scheme, out_dtype, "", batch_invariant)  # type: ignore[arg-type]
    _, topk_ids, expert_map = tiles
    return moe_fused_mul_sum(y, topk_weights, topk_ids, expert_map, None, w.shape[0])
