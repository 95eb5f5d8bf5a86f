"""Output of the second expert GEMM with the weighted sum."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


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
    out_dtype: torch.dtype,
    expert_order: bool = False,
) -> Tensor:
    """``(T, N)``; ValueError where rows and weights without scales would give another dtype."""
    if w_scale is None and out_dtype != a.dtype:
        raise ValueError(f"out_dtype must be that of a without w_scale, {a.dtype}, got {out_dtype}")
    return a.new_empty(topk_ids.shape[0], w.shape[1], dtype=out_dtype)
