"""Output of the second expert GEMM with the weighted sum."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops import sizes
from moe_ops.dispatch.row_tiles import gemm_rule
from moe_ops.fake_impls.scaled_gemm import num_slots
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
    """``(T, N)`` in ``out_dtype`` with ``w_scale``; without, in the dtype of ``a``."""
    if (out_dtype is None) != (w_scale is None):
        must = "None without w_scale" if w_scale is None else "a dtype with w_scale"
        raise ValueError(f"out_dtype must be {must}, got {out_dtype}")
    if w_scale is None and w_global_scale is not None:
        raise ValueError("w_global_scale must be None without w_scale, got a Tensor")
    rule = gemm_rule(scheme, a, tiles, batch_invariant)
    _, topk_ids, expert_map = tiles
    if topk_ids is None:
        raise ValueError("tiles[1] must be topk_ids, got None")
    tokens, k = sizes.slots(topk_ids, expert_map)
    sizes.weights(topk_weights, tokens, k)
    if w_scale is None:
        sizes.gemm(a, w, (1, 1), bias, tiles, rule, 1)
    else:
        num_slots(a, a_scale, (w, w_scale, w_global_scale), bias, tiles, rule, 1, scheme)
    return a.new_empty(tokens, w.shape[1], dtype=out_dtype)
