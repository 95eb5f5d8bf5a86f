"""Outputs of the expert GEMMs of which both operands are quantized."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from moe_ops.activation import formula
from moe_ops.scheme import Quant, get_scheme


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
    return a.new_empty(a.shape[0] * top_k, w.shape[1], dtype=out_dtype)


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
    return a.new_empty(a.shape[0] * top_k, _width(w, activation), dtype=out_dtype)


@lru_cache(maxsize=256)
def quants(scheme: str) -> tuple[Quant, Quant]:
    """How a scheme quantizes activations and weights.

    ValueError where it leaves either, and where products of stored values are not what it wants.
    """
    found = get_scheme(scheme)
    if found.activation is None or found.weight is None or found.decoded:
        raise ValueError(f"scheme must quantize activations and weights, got {scheme!r}")
    return found.activation, found.weight


def stored_rows(a: Tensor, a_scale: Tensor | None, quant: Quant) -> tuple[Tensor, Tensor] | None:
    """Rows that are quantized, with their scales; None where that is left to the operator.

    ValueError where the scales are missing.
    """
    if a.dtype != quant.dtype:
        return None
    if a_scale is None:
        raise ValueError(f"a_scale must be given with rows of dtype {a.dtype}, got None")
    return a, a_scale


def _width(w: Tensor, activation: str) -> int:
    return w.shape[1] // 2 if formula(activation).gated else w.shape[1]
