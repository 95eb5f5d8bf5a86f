"""Launchers of the expert GEMMs of which both operands are quantized."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from moe_ops.activation import Formula, formula
from moe_ops.fake_impls.scaled_gemm import local_quant, quants
from moe_ops.fake_impls.scaled_gemm import scaled_gemm as empty_rows
from moe_ops.fake_impls.scaled_gemm import scaled_gemm_act as empty_activated_rows
from moe_ops.fake_impls.scaled_gemm import scaled_gemm_act_quantize as empty_quantized_rows
from moe_ops.kernels.launch import Launch
from moe_ops.kernels.quantize import moe_quantize
from moe_ops.kernels.scaled_tile import Layout, scaled_gemm_kernel
from moe_ops.kernels.slots import dense
from moe_ops.scheme import WHOLE, Quant
from moe_ops.scheme.weights import rows_per_scale
from moe_ops.tiles import (
    Gemm,
    ScaleGroups,
    TileConfig,
    device_facts,
    max_programs,
    scale_groups,
    scaled_gemm_tiles,
    tile_holds_groups,
)

_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


class _Variant(NamedTuple):
    """What, besides a weight's sizes, a kernel is made for."""

    scheme: str
    activation: str | None
    rounded: torch.dtype | None
    """What a quantized result is rounded to before; None: it is not quantized."""
    weight_rows: int
    """Weight rows that share a scale."""


@lru_cache(maxsize=4096)
def _launch(
    num_slots: int,
    weight: tuple[int, int, int],
    row_tiles: tuple[int, ...],
    top_k: int,
    device: torch.device,
    variant: _Variant,
) -> tuple[Launch, int, TileConfig]:
    """The kernel, how many programs the plan may need, and the tiles."""
    gemm = _gemm(num_slots, weight, row_tiles, variant.activation)
    groups = _groups(gemm.n, variant.scheme, variant.activation, variant.weight_rows)
    min_n = 1 if variant.rounded is None or groups.k is None else groups.k
    tiles = scaled_gemm_tiles(gemm, groups, min_n, device_facts(device))
    return _make(gemm.n, gemm.k, top_k, tiles, variant), max_programs(gemm, tiles), tiles


