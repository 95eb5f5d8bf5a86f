"""Outputs of the expert GEMMs that dequantize both operands."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_ops import sizes
from moe_ops.activation import formula
from moe_ops.scheme import get_scheme
from moe_ops.tensors import AnyTiles


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
    operands, tiles = (a, a_scale, w, w_scale, w_global_scale), (plan, topk_ids, expert_map)
    slots = _slots(operands, bias, tiles, row_tiles, top_k, scheme)
    return a.new_empty(slots, w.shape[1], dtype=out_dtype)


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
    operands, tiles = (a, a_scale, w, w_scale, w_global_scale), (plan, topk_ids, expert_map)
    slots = _slots(operands, bias, tiles, row_tiles, top_k, scheme)
    width = sizes.activated("w", w.shape[1], formula(activation))
    return a.new_empty(slots, width, dtype=out_dtype)


def _slots(
    operands: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None],
    bias: Tensor | None,
    tiles: AnyTiles,
    row_tiles: Sequence[int],
    top_k: int,
    scheme: str,
) -> int:
    """The number of slots; ValueError for another kind of scheme, or if sizes disagree."""
    (a, a_scale, w, w_scale, global_scale), known = operands, get_scheme(scheme)
    if known.activation is None or known.weight is None or not known.decoded:
        raise ValueError(f"scheme must be one whose GEMM dequantizes both operands, got {scheme!r}")
    if (global_scale is not None) != known.weight.global_scale:
        rule = "be a Tensor" if known.weight.global_scale else "be None"
        got = "None" if global_scale is None else "a Tensor"
        raise ValueError(f"w_global_scale must {rule} for scheme {scheme}, got {got}")
    each = [2 if quant.element.packed else 1 for quant in (known.activation, known.weight)]
    slots = sizes.gemm(a, w, (each[0], each[1]), bias, tiles, row_tiles, top_k)
    (rows, width), (experts, n, k) = a.shape, w.shape
    sizes.weight_scales(scheme, (experts, n, each[1] * k), w_scale, global_scale)
    sizes.stored_row_scale(a_scale, known.activation, rows, each[0] * width, experts)
    return slots
