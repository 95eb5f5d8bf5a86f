"""Outputs of the expert GEMMs that dequantize both operands."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_ops.activation import formula
from moe_ops.scheme import get_scheme


def decoded_gemm(
    a: Tensor,
    a_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    w_global_scale: Tensor | None,
    bias: Tensor | None,
    plan: Tensor | None,
    topk_ids: Tensor | None,
    expert_map: Tensor | None,
    row_tiles: Sequence[int],
    top_k: int,
    scheme: str,
    out_dtype: torch.dtype,
) -> Tensor:
    """One row of ``N`` for each slot, in slot order."""
    _check(w_global_scale, scheme)
    return a.new_empty(a.shape[0] * top_k, w.shape[1], dtype=out_dtype)


def decoded_gemm_act(
    a: Tensor,
    a_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    w_global_scale: Tensor | None,
    bias: Tensor | None,
    plan: Tensor | None,
    topk_ids: Tensor | None,
    expert_map: Tensor | None,
    row_tiles: Sequence[int],
    top_k: int,
    scheme: str,
    out_dtype: torch.dtype,
    activation: str,
) -> Tensor:
    """One row of ``I`` for each slot, in slot order."""
    _check(w_global_scale, scheme)
    width = w.shape[1] // 2 if formula(activation).gated else w.shape[1]
    return a.new_empty(a.shape[0] * top_k, width, dtype=out_dtype)


def _check(global_scale: Tensor | None, scheme: str) -> None:
    """A scheme whose operands are decoded, with all that it needs."""
    known = get_scheme(scheme)
    if known.weight is None or not known.decoded:
        raise ValueError(f"scheme must be one whose operands are decoded, got {scheme!r}")
    if (global_scale is not None) != known.weight.global_scale:
        rule = "be a Tensor" if known.weight.global_scale else "be None"
        got = "None" if global_scale is None else "a Tensor"
        raise ValueError(f"w_global_scale must {rule} for scheme {scheme}, got {got}")
