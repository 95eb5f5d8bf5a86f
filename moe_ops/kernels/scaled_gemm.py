"""Launchers of the expert GEMMs of which both operands are quantized."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_ops.activation import Formula, formula, row_steps
from moe_ops.dispatch.choice import tiles_of
from moe_ops.dispatch.portable import ScaleGroups, scale_groups, scaled_slot_tiles
from moe_ops.dispatch.tiles import Gemm, TileConfig, device_facts, max_programs
from moe_ops.dispatch.tuned import Choice
from moe_ops.fake_impls.scaled_gemm import quants, stored_rows
from moe_ops.fake_impls.scaled_gemm import scaled_gemm as empty_rows
from moe_ops.fake_impls.scaled_gemm import scaled_gemm_act as empty_activated_rows
from moe_ops.kernels._gemm.scaled import Layout, scaled_gemm_kernel
from moe_ops.kernels._gemm.scaled_slot import scaled_gemm_slot_kernel
from moe_ops.kernels._gemm.tile import tile_arguments
from moe_ops.kernels._hopper import gemm as hopper_gemm
from moe_ops.kernels._hopper import token_gemm
from moe_ops.kernels._hopper.gemm import Operands
from moe_ops.kernels._quantize.rounding import rule_of
from moe_ops.kernels._runtime.launch import Launch
from moe_ops.kernels._runtime.slots import dense, next_power_of_2
from moe_ops.kernels.quantize import moe_quantize
from moe_ops.scheme import Quant, get_scheme
from moe_ops.scheme.weights import rows_per_scale
from moe_ops.tensors import AnyTiles

BYTES_AT_ONCE = 256
"""Of a row, that a thread reads at once to find its largest magnitude."""


class _Variant(NamedTuple):
    """What, besides a weight's sizes, a kernel is made for."""

    scheme: str
    activation: str | None
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
) -> tuple[Launch, int]:
    """The kernel, and how many programs the plan may need."""
    gemm = _gemm(num_slots, weight, row_tiles, variant.activation)
    tiles = _choose(gemm, device, variant).plain
    return _make(gemm.n, gemm.k, top_k, tiles, variant), max_programs(gemm, tiles)


def _choose(gemm: Gemm, device: torch.device, variant: _Variant) -> Choice:
    rule = formula(variant.activation) if variant.activation else None
    scheme, facts = get_scheme(variant.scheme), device_facts(device)
    return tiles_of(gemm, scheme, rule, facts, variant.weight_rows)


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
    return scale_groups(n, quants(scheme)[0].shared_cols, weight_rows, rule)


@lru_cache(maxsize=1024)
def _make(n: int, k: int, top_k: int, tiles: TileConfig, variant: _Variant) -> Launch:
    return Launch(scaled_gemm_kernel, **_constants(n, k, top_k, tiles, variant))


def _constants(n: int, k: int, top_k: int, tiles: TileConfig, variant: _Variant) -> dict[str, Any]:
    rule = formula(variant.activation) if variant.activation else None
    layout = _layout(n, variant, rule, tiles.block_n)
    sizes = {"N": n, "K": k, "TOP_K": top_k}
    return {**sizes, "RULE": rule, "LAYOUT": layout, **tiles.constants()}


def _layout(n: int, variant: _Variant, rule: Formula | None, block_n: int) -> Layout:
    """How rows and scales lie for ``n`` output columns in tiles of ``block_n``."""
    quant, _ = quants(variant.scheme)
    groups = _groups(n, variant.scheme, variant.activation, variant.weight_rows)
    step, up = row_steps(rule, n)
    return Layout(
        step=step,
        up=up,
        weight_rows=2 * n if up else n,
        rows=variant.weight_rows,
        cols=groups.k,
        uniform=block_n <= groups.n,
        integer=not quant.dtype.is_floating_point,
    )


@lru_cache(maxsize=4096)
def _hopper(
    num_slots: int,
    weight: tuple[int, int, int],
    row_tiles: tuple[int, ...],
    top_k: int,
    device: torch.device,
    variant: _Variant,
) -> tuple[hopper_gemm.Constants, bool] | None:
    """Hopper's own kernel, and whether it packs rows; None where it does not serve."""
    gemm = _gemm(num_slots, weight, row_tiles, variant.activation)
    tiles = _choose(gemm, device, variant).hopper
    if tiles is None:
        return None
    quant, _ = quants(variant.scheme)
    scales = hopper_gemm.Scales(variant.weight_rows, quant.shared_cols, quant.per_tensor)
    rule = formula(variant.activation) if variant.activation else None
    return hopper_gemm.constants(tuple(weight), 1, top_k, rule, scales, tiles), tiles.packed


