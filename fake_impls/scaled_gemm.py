"""Outputs of the expert GEMMs of which both operands are quantized."""

from __future__ import annotations

from collections.abc import Sequence

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
    sorted_token_ids: Tensor,
    expert_ids: Tensor,
    num_tokens_post_padded: Tensor,
    row_tiles: Sequence[int],
    top_k: int,
    scheme: str,
    out_dtype: torch.dtype,
) -> Tensor:
    """One row of ``N`` for each slot, in slot order."""
    _check(a_scale, scheme)
    return a.new_empty((a.shape[0] * top_k, w.shape[1]), dtype=out_dtype)


def scaled_gemm_act(
    a: Tensor,
    a_scale: Tensor | None,
    w: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    sorted_token_ids: Tensor,
    expert_ids: Tensor,
    num_tokens_post_padded: Tensor,
    row_tiles: Sequence[int],
    top_k: int,
    scheme: str,
    out_dtype: torch.dtype,
    activation: str,
) -> Tensor:
    """One row of ``I`` for each slot, in slot order."""
    _check(a_scale, scheme)
    return a.new_empty((a.shape[0] * top_k, _width(w, activation)), dtype=out_dtype)


def scaled_gemm_act_quantize(
    a: Tensor,
    a_scale: Tensor | None,
    w: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    sorted_token_ids: Tensor,
    expert_ids: Tensor,
    num_tokens_post_padded: Tensor,
    row_tiles: Sequence[int],
    top_k: int,
    scheme: str,
    out_dtype: torch.dtype,
    activation: str,
) -> tuple[Tensor, Tensor]:
    """One quantized row of ``I`` for each slot, and the scales of its groups."""
    quant, width = local_quant(scheme), _width(w, activation)
    slots = a.shape[0] * top_k
    scale = a.new_empty(quant.row_scale_shape(slots, width), dtype=torch.float32)
    return a.new_empty((slots, width), dtype=quant.dtype), scale


def quants(scheme: str) -> tuple[Quant, Quant]:
    """How a scheme quantizes activations and weights; ValueError where it leaves either."""
    found = get_scheme(scheme)
    if found.activation is None or found.weight is None:
        raise ValueError(f"scheme must quantize activations and weights, got {scheme!r}")
    return found.activation, found.weight


def local_quant(scheme: str) -> Quant:
    """How a scheme quantizes activations piece by piece; ValueError where it does not."""
    quant, _ = quants(scheme)
    if not quant.local:
        raise ValueError(f"scheme must quantize activations in groups along a row, got {scheme!r}")
    return quant


def _check(a_scale: Tensor | None, scheme: str) -> None:
    """Rows without scales are quantized inside the product."""
    if a_scale is None:
        local_quant(scheme)


def _width(w: Tensor, activation: str) -> int:
    return w.shape[1] // 2 if formula(activation).gated else w.shape[1]
