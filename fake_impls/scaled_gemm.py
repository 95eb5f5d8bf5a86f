"""Outputs of the expert GEMMs with two quantized operands."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from moe_ops import sizes
from moe_ops.activation import formula
from moe_ops.scheme import Quant, get_scheme
from moe_ops.tensors import AnyTiles


def scaled_gemm(
    a: Tensor,
    a_scale: Tensor | None,
    w: Tensor,
    w_scale: Tensor,
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
    tiles = (plan, topk_ids, expert_map)
    slots = num_slots(a, a_scale, w, w_scale, bias, tiles, row_tiles, top_k, scheme)
    return a.new_empty(slots, w.shape[1], dtype=out_dtype)


def scaled_gemm_act(
    a: Tensor,
    a_scale: Tensor | None,
    w: Tensor,
    w_scale: Tensor,
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
    tiles = (plan, topk_ids, expert_map)
    slots = num_slots(a, a_scale, w, w_scale, bias, tiles, row_tiles, top_k, scheme)
    width = sizes.activated("w", w.shape[1], formula(activation))
    return a.new_empty(slots, width, dtype=out_dtype)


def num_slots(
    a: Tensor,
    a_scale: Tensor | None,
    w: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    tiles: AnyTiles,
    row_tiles: Sequence[int],
    top_k: int,
    scheme: str,
) -> int:
    """The number of slots; ValueError if sizes disagree."""
    quant, _ = quants(scheme)
    slots = sizes.gemm(a, w, (1, 1), bias, tiles, row_tiles, top_k)
    sizes.weight_scales(scheme, w.shape, w_scale)
    if a_scale is not None:
        rows, k = a.shape
        if a.dtype == quant.dtype:
            sizes.stored_row_scale(a_scale, quant, rows, k, w.shape[0])
        else:
            sizes.row_scale(a_scale, quant, rows)
    return slots


@lru_cache(maxsize=256)
def quants(scheme: str) -> tuple[Quant, Quant]:
    """The quantization of activations and of weights in a scheme.

    ValueError if either is not quantized, or if the scheme's GEMM dequantizes both operands first.
    """
    found = get_scheme(scheme)
    if found.activation is None or found.weight is None or found.decoded:
        raise ValueError(f"scheme must quantize activations and weights, got {scheme!r}")
    return found.activation, found.weight


def stored_rows(a: Tensor, a_scale: Tensor | None, quant: Quant) -> tuple[Tensor, Tensor] | None:
    """Rows that are quantized already, with their scales; None if the operator quantizes them.

    ValueError if quantized rows have no scales.
    """
    if a.dtype != quant.dtype:
        return None
    if a_scale is None:
        raise ValueError(f"a_scale must be given with rows of dtype {a.dtype}, got None")
    return a, a_scale