def _run(
    out: Tensor,
    operands: Operands,
    tiles: AnyTiles,
    row_tiles: Sequence[int],
    top_k: int,
    scheme: str,
    activation: str | None = None,
) -> None:
    """Launch one program for each tile that the plan may hold; quantize rows that are not yet."""
    a, a_scale, w, w_scale, bias, _ = operands
    num_slots = out.shape[0]
    if num_slots == 0:
        return
    quant, weight_quant = quants(scheme)
    variant = _Variant(scheme, activation, rows_per_scale(w_scale, weight_quant, w.shape[1]))
    how = (num_slots, w.shape, tuple(row_tiles), top_k, w.device, variant)
    a = a if a.stride(1) == 1 else a.contiguous()
    told = tile_arguments(tiles, num_slots, w.shape[0])
    rows, hopper = stored_rows(a, a_scale, quant), _hopper(*how)
    boxed = hopper is not None and _boxed(w, w_scale, quant)
    if rows is None:
        alone = _row_by_row(a_scale, quant)
        launch = _launch_slots(*how, a.itemsize) if alone and tiles[1] is not None else None
        if launch is not None:
            kernel, programs = launch
            given = (a, dense(a_scale), w, dense(w_scale), dense(bias), out)
            kernel((programs,), *given, *told, a.stride(0), *w.stride())
            return
        if boxed and alone and hopper[1]:
            given = Operands(a, dense(a_scale), w, dense(w_scale), dense(bias), quant)
            hopper_gemm.run(out, given, told, *hopper)
            return
        rows = moe_quantize(a, a_scale, None, *tiles[1:], w.shape[0], quant.key)
    a, a_scale = rows
    if boxed and a_scale.dtype == torch.float32 and _one_scale(a_scale, quant):
        given = Operands(a, dense(a_scale), w, dense(w_scale), dense(bias))
        hopper_gemm.run(out, given, told, *hopper)
        return
    kernel, programs = _launch(*how)
    given = (a, dense(a_scale), w, dense(w_scale), dense(bias), out)
    strides = (a.stride(0), *_scale_strides(a, a_scale, quant), *w.stride())
    kernel((programs,), *given, *told, *strides)


def _row_by_row(a_scale: Tensor | None, quant: Quant) -> bool:
    """Whether a row is all it takes to quantize it."""
    return not quant.per_tensor if a_scale is None else quant.per_tensor and a_scale.numel() == 1


@lru_cache(maxsize=4096)
def _launch_slots(
    num_slots: int,
    weight: tuple[int, int, int],
    row_tiles: tuple[int, ...],
    top_k: int,
    device: torch.device,
    variant: _Variant,
    itemsize: int,
) -> tuple[Launch, int] | None:
    """The kernel that quantizes the rows of few slots, and its programs; None where others serve.

    ``itemsize``: of a number in a row.
    """
    gemm = _gemm(num_slots, weight, row_tiles, variant.activation)
    tiles = scaled_slot_tiles(gemm, quants(variant.scheme)[0])
    if tiles is None:
        return None
    chunk = min(next_power_of_2(gemm.k), 32 * tiles.num_warps * BYTES_AT_ONCE // itemsize)
    return _make_slots(gemm.n, gemm.k, top_k, tiles, variant, chunk), max_programs(gemm, tiles)


@lru_cache(maxsize=1024)
def _make_slots(
    n: int, k: int, top_k: int, tiles: TileConfig, variant: _Variant, chunk: int
) -> Launch:
    constants = _constants(n, k, top_k, tiles, variant)
    quant = rule_of(quants(variant.scheme)[0])
    return Launch(scaled_gemm_slot_kernel, QUANT=quant, CHUNK=chunk, **constants)


def _boxed(w: Tensor, w_scale: Tensor, quant: Quant) -> bool:
    """Whether Hopper's kernels take these tensors."""
    scales = quant.scale_dtype == w_scale.dtype == torch.float32
    return scales and hopper_gemm.serves(quant.dtype, w)


def _one_scale(a_scale: Tensor, quant: Quant) -> bool:
    """Whether experts do not have scales of their own."""
    return not quant.per_tensor or a_scale.numel() == 1


def _scale_strides(a: Tensor, a_scale: Tensor, quant: Quant) -> tuple[int, int]:
    """From one row's scales to the next's, and from one expert's to the next's."""
    if quant.per_tensor:
        return 0, int(a_scale.numel() > 1)
    return a_scale.numel() // a.shape[0], 0


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
    """Launch one program for each tile that the plan may hold."""
    operands = (a, a_scale, w, w_scale, bias)
    tiles = (plan, topk_ids, expert_map)
    out = empty_rows(*operands, *tiles, row_tiles, top_k, scheme, out_dtype)
    _run(out, Operands(*operands), tiles, row_tiles, top_k, scheme)
    return out


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
    """The same with an activation of what a tile holds, gate and up side by side."""
    operands = (a, a_scale, w, w_scale, bias)
    tiles = (plan, topk_ids, expert_map)
    out = empty_activated_rows(*operands, *tiles, row_tiles, top_k, scheme, out_dtype, activation)
    given = Operands(*operands)
    if not token_gemm.rows(out, given, None, tiles, row_tiles, activation, scheme):
        _run(out, given, tiles, row_tiles, top_k, scheme, activation)
    return out
