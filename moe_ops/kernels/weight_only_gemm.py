"""Launchers of the expert GEMMs of which only the weights are quantized."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from moe_ops.activation import formula
from moe_ops.fake_impls.weight_only_gemm import weight_only_gemm as empty_rows
from moe_ops.fake_impls.weight_only_gemm import weight_only_gemm_act as empty_activated_rows
from moe_ops.kernels.dequantize import Format
from moe_ops.kernels.launch import Launch
from moe_ops.kernels.slots import dense
from moe_ops.kernels.weight_only_tile import weight_only_gemm_kernel
from moe_ops.scheme import WHOLE, get_scheme
from moe_ops.scheme.weights import rows_per_scale
from moe_ops.tensors import QTensor
from moe_ops.tiles import Gemm, TileConfig, device_facts, max_programs, weight_only_tiles


class _Variant(NamedTuple):
    """What, besides a weight's sizes, a kernel is made for."""

    scheme: str
    activation: str | None
    packed: bool
    """Whether an entry of the weight holds two numbers."""
    rows: int
    """Weight rows that share a scale."""
    global_rows: int
    """Weight rows that share a global scale."""


@lru_cache(maxsize=4096)
def _launch(
    num_slots: int,
    weight: tuple[int, int, int],
    itemsize: int,
    row_tiles: tuple[int, ...],
    top_k: int,
    device: torch.device,
    variant: _Variant,
) -> tuple[Launch, int]:
    """The kernel, and how many programs the plan may need; ``itemsize`` of activations."""
    num_experts, rows, k = weight
    rule = variant.activation and formula(variant.activation)
    halves = 2 if rule and rule.gated else 1
    gemm = Gemm(num_slots, num_experts, rows // halves, k, itemsize, halves, row_tiles)
    bits = get_scheme(variant.scheme).weight.element.stored_bits
    tiles = weight_only_tiles(gemm, bits, device_facts(device))
    return _make(gemm.n, k, top_k, tiles, variant), max_programs(gemm, tiles)


@lru_cache(maxsize=1024)
def _make(n: int, k: int, top_k: int, tiles: TileConfig, variant: _Variant) -> Launch:
    return Launch(
        weight_only_gemm_kernel,
        N=n,
        K=k,
        TOP_K=top_k,
        RULE=formula(variant.activation) if variant.activation else None,
        FORMAT=_format(n, tiles, variant),
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        GROUP_M=tiles.group_m,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


def _format(n: int, tiles: TileConfig, variant: _Variant) -> Format:
    """How weights lie for ``n`` output columns in these tiles."""
    quant = get_scheme(variant.scheme).weight
    cols = None if quant.group.cols == WHOLE else quant.group.cols
    rule = formula(variant.activation) if variant.activation else None
    gated, interleaved = rule is not None and rule.gated, rule is not None and rule.interleaved
    return Format(
        step=2 if interleaved else 1,
        up=(1 if interleaved else n) if gated else 0,
        weight_rows=2 * n if gated else n,
        bits=quant.element.bits,
        packed=variant.packed,
        exponent=4 if quant.element.name == "fp8" else quant.element.exponent,
        offset=quant.element.offset,
        scale=quant.scale if quant.scale in ("e8m0", "e4m3") else "float",
        cols=cols,
        in_tile=cols is not None and (cols < tiles.block_k or tiles.block_m > 32),
        rows=variant.rows,
        global_rows=variant.global_rows,
    )


def weight_only_gemm(
    a: Tensor,
    w: Tensor,
    w_scale: Tensor,
    w_zero_point: Tensor | None,
    w_global_scale: Tensor | None,
    bias: Tensor | None,
    input_weights: Tensor | None,
    sorted_token_ids: Tensor,
    expert_ids: Tensor,
    num_tokens_post_padded: Tensor,
    row_tiles: Sequence[int],
    top_k: int,
    scheme: str,
) -> Tensor:
    """Launch one program for each tile that the plan may hold."""
    plan = (sorted_token_ids, expert_ids, num_tokens_post_padded)
    stored = QTensor(w, w_scale, w_zero_point, w_global_scale)
    out = empty_rows(a, *stored, bias, input_weights, *plan, row_tiles, top_k, scheme)
    return _run(out, a, stored, bias, input_weights, plan, row_tiles, top_k, scheme, None)


def weight_only_gemm_act(
    a: Tensor,
    w: Tensor,
    w_scale: Tensor,
    w_zero_point: Tensor | None,
    w_global_scale: Tensor | None,
    bias: Tensor | None,
    input_weights: Tensor | None,
    sorted_token_ids: Tensor,
    expert_ids: Tensor,
    num_tokens_post_padded: Tensor,
    row_tiles: Sequence[int],
    top_k: int,
    scheme: str,
    activation: str,
) -> Tensor:
    """Launch one program for each tile that the plan may hold."""
    plan = (sorted_token_ids, expert_ids, num_tokens_post_padded)
    stored = QTensor(w, w_scale, w_zero_point, w_global_scale)
    more = (bias, input_weights, *plan, row_tiles, top_k, scheme, activation)
    out = empty_activated_rows(a, *stored, *more)
    return _run(out, a, stored, bias, input_weights, plan, row_tiles, top_k, scheme, activation)


def _run(
    out: Tensor,
    a: Tensor,
    stored: QTensor,
    bias: Tensor | None,
    input_weights: Tensor | None,
    plan: tuple[Tensor, Tensor, Tensor],
    row_tiles: Sequence[int],
    top_k: int,
    scheme: str,
    activation: str | None,
) -> Tensor:
    num_slots = out.shape[0]
    if num_slots == 0:
        return out
    a = a if a.stride(1) == 1 else a.contiguous()
    w, scale, zero_point, global_scale = stored
    num_experts, n, _ = w.shape
    quant = get_scheme(scheme).weight
    halves = 1 if global_scale is None else global_scale.numel() // num_experts
    w = _entries(w, quant.element.packed)
    packed = quant.element.packed or w.dtype == torch.uint16
    rows, global_rows = rows_per_scale(scale, quant, n), n // halves
    variant = _Variant(scheme, activation, packed, rows, global_rows)
    weight, tiles = (num_experts, n, a.shape[1]), tuple(row_tiles)
    kernel, programs = _launch(num_slots, weight, a.itemsize, tiles, top_k, w.device, variant)
    kernel(
        (programs,),
        a,
        w,
        _bytes(dense(scale)),
        dense(zero_point),
        dense(global_scale),
        dense(bias),
        dense(input_weights),
        out,
        *plan,
        num_slots,
        a.stride(0),
        *w.stride(),
    )
    return out


def _entries(w: Tensor, packed: bool) -> Tensor:
    """What a kernel loads: bytes, or words of two neighbours along K where the layout has them."""
    if packed:
        return w
    sizes = w.shape[2] | w.stride(1) | w.stride(0) | w.storage_offset()
    return w.view(torch.uint16 if w.stride(2) == 1 and sizes % 2 == 0 else torch.uint8)


def _bytes(x: Tensor) -> Tensor:
    """fp8 as bytes: not every architecture has the type, and kernels decode its bits."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x
