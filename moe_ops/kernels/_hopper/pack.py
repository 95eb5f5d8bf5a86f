"""Triton kernels that gather rows into the padded row order of a tile plan, for TMA to copy tiles.

`pack_rows` copies rows as they are, `quantize_rows` quantizes them while gathering. Both can hold
fp8 numbers in bf16, or riffle columns for `fp8_fragments`: columns of the first half of each 16
alternate with columns of the second half.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_ops.dispatch.tiles import cdiv
from moe_ops.kernels._quantize.rounding import (
    divide,
    divide_given,
    encode,
    magnitude,
    rule_of,
    scale_of,
    stored_as,
)
from moe_ops.kernels._runtime.dependent import take_turn
from moe_ops.kernels._runtime.launch import Launch
from moe_ops.kernels._runtime.slots import HEADER, next_power_of_2, row_parts
from moe_ops.scheme import WHOLE, Quant


@triton.jit
def rows_in_use(plan, num_rows, num_entries):
    """The plan's number of rows in use, limited to the rows of the plan and of the result."""
    return tl.minimum(tl.load(plan), tl.minimum(num_rows, num_entries - HEADER))


@triton.jit
def sources(plan, row, used, num_slots, TOP_K: tl.constexpr):
    """The rows of ``a`` for rows of the plan (0 for padding), and which of them are real."""
    slot = tl.load(plan + HEADER + row, mask=row < used, other=-1)
    real = (slot >= 0) & (slot < num_slots)
    return (tl.where(real, slot, 0) // TOP_K).to(tl.int64), real


@triton.jit
def _load_columns(a, real, first, K: tl.constexpr, COLS: tl.constexpr, RIFFLED: tl.constexpr):
    """COLS columns of rows ``a`` (pointers) from ``first`` on; zeros past K and of other rows.

    A thread loads and stores neighbours in memory, riffled or not.
    """
    if RIFFLED:
        half = tl.arange(0, COLS // 2)
        col = first + half // 8 * 16 + half % 8
        inside = real[:, None] & (col < K)[None, :]
        low = tl.load(a[:, None] + col[None, :], mask=inside, other=0.0)
        high = tl.load(a[:, None] + 8 + col[None, :], mask=inside, other=0.0)
        x = tl.interleave(low, high)
    else:
        col = first + tl.arange(0, COLS)
        x = tl.load(a[:, None] + col[None, :], mask=real[:, None] & (col < K)[None, :], other=0.0)
    return x


@triton.jit(do_not_specialize=["num_slots", "num_rows", "num_entries"])
def _pack_kernel(
    a, a_scale, out, out_scale, plan, num_slots, num_rows, num_entries, stride_am, stride_sm,
    K: tl.constexpr, GROUPS: tl.constexpr, TOP_K: tl.constexpr, RIFFLED: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, GROUP_COLS: tl.constexpr,
):  # fmt: skip
    """Program (i, j) copies COLS columns of ROWS rows; padding rows of the result stay as is."""
    take_turn()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    used = rows_in_use(plan, num_rows, num_entries)
    if tl.program_id(0) * ROWS >= used:
        return
    source, real = sources(plan, row, used, num_slots, TOP_K)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = real[:, None] & (col < K)[None, :]
    first = tl.program_id(1) * COLS
    x = _load_columns(a + source * stride_am, real, first, K, COLS, RIFFLED)
    x = x.to(out.dtype.element_ty)
    tl.store(out + row.to(tl.int64)[:, None] * K + col[None, :], x, mask=inside)
    if GROUPS > 0:
        # This program's share of the scales, which are stored (groups, rows).
        group = tl.program_id(1) * GROUP_COLS + tl.arange(0, GROUP_COLS)
        inside_group = real[:, None] & (group < GROUPS)[None, :]
        scale = tl.load(a_scale + source[:, None] * stride_sm + group[None, :], mask=inside_group)
        at = out_scale + group[None, :].to(tl.int64) * num_rows + row[:, None]
        tl.store(at, scale, mask=inside_group)


@triton.jit(do_not_specialize=["num_slots", "num_rows", "num_entries"])
def _quantize_pack_kernel(
    a, static_scale, out, out_scale, plan, num_slots, num_rows, num_entries, stride_am,
    K: tl.constexpr, TOP_K: tl.constexpr, RULE: tl.constexpr, RIFFLED: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Program (i, j) quantizes group j of ROWS rows; padding rows of the result stay as they are.

    A group has PARTS times COLS columns. ``static_scale``: the one scale of all rows, or None.
    """
    take_turn()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    used = rows_in_use(plan, num_rows, num_entries)
    if tl.program_id(0) * ROWS >= used:
        return
    source, real = sources(plan, row, used, num_slots, TOP_K)
    start = tl.program_id(1) * COLS
    col = start + tl.arange(0, COLS)[None, :]
    values, most = (), tl.zeros((ROWS, COLS), dtype=tl.int32)
    for part in tl.static_range(PARTS):
        first = part * COLS + start
        x = _load_columns(a + source * stride_am, real, first, K, COLS, RIFFLED)
        most = tl.maximum(most, magnitude(x.to(tl.float32)))
        values = values + (x.to(tl.float32),)
    if static_scale is None:
        scale = scale_of(tl.max(most, 1).to(tl.float32, bitcast=True), RULE)
        at = out_scale + tl.program_id(1).to(tl.int64) * num_rows + row
        tl.store(at, scale, mask=real)
    else:
        scale = tl.load(static_scale).to(tl.float32)
        first = tl.program_id(1) == 0
        tl.store(out_scale + row, tl.zeros((ROWS,), dtype=tl.float32) + scale, mask=real & first)
    for part in tl.static_range(PARTS):
        if static_scale is None:
            ratio = divide(values[part], scale[:, None], RULE)
        else:
            ratio = divide_given(values[part], scale)
        inside = real[:, None] & (part * COLS + col < K)
        at = out + row.to(tl.int64)[:, None] * K + part * COLS + col
        tl.store(at, stored_as(encode(ratio, RULE), out.dtype.element_ty, RULE), mask=inside)


class RowForm(NamedTuple):
    """How gathered rows are stored."""

    dtype: torch.dtype | None = None
    """The dtype, which holds all numbers; None: that of the rows, or of their quantization."""
    riffled: bool = False
    """Whether columns are riffled; K must be a multiple of 16."""


AS_THEY_ARE, WIDE, RIFFLED = RowForm(), RowForm(torch.bfloat16), RowForm(riffled=True)


@lru_cache(maxsize=1024)
def _gather_launch(
    k: int, itemsize: int, groups: int, top_k: int, riffled: bool
) -> tuple[Launch, int, int]:
    """The kernel, rows per program, and programs along a row."""
    cols = min(next_power_of_2(k), 4096 // itemsize)
    rows = min(64, 16384 // (cols * itemsize))  # no more than the smallest row tile
    pieces = cdiv(k, cols)
    sizes = {
        "launch_pdl": False,  # as for the GEMM kernel that reads these rows: see `gemm`
        "ROWS": rows,
        "COLS": cols,
        "GROUP_COLS": next_power_of_2(max(1, cdiv(groups, pieces))),
    }
    return Launch(
        _pack_kernel, K=k, GROUPS=groups, TOP_K=top_k, RIFFLED=riffled, **sizes
    ), rows, pieces  # fmt: skip


def pack_rows(
    a: Tensor,
    a_scale: Tensor | None,
    plan: Tensor,
    num_slots: int,
    num_rows: int,
    top_k: int,
    form: RowForm = AS_THEY_ARE,
) -> tuple[Tensor, Tensor | None]:
    """Gather rows: row r of the result is ``a[slot of r // top_k]``; padding rows are undefined.

    Args:
        a: ``(rows, K)``, contiguous along K.
        a_scale: ``(rows, G)`` float32, contiguous; one element for all rows; or None.
        plan: a plan whose row tile is a multiple of 64; nothing is written past its rows in use.
        num_slots: a plan entry from 0 to ``num_slots - 1`` is a slot, any other is padding.
        num_rows: R, the most rows that the plan may use: `moe_ops.dispatch.hopper.gathered_rows`.
        top_k: slots per row of ``a``.
        form: how the result is stored.

    Returns:
        Rows ``(R, K)`` and scales ``(G, R)``.
    """
    k = a.shape[1]
    rows = a.new_empty(num_rows, k, dtype=form.dtype)
    groups, stride, scales = 0, 0, None
    if a_scale is not None:
        shared = a_scale.numel() == 1
        groups = 1 if shared else a_scale.shape[1]
        stride = 0 if shared else groups
        scales = a_scale.new_empty(groups, num_rows, dtype=torch.float32)
    kernel, height, pieces = _gather_launch(k, a.itemsize, groups, top_k, form.riffled)
    kernel(
        (cdiv(num_rows, height), pieces), a, a_scale, rows, scales, plan,
        num_slots, num_rows, plan.shape[0], a.stride(0), stride,
    )  # fmt: skip
    return rows, scales


@lru_cache(maxsize=1024)
def _quantize_and_gather_launch(
    k: int, top_k: int, quant: Quant, static: bool, riffled: bool
) -> tuple[Launch, int, int]:
    """The kernel, rows per program, and programs along a row."""
    cols, parts = quant.group.cols, 1
    if static:
        cols = min(256, next_power_of_2(k))
    elif cols == WHOLE:
        cols, parts = row_parts(k)
    rows = max(1, min(64, (4096 if parts == 1 else 1024) // cols))
    kernel = Launch(
        _quantize_pack_kernel,
        K=k,
        TOP_K=top_k,
        RULE=rule_of(quant),
        RIFFLED=riffled,
        ROWS=rows,
        COLS=cols,
        PARTS=parts,
        num_warps=max(4, min(16, cols // (1024 if parts == 1 else 256))),
        launch_pdl=False,
    )
    return kernel, rows, cdiv(k, cols * parts)


def quantize_rows(
    a: Tensor,
    a_scale: Tensor | None,
    quant: Quant,
    plan: Tensor,
    num_slots: int,
    num_rows: int,
    top_k: int,
    form: RowForm = AS_THEY_ARE,
) -> tuple[Tensor, Tensor]:
    """Quantize and gather rows, bitwise as `pack_rows` of quantized rows, in one pass.

    Args:
        a: ``(rows, K)``, contiguous along K.
        a_scale: the one scale of all rows; None: each group or row gets its own.
        quant: the quantization, with float32 scales per group of columns, per row, or ``a_scale``.
        plan: see `pack_rows`.
        num_slots: see `pack_rows`.
        num_rows: see `pack_rows`.
        top_k: see `pack_rows`.
        form: how the result is stored.

    Returns:
        Rows ``(R, K)`` and scales ``(G, R)``.
    """
    k = a.shape[1]
    rows = a.new_empty(num_rows, k, dtype=form.dtype or quant.dtype)
    whole = a_scale is not None or quant.group.cols == WHOLE
    groups = 1 if whole else cdiv(k, quant.group.cols)
    scales = a.new_empty(groups, num_rows, dtype=torch.float32)
    kernel, height, pieces = _quantize_and_gather_launch(
        k, top_k, quant, a_scale is not None, form.riffled
    )
    kernel(
        (cdiv(num_rows, height), pieces), a, a_scale, rows, scales, plan,
        num_slots, num_rows, plan.shape[0], a.stride(0),
    )  # fmt: skip
    return rows, scales
