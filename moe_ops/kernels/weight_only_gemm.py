"""Launchers of the expert GEMMs that dequantize weights, and (`decoded_gemm`) rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_ops.activation import formula
from moe_ops.dispatch.choice import tiles_of
from moe_ops.dispatch.tiles import Gemm, TileConfig, device_facts, max_programs
from moe_ops.fake_impls.weight_only_gemm import weight_only_gemm as empty_rows
from moe_ops.fake_impls.weight_only_gemm import weight_only_gemm_act as empty_activated_rows
from moe_ops.kernels._gemm.dequantize import Format
from moe_ops.kernels._gemm.tile import tile_arguments
from moe_ops.kernels._gemm.weight_only import weight_only_gemm_kernel
from moe_ops.kernels._runtime.launch import Launch
from moe_ops.kernels._runtime.slots import dense
from moe_ops.scheme import Quant, get_scheme
from moe_ops.scheme.weights import rows_per_scale
from moe_ops.tensors import AnyTiles, QTensor


class Variant(NamedTuple):
    """What, besides a weight's sizes, a kernel is made for."""

    scheme: str
    activation: str | None
    packed: bool
    """Whether an entry of the weight holds two numbers."""
    rows: int
    """Weight rows that share a scale."""
    global_rows: int
    """Weight rows that share a global scale."""
    row_words: bool = False
    """Whether an entry of quantized rows holds two numbers."""


class Operands(NamedTuple):
    """What is multiplied, and what is added."""

    a: Tensor
    a_scale: Tensor | None
    """None: rows are not quantized."""
    w: QTensor
    bias: Tensor | None
    input_weights: Tensor | None = None


