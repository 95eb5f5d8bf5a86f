"""The rows that travel: read, quantized in registers, and stored in a window."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from moe_ops.dispatch.tiles import cdiv
from moe_ops.kernels._quantize.kernels import store_values
from moe_ops.kernels._quantize.rounding import (
    Rule,
    divide,
    divide_given,
    encode,
    magnitude,
    rule_of,
    scale_of,
    stored_scale,
)
from moe_ops.kernels._runtime.launch import Launch
from moe_ops.kernels._runtime.slots import next_power_of_2
from moe_ops.kernels._symmetric.flags import part_of
from moe_ops.scheme import WHOLE, parse_quant
from moe_ops.windows import WindowLayout

TYPES = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.uint8: tl.uint8,
    torch.int8: tl.int8,
}


@triton.jit
def row_of(
    x, token, topk_weights, routed, WIDTH: tl.constexpr, TILE: tl.constexpr, ON_INPUT: tl.constexpr
):
    """A token's row as a TILE; with ON_INPUT in float32, multiplied by its router weight.

    A token that is not ``routed`` is not read.
    """
    col = tl.arange(0, TILE[0])[:, None] * TILE[1] + tl.arange(0, TILE[1])[None, :]
    inside = routed & (col < WIDTH)
    value = tl.load(x + token.to(tl.int64) * WIDTH + col, mask=inside, other=0)
    if ON_INPUT:
        weight = tl.load(topk_weights + token, mask=routed, other=0.0).to(tl.float32)
        value = value.to(tl.float32) * weight
    return value


@triton.jit
def quantized_row(value, scale, RULE: tl.constexpr, GIVEN: tl.constexpr):
    """The stored values of a row, and its scales ``(COUNT,)`` as float32 or (e8m0) exponents."""
    value = value.to(tl.float32)
    if GIVEN:
        own = tl.load(scale).to(tl.float32)
        stored = encode(divide_given(value, own), RULE)
        return stored, tl.zeros((value.shape[0],), dtype=tl.float32) + own
    if scale is not None:
        value = tl.div_rn(value, tl.load(scale).to(tl.float32))
    own = scale_of(tl.max(magnitude(value), 1).to(tl.float32, bitcast=True), RULE)
    return encode(divide(value, own[:, None], RULE), RULE), stored_scale(own, RULE)


@triton.jit
def store_row(rows, row, value, sent, WIDTH: tl.constexpr, RULE: tl.constexpr):
    """Store a TILE as a row of the window's ``rows``, if it is ``sent``."""
    first = tl.arange(0, value.shape[0])[:, None] * value.shape[1]
    valid = tl.zeros((value.shape[0],), dtype=tl.int1) | sent
    if RULE is None:
        col = first + tl.arange(0, value.shape[1])[None, :]
        to = rows + row * WIDTH + col
        tl.store(to, value.to(rows.dtype.element_ty), mask=sent & (col < WIDTH))
    else:
        store_values(rows, value, row, first, WIDTH, valid, RULE)


@triton.jit
def store_slots(base, at, ids, weights, inside, AT: tl.constexpr):
    """Store ids and weights of slots in the window at address ``base``."""
    tl.store(part_of(base, AT.ids, tl.int32) + at, ids, mask=inside)
    to = part_of(base, AT.weights, tl.float32) + at
    tl.store(to, weights.to(tl.float32), mask=inside)


class Travel(NamedTuple):
    """How rows travel: a constant of the kernels that send them."""

    width: int
    """Numbers of a row."""
    tile: tuple[int, int]
    """Groups of a row and numbers of a group, powers of two."""
    scales: int
    """Scales of a row that travel; 0: none."""
    rule: Rule | None
    static: bool
    """Whether one scale is given for all rows."""
    row_type: tl.dtype
    scale_type: tl.dtype
    on_input: bool
    """Whether rows are multiplied by router weights."""


def row_warps(width: int) -> int:
    """Number of warps for a row: 32 bytes per thread of 16-bit numbers."""
    return max(1, min(16, next_power_of_2(width) // 512))


@lru_cache(maxsize=1024)
def travel_of(
    width: int, dtype: torch.dtype, quant: str, own: tuple | None, on_input: bool
) -> Travel:
    """How rows of ``dtype`` travel.

    Args:
        width: numbers of a row.
        dtype: of the rows before they are quantized.
        quant: how they are quantized on the way, or empty.
        own: number and dtype of the scales of a row that is quantized already; with ``quant``, of
            the scale that is given; None: no scale is given.
        on_input: whether rows are multiplied by router weights.
    """
    if not quant:
        scales, scale_dtype = own or (0, torch.float32)
        tile, row_type = (1, next_power_of_2(width)), TYPES[dtype]
        return Travel(width, tile, scales, None, False, row_type, TYPES[scale_dtype], on_input)
    rule = parse_quant(quant)
    whole = rule.group.cols == WHOLE
    cols = next_power_of_2(width) if whole else rule.group.cols
    groups = 1 if whole else cdiv(width, cols)
    return Travel(
        width,
        (next_power_of_2(groups), cols),
        0 if rule.per_tensor else groups,
        rule_of(rule),
        own is not None and not rule.global_scale,
        TYPES[rule.dtype],
        TYPES[rule.scale_dtype],
        on_input,
    )


@lru_cache(maxsize=1024)
def send_launch(
    kernel: Any, windows: tuple[int, WindowLayout], top_k: int, travel: Travel, num_warps: int
) -> Launch:
    """Launch of a kernel that sends rows, for a rank and the layout of its windows."""
    rank, layout = windows
    return Launch(
        kernel,
        RANK=rank,
        RANKS=layout.ranks,
        TOP_K=top_k,
        HOW=travel,
        AT=layout.parts,
        num_warps=num_warps,
    )
