"""Output of the second expert GEMM with the weighted sum."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_ops import sizes
from moe_ops.fake_impls.scaled_gemm import num_slots


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
    """``(T, N)`` in ``out_dtype`` with ``w_scale``; without, in the dtype of ``a``."""
    if (out_dtype is None) != (w_scale is None):
        rule = "None without w_scale" if w_scale is None else "a dtype with w_scale"
        raise ValueError(f"out_dtype must be {rule}, got {out_dtype}")
    tokens, k = sizes.slots(topk_ids, expert_map)
    sizes.weights(topk_weights, tokens, k)
    tiles = (plan, topk_ids, expert_map)
    if w_scale is None:
        sizes.gemm(a, w, (1, 1), bias, tiles, row_tiles, 1)
    else:
        num_slots(a, a_scale, (w, w_scale, None), bias, tiles, row_tiles, 1, scheme)
    return a.new_empty(tokens, w.shape[1], dtype=out_dtype)