@lru_cache(maxsize=4096)
def _launch(
    num_slots: int,
    weight: tuple[int, int, int],
    itemsize: int,
    row_tiles: tuple[int, ...],
    top_k: int,
    device: torch.device,
    variant: Variant,
) -> tuple[Launch, int]:
    """The kernel, and how many programs the plan may need; ``itemsize`` of activations."""
    num_experts, rows, k = weight
    rule = variant.activation and formula(variant.activation)
    halves = 2 if rule and rule.gated else 1
    gemm = Gemm(num_slots, num_experts, rows // halves, k, itemsize, halves, row_tiles)
    scheme, facts = get_scheme(variant.scheme), device_facts(device)
    tiles = tiles_of(gemm, scheme, rule, facts).plain
    launch = _make(gemm.n, k, top_k, tiles, variant)
    return launch, max_programs(gemm, tiles)


@lru_cache(maxsize=1024)
def _make(n: int, k: int, top_k: int, tiles: TileConfig, variant: Variant) -> Launch:
    return make(weight_only_gemm_kernel, n, k, top_k, tiles, variant)


def make(kernel: Any, n: int, k: int, top_k: int, tiles: TileConfig, variant: Variant) -> Launch:
    """A kernel of stored weights for ``n`` output columns."""
    return Launch(
        kernel,
        N=n,
        K=k,
        TOP_K=top_k,
        RULE=formula(variant.activation) if variant.activation else None,
        FORMAT=weight_format(n, tiles, variant),
        ROWS=row_format(variant),
        **tiles.constants(),
    )


def weight_format(n: int, tiles: TileConfig, variant: Variant) -> Format:
    """How weights lie for ``n`` output columns in these tiles."""
    quant = get_scheme(variant.scheme).weight
    cols = quant.shared_cols
    rule = formula(variant.activation) if variant.activation else None
    gated, interleaved = rule is not None and rule.gated, rule is not None and rule.interleaved
    return Format(
        step=2 if interleaved else 1,
        up=(1 if interleaved else n) if gated else 0,
        weight_rows=2 * n if gated else n,
        packed=variant.packed,
        cols=cols,
        in_tile=cols is not None and (cols < tiles.block_k or tiles.block_m > 32),
        rows=variant.rows,
        global_rows=variant.global_rows,
        **_stored(quant),
    )


def row_format(variant: Variant) -> Format | None:
    """How quantized rows lie; None: rows are not quantized."""
    quant = get_scheme(variant.scheme).activation
    if quant is None:
        return None
    cols = quant.group.cols if quant.local else None
    return Format(
        step=1,
        up=0,
        weight_rows=0,
        packed=quant.element.packed or variant.row_words,
        cols=cols,
        in_tile=cols is not None,
        rows=1,
        global_rows=0,
        **_stored(quant),
    )


def _stored(quant: Quant) -> dict[str, Any]:
    """How a number and a scale are stored."""
    return {
        "bits": quant.element.bits,
        "exponent": 4 if quant.element.name == "fp8" else quant.element.exponent,
        "offset": quant.element.offset,
        "scale": quant.scale if quant.scale in ("e8m0", "e4m3") else "float",
    }


def weight_only_gemm(
    a: Tensor,
    w: Tensor,
    w_scale: Tensor,
    w_zero_point: Tensor | None,
    w_global_scale: Tensor | None,
    bias: Tensor | None,
    input_weights: Tensor | None,
    plan: Tensor | None,
    topk_ids: Tensor | None,
    expert_map: Tensor | None,
    row_tiles: Sequence[int],
    top_k: int,
    scheme: str,
) -> Tensor:
    """Launch one program for each tile that the plan may hold."""
    tiles = (plan, topk_ids, expert_map)
    stored = QTensor(w, w_scale, w_zero_point, w_global_scale)
    out = empty_rows(a, *stored, bias, input_weights, *tiles, row_tiles, top_k, scheme)
    operands = Operands(a, None, stored, bias, input_weights)
    return multiply(out, operands, tiles, row_tiles, top_k, scheme, None)


def weight_only_gemm_act(
    a: Tensor,
    w: Tensor,
    w_scale: Tensor,
    w_zero_point: Tensor | None,
    w_global_scale: Tensor | None,
    bias: Tensor | None,
    input_weights: Tensor | None,
    plan: Tensor | None,
    topk_ids: Tensor | None,
    expert_map: Tensor | None,
    row_tiles: Sequence[int],
    top_k: int,
    scheme: str,
    activation: str,
) -> Tensor:
    """Launch one program for each tile that the plan may hold."""
    tiles = (plan, topk_ids, expert_map)
    stored = QTensor(w, w_scale, w_zero_point, w_global_scale)
    more = (bias, input_weights, *tiles, row_tiles, top_k, scheme, activation)
    out = empty_activated_rows(a, *stored, *more)
    operands = Operands(a, None, stored, bias, input_weights)
    return multiply(out, operands, tiles, row_tiles, top_k, scheme, activation)


def multiply(
    out: Tensor,
    operands: Operands,
    tiles: AnyTiles,
    row_tiles: Sequence[int],
    top_k: int,
    scheme: str,
    activation: str | None,
) -> Tensor:
    """``out``, filled by a program for each tile that the plan may hold."""
    a, a_scale, (w, scale, zero_point, global_scale), bias, input_weights = operands
    num_slots = out.shape[0]
    if num_slots == 0:
        return out
    a = a if a.stride(1) == 1 else a.contiguous()
    known, (num_experts, n, _) = get_scheme(scheme), w.shape
    quant, rows = known.weight, known.activation
    k, itemsize, row_words = a.shape[1], a.itemsize, False
    if rows is not None:
        k, itemsize = k * (2 if rows.element.packed else 1), 2
        a = _entries(a, rows.element.packed)
        row_words = a.dtype == torch.uint16
    halves = 1 if global_scale is None else global_scale.numel() // num_experts
    w = _entries(w, quant.element.packed)
    packed = quant.element.packed or w.dtype == torch.uint16
    shares = (rows_per_scale(scale, quant, n), n // halves)
    variant = Variant(scheme, activation, packed, *shares, row_words)
    weight, row_tiles = (num_experts, n, k), tuple(row_tiles)
    kernel, programs = _launch(num_slots, weight, itemsize, row_tiles, top_k, w.device, variant)
    kernel(
        (programs,),
        a,
        None if a_scale is None else as_bytes(dense(a_scale)),
        w,
        as_bytes(dense(scale)),
        dense(zero_point),
        dense(global_scale),
        dense(bias),
        dense(input_weights),
        out,
        *tile_arguments(tiles, num_slots, num_experts),
        a.stride(0),
        *scale_strides(a_scale, rows, num_experts),
        *w.stride(),
    )
    return out


def scale_strides(scale: Tensor | None, rows: Quant | None, num_experts: int) -> tuple[int, int]:
    """From the row scales of one expert to those of the next, and of one row to the next."""
    if scale is None or rows is None:
        return 0, 0
    if rows.per_tensor:  # one, or one for each expert
        return int(scale.numel() == num_experts > 1), 0
    return 0, scale.shape[1]


def _entries(x: Tensor, packed: bool) -> Tensor:
    """What a kernel loads: bytes, or words of two neighbours along K where the layout has them."""
    if packed:
        return x
    sizes = x.shape[-1] | x.stride(-2) | x.stride(0) | x.storage_offset()
    return x.view(torch.uint16 if x.stride(-1) == 1 and sizes % 2 == 0 else torch.uint8)


def as_bytes(x: Tensor) -> Tensor:
    """fp8 as bytes: not every architecture has the type, and kernels decode its bits."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x