def _gemm(
    num_slots: int,
    weight: tuple[int, int, int],
    row_tiles: tuple[int, ...],
    activation: str | None,
) -> Gemm:
    num_experts, rows, k = weight
    halves = 2 if activation and formula(activation).gated else 1
    return Gemm(num_slots, num_experts, rows // halves, k, 1, halves, row_tiles)


def _groups(n: int, scheme: str, activation: str | None, weight_rows: int) -> ScaleGroups:
    """How scales lie for ``n`` output columns."""
    rule = formula(activation) if activation else None
    return scale_groups(n, _cols(quants(scheme)[0]), weight_rows, rule)


@lru_cache(maxsize=4096)
def _quantizes(
    num_slots: int,
    weight: tuple[int, int, int],
    row_tiles: tuple[int, ...],
    device: torch.device,
    scheme: str,
    activation: str,
) -> bool:
    """Whether results are quantized in their tiles, not by a launch of their own."""
    gemm = _gemm(num_slots, weight, row_tiles, activation)
    rows = quants(scheme)[1].group.rows
    groups = _groups(gemm.n, scheme, activation, weight[1] if rows == WHOLE else rows)
    return tile_holds_groups(gemm, groups, device_facts(device))


@lru_cache(maxsize=1024)
def _make(n: int, k: int, top_k: int, tiles: TileConfig, variant: _Variant) -> Launch:
    rule = formula(variant.activation) if variant.activation else None
    return Launch(
        scaled_gemm_kernel,
        N=n,
        K=k,
        TOP_K=top_k,
        RULE=rule,
        LAYOUT=_layout(n, variant, rule, tiles.block_n),
        ROUND=variant.rounded and _TYPES[variant.rounded],
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        GROUP_M=tiles.group_m,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


def _layout(n: int, variant: _Variant, rule: Formula | None, block_n: int) -> Layout:
    """How rows and scales lie for ``n`` output columns in tiles of ``block_n``."""
    quant, _ = quants(variant.scheme)
    groups = _groups(n, variant.scheme, variant.activation, variant.weight_rows)
    gated, interleaved = rule is not None and rule.gated, rule is not None and rule.interleaved
    return Layout(
        step=2 if interleaved else 1,
        up=(1 if interleaved else n) if gated else 0,
        weight_rows=2 * n if gated else n,
        rows=variant.weight_rows,
        cols=groups.k,
        uniform=block_n <= groups.n,
        largest=quant.element.largest,
        integer=not quant.dtype.is_floating_point,
        pow2=quant.scale == "pow2",
    )


def _cols(quant: Quant) -> int | None:
    return None if quant.group.cols == WHOLE else quant.group.cols


class _Operands(NamedTuple):
    a: Tensor
    a_scale: Tensor | None
    w: Tensor
    w_scale: Tensor
    bias: Tensor | None


def _run(
    out: Tensor,
    out_scale: Tensor | None,
    operands: _Operands,
    plan: tuple[Tensor, Tensor, Tensor],
    row_tiles: Sequence[int],
    top_k: int,
    scheme: str,
    activation: str | None = None,
    rounded: torch.dtype | None = None,
) -> None:
    """Launch one program for each tile that the plan may hold."""
    a, a_scale, w, w_scale, bias = operands
    num_slots = out.shape[0]
    if num_slots == 0:
        return
    quant, weight_quant = quants(scheme)
    rows = rows_per_scale(w_scale, weight_quant, w.shape[1])
    variant = _Variant(scheme, activation, rounded, rows)
    kernel, programs, tiles = _launch(
        num_slots, w.shape, tuple(row_tiles), top_k, w.device, variant
    )
    if a_scale is None and (tiles.block_m > 32 or tiles.block_k != quant.group.cols):
        # Inside, every tile would quantize its rows again; and it holds groups of its K block only.
        a, a_scale = moe_quantize(a, None, None, None, None, w.shape[0], quant.key)
    a = a if a.stride(1) == 1 else a.contiguous()
    kernel(
        (programs,),
        a,
        dense(a_scale),
        w,
        dense(w_scale),
        dense(bias),
        out,
        out_scale,
        *plan,
        num_slots,
        a.stride(0),
        *_scale_strides(a, a_scale, quant),
        *w.stride(),
    )


def _scale_strides(a: Tensor, a_scale: Tensor | None, quant: Quant) -> tuple[int, int]:
    """From one row's scales to the next's, and from one expert's to the next's."""
    if a_scale is None:
        return 0, 0
    if quant.per_tensor:
        return 0, int(a_scale.numel() > 1)
    return a_scale.numel() // a.shape[0], 0


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
    """Launch one program for each tile that the plan may hold."""
    operands = _Operands(a, a_scale, w, w_scale, bias)
    plan = (sorted_token_ids, expert_ids, num_tokens_post_padded)
    out = empty_rows(*operands, *plan, row_tiles, top_k, scheme, out_dtype)
    _run(out, None, operands, plan, row_tiles, top_k, scheme)
    return out


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
    """The same with an activation of what a tile holds, gate and up side by side."""
    operands = _Operands(a, a_scale, w, w_scale, bias)
    plan = (sorted_token_ids, expert_ids, num_tokens_post_padded)
    out = empty_activated_rows(*operands, *plan, row_tiles, top_k, scheme, out_dtype, activation)
    _run(out, None, operands, plan, row_tiles, top_k, scheme, activation)
    return out


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
    """The same, quantized in its tile; groups wider than a tile by a launch of their own."""
    operands = _Operands(a, a_scale, w, w_scale, bias)
    plan = (sorted_token_ids, expert_ids, num_tokens_post_padded)
    quant, slots = local_quant(scheme), a.shape[0] * top_k
    if not _quantizes(slots, w.shape, tuple(row_tiles), w.device, scheme, activation):
        h = scaled_gemm_act(*operands, *plan, row_tiles, top_k, scheme, out_dtype, activation)
        return moe_quantize(h, None, None, None, None, w.shape[0], quant.key)
    out, out_scale = empty_quantized_rows(
        *operands, *plan, row_tiles, top_k, scheme, out_dtype, activation
    )
    _run(out, out_scale, operands, plan, row_tiles, top_k, scheme, activation, out_dtype)
    return out, out_scale
