"""The arithmetic of quantization inside a kernel: bit by bit that of `scheme/rounding.py`."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from moe_ops.scheme import Quant


class Rule(NamedTuple):
    """How numbers become stored values: a constant of a kernel."""

    largest: float
    """The largest magnitude of a stored value."""
    kind: str
    """``fp8``; ``integer``; ``fp6``; or ``fp4``, whose codes are packed two to a byte."""
    scale: str
    """``float32``, ``pow2``, ``e8m0`` or ``e4m3``."""
    mantissa: int = 0
    """Bits of it, of fp4 and fp6."""
    top: int = 0
    """The exponent of their largest number; it is above their bias by one."""


def rule_of(quant: Quant) -> Rule:
    """That of activations."""
    element = quant.element
    if element.exponent:
        kind, mantissa = f"fp{element.bits}", element.bits - 1 - element.exponent
        return Rule(element.largest, kind, quant.scale, mantissa, 2 ** (element.exponent - 1))
    kind = "fp8" if quant.dtype.is_floating_point else "integer"
    return Rule(element.largest, kind, quant.scale)


@triton.jit
def magnitude(x):
    """``|x|`` (float32) as int32 bits, which have its order; a NaN is above infinity."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def largest(x, axis: tl.constexpr):
    """The largest magnitude along an axis, in float32; NaN where there is one."""
    return tl.max(magnitude(x), axis).to(tl.float32, bitcast=True)


@triton.jit
def scale_of(amax, RULE: tl.constexpr):
    """The scale of groups with largest magnitude ``amax``, in float32.

    ``max(amax, 1e-10) / largest``, as it is or rounded up to a power of two; what a scale of one
    byte stands for.
    """
    LARGEST: tl.constexpr = RULE.largest
    if RULE.scale == "e8m0":
        if RULE.mantissa > 0:
            exponent = ((magnitude(amax) + (0x400000 >> RULE.mantissa)) >> 23) - RULE.top
        else:
            exponent = (magnitude(tl.div_rn(amax, LARGEST)) + 0x7FFFFF) >> 23
        bits = tl.where(exponent > 0, tl.minimum(exponent, 254) << 23, 0x400000)
        bits = tl.where(magnitude(amax) < 0x7F800000, bits, 0x7FC00000)
        scale = bits.to(tl.float32, bitcast=True)
    elif RULE.scale == "e4m3":
        scale = tl.div_rn(amax, LARGEST)
        scale = tl.where(scale > 448, 448.0, scale).to(tl.float8e4nv).to(tl.float32)
    else:
        scale = tl.div_rn(tl.where(amax < 1e-10, 1e-10, amax), LARGEST)
        if RULE.scale == "pow2":
            bits = (scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
            scale = tl.where(scale == scale, bits.to(tl.float32, bitcast=True), scale)
    return scale


@triton.jit
def stored_scale(scale, RULE: tl.constexpr):
    """What is stored of a scale: cast it to that dtype. A float32 2**(s - 127) becomes s."""
    if RULE.scale == "e8m0":
        scale = magnitude(scale) >> 23
    return scale


@triton.jit
def small_code(size, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """The code (int32, without a sign) of the nearest small float, ties to the even code.

    ``size`` (float32) is not negative and not above the largest one.
    """
    DROPPED: tl.constexpr = 23 - MANTISSA
    SMALLEST: tl.constexpr = 2.0 ** (1 - BIAS)
    bits = size.to(tl.int32, bitcast=True)
    normal = (bits + (1 << (DROPPED - 1)) - 1 + ((bits >> DROPPED) & 1)) >> DROPPED
    # Next to 2**23 floats are whole numbers: their last bits are the subnormal code, rounded.
    whole = size * (2.0**MANTISSA / SMALLEST) + 8388608.0
    subnormal = whole.to(tl.int32, bitcast=True) & 255
    return tl.where(size < SMALLEST, subnormal, normal - ((127 - BIAS) << MANTISSA))


@triton.jit
def encode(ratio, RULE: tl.constexpr):
    """``x / s`` (float32) bounded, and rounded where integers are stored: cast it to that dtype.

    fp4 and fp6: the codes, as int32.
    """
    LARGEST: tl.constexpr = RULE.largest
    if RULE.kind == "fp4":
        size = tl.abs(ratio)
        value = (ratio.to(tl.int32, bitcast=True) >> 28) & 8
        value += (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32)
        value += (size > 1.25).to(tl.int32) + (size >= 1.75).to(tl.int32)
        value += (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32) + (size > 5).to(tl.int32)
    elif RULE.kind == "fp6":
        size = tl.abs(ratio)
        value = ((ratio.to(tl.int32, bitcast=True) >> 26) & 32) + small_code(
            tl.where(size < LARGEST, size, LARGEST), RULE.mantissa, RULE.top - 1
        )
    else:
        value = tl.where(ratio > LARGEST, LARGEST, tl.where(ratio < -LARGEST, -LARGEST, ratio))
        if RULE.kind == "integer":
            whole = value.to(tl.int32)
            away = tl.where(value < 0, -1, 1)
            value = whole + tl.where(tl.abs(value - whole.to(tl.float32)) >= 0.5, away, 0)
    return value


@triton.jit
def quantize_groups(x, GROUP: tl.constexpr, RULE: tl.constexpr):
    """``x`` (ROWS, COLS) in float32, a scale for every GROUP columns of a row.

    Returns what `encode` says (ROWS, COLS), and the scales in float32 (ROWS, COLS // GROUP).
    """
    ROWS: tl.constexpr = x.shape[0]
    COLS: tl.constexpr = x.shape[1]
    groups = tl.reshape(x, (ROWS, COLS // GROUP, GROUP))
    scale = scale_of(largest(groups, 2), RULE)
    divisor = tl.expand_dims(scale, 2)
    if RULE.scale == "e4m3":  # may be 0
        ratio = tl.where(divisor == 0, 0.0, tl.div_rn(groups, tl.where(divisor == 0, 1.0, divisor)))
    else:
        ratio = tl.div_rn(groups, divisor)
    return tl.reshape(encode(ratio, RULE), (ROWS, COLS)), scale
