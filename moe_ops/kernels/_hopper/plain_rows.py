"""Triton kernel that dequantizes rows with scales along K, for kernels that multiply bf16.

In bf16 the numbers times their scales are exact (see `Scheme.dequantizes_both`). Rows are
dequantized once, not in each tile that reads them.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_ops.dispatch.tiles import PLAN_HEADER, cdiv
from moe_ops.kernels._gemm.weight_only import (
    as_bytes,
    format_of_rows,
    load_rows,
    row_pointers,
    stored_entries,
)
from moe_ops.kernels._hopper.pack import rows_in_use, sources
from moe_ops.kernels._runtime.dependent import take_turn
from moe_ops.kernels._runtime.launch import Launch
from moe_ops.kernels._runtime.slots import dense, next_power_of_2
from moe_ops.scheme import Quant

MOST_COLS, NUMBERS = 256, 4096
"""The most columns, and the numbers, that a program dequantizes at a time."""
MOST_PROGRAMS = 8192
"""The most programs, as a plan may be mostly padding, which takes a program no time."""


@triton.jit(do_not_specialize=["num_slots", "num_rows", "num_entries"])
def _plain_rows_kernel(
    a, a_scale, out, plan, num_slots, num_rows, num_entries, stride_am, stride_sm,
    K: tl.constexpr, TOP_K: tl.constexpr, FORMAT: tl.constexpr, GATHERED: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Program (i, j) dequantizes COLS columns of every i-th ROWS rows.

    ``plan``: names the rows; None: all rows of ``a``. GATHERED: the result has them in the order of
    the plan; else each in its own place.
    """
    take_turn()
    used = num_rows
    if plan is not None:
        used = rows_in_use(plan, num_rows, num_entries)
    start = tl.program_id(1) * COLS
    col = start + tl.arange(0, COLS)
    for first in range(tl.program_id(0) * ROWS, used, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        source, real = row.to(tl.int64), row < used
        if plan is not None:
            source, real = sources(plan, row, used, num_slots, TOP_K)
        tile, entry = row_pointers(a, source, stride_am, COLS, FORMAT)
        x = load_rows(tile, a_scale + source * stride_sm, entry, start, real, K, COLS, FORMAT)
        target = row.to(tl.int64) if GATHERED else source
        inside = real[:, None] & (col < K)[None, :]
        tl.store(out + target[:, None] * K + col[None, :], x, mask=inside)


@lru_cache(maxsize=1024)
def _launch(
    k: int, top_k: int, quant: Quant, words: bool, gathered: bool
) -> tuple[Launch, int, int]:
    """The kernel, rows per program, and programs along a row."""
    cols = min(MOST_COLS, next_power_of_2(k))
    rows = NUMBERS // cols
    more = {"launch_pdl": False} if gathered else {}  # as for the GEMM kernel that reads these rows
    kernel = Launch(
        _plain_rows_kernel,
        K=k,
        TOP_K=top_k,
        FORMAT=format_of_rows(quant, words=words),
        GATHERED=gathered,
        ROWS=rows,
        COLS=cols,
        **more,
    )
    return kernel, rows, cdiv(k, cols)


def plain_rows(
    a: Tensor, a_scale: Tensor, quant: Quant, plan: Tensor | None, num_slots: int, top_k: int
) -> Tensor:
    """Dequantize rows, each to its own place.

    Args:
        a: ``(rows, K)`` numbers as ``quant`` stores them, contiguous along K.
        a_scale: ``(rows, G)``.
        quant: how rows are quantized, with scales along K.
        plan: a plan that names the rows that are needed; None: all are.
        num_slots: see `pack_rows`.
        top_k: slots per row of ``a``.

    Returns:
        bf16 ``(rows, K)``; rows that the plan does not name are undefined.
    """
    count = a.shape[0] if plan is None else plan.shape[0] - PLAN_HEADER
    return _in_bf16(a, a_scale, quant, plan, num_slots, count, top_k, gathered=False)


def gathered_plain_rows(
    a: Tensor,
    a_scale: Tensor,
    quant: Quant,
    plan: Tensor,
    num_slots: int,
    num_rows: int,
    top_k: int,
) -> Tensor:
    """Dequantize rows, and gather them as `pack_rows` does, which describes the arguments.

    Returns:
        bf16 ``(R, K)``; padding rows are undefined.
    """
    return _in_bf16(a, a_scale, quant, plan, num_slots, num_rows, top_k, gathered=True)


def _in_bf16(
    a: Tensor,
    a_scale: Tensor,
    quant: Quant,
    plan: Tensor | None,
    num_slots: int,
    count: int,
    top_k: int,
    *,
    gathered: bool,
) -> Tensor:
    """Launch the kernel. ``count``: the most rows that are read, of the plan or else of ``a``."""
    entries, scale = stored_entries(a, quant), as_bytes(dense(a_scale))
    k = a.shape[1] * quant.element.values_per_byte
    out = a.new_empty(count if gathered else a.shape[0], k, dtype=torch.bfloat16)
    words = entries.dtype == torch.uint16
    kernel, height, pieces = _launch(k, top_k, quant, words, gathered)
    programs = min(cdiv(count, height), cdiv(MOST_PROGRAMS, pieces))
    kernel(
        (programs, pieces), entries, scale, out, plan, num_slots, count,
        0 if plan is None else plan.shape[0], entries.stride(0), scale.shape[1],
    )  # fmt: skip
    return out
