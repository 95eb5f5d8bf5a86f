"""The arithmetic of quantization inside a kernel: bit by bit that of `scheme/rounding.py`."""

from __future__ import annotations

import triton
import triton.language as tl

from moe_ops.scheme import WHOLE, Quant


def quant_constants(quant: Quant) -> dict:
    """The constexpr arguments of a kernel that quantizes; GROUP None: a scale spans the row."""
    cols = quant.group.cols
    return {
        "GROUP": None if cols == WHOLE else cols,
        "LARGEST": quant.element.largest,
        "INTEGER": not quant.dtype.is_floating_point,
        "POW2": quant.scale == "pow2",
    }


@triton.jit
def magnitude(x):
    """``|x|`` (float32) as int32 bits, which have its order; a NaN is above infinity."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def largest(x, axis: tl.constexpr):
    """The largest magnitude along an axis, in float32; NaN where there is one."""
    return tl.max(magnitude(x), axis).to(tl.float32, bitcast=True)


@triton.jit
def scale_of(amax, LARGEST: tl.constexpr, POW2: tl.constexpr):
    """The scale of groups with largest magnitude ``amax``: ``max(amax, 1e-10) / LARGEST``."""
    scale = tl.div_rn(tl.where(amax < 1e-10, 1e-10, amax), LARGEST)
    if POW2:
        bits = (scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
        scale = tl.where(scale == scale, bits.to(tl.float32, bitcast=True), scale)
    return scale


@triton.jit
def encode(ratio, LARGEST: tl.constexpr, INTEGER: tl.constexpr):
    """``x / s`` (float32) bounded, and rounded where integers are stored: cast it to that dtype."""
    value = tl.where(ratio > LARGEST, LARGEST, tl.where(ratio < -LARGEST, -LARGEST, ratio))
    if INTEGER:
        whole = value.to(tl.int32)
        away = tl.where(value < 0, -1, 1)
        value = whole + tl.where(tl.abs(value - whole.to(tl.float32)) >= 0.5, away, 0)
    return value


@triton.jit
def quantize_groups(
    x, GROUP: tl.constexpr, LARGEST: tl.constexpr, INTEGER: tl.constexpr, POW2: tl.constexpr
):
    """``x`` (ROWS, COLS) in float32, a scale for every GROUP columns of a row.

    Returns what `encode` says (ROWS, COLS), and the scales (ROWS, COLS // GROUP).
    """
    ROWS: tl.constexpr = x.shape[0]
    COLS: tl.constexpr = x.shape[1]
    groups = tl.reshape(x, (ROWS, COLS // GROUP, GROUP))
    scale = scale_of(largest(groups, 2), LARGEST, POW2)
    value = encode(tl.div_rn(groups, tl.expand_dims(scale, 2)), LARGEST, INTEGER)
    return tl.reshape(value, (ROWS, COLS)), scale
