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
    """``x / s`` (float32), rounded and bounded by the cast to the stored dtype if not here.

    Integers, and the codes of fp4 and fp6: as int32.
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
    elif RULE.kind == "integer":
        value = tl.minimum(ratio, LARGEST, propagate_nan=tl.PropagateNan.ALL)
        value = tl.maximum(value, -LARGEST, propagate_nan=tl.PropagateNan.ALL)
        # Half away from zero. (0.5 itself would carry its predecessor to 1.)
        below_half = (value.to(tl.int32, bitcast=True) & ~0x7FFFFFFF) | 0x3EFFFFFF
        value = (value + below_half.to(tl.float32, bitcast=True)).to(tl.int32)
    else:
        value = ratio  # the cast saturates, and keeps a NaN
    return value


@triton.jit
def divide(x, scale, RULE: tl.constexpr):
    """``x / scale`` (float32) as far as `encode` can tell, for scales that `scale_of` found for x.

    One true division a scale, three operations a number: a true division of each takes fifteen,
    and many more where the numerator is zero. Over a power of two the product with the reciprocal
    is the quotient; over other scales it needs `correct`.
    """
    if RULE.scale == "e4m3":  # may be 0
        ratio = tl.where(scale == 0, 0.0, tl.div_rn(x, tl.where(scale == 0, 1.0, scale)))
    else:
        inverse = tl.div_rn(1.0, scale)
        ratio = x * inverse
        if RULE.scale == "float32":  # infinity: quotients are 0 or NaN already
            ratio = correct(ratio, x, tl.where(inverse == 0, 0.0, scale), inverse)
    return ratio


@triton.jit
def correct(ratio, x, scale, inverse):
    """A finite ``x * inverse`` made ``x / scale``, as far as `encode` can tell.

    ``inverse`` is ``1 / scale``, correctly rounded. The result is off by less than 2**-47 of itself
    before it is rounded; no quotient is that close to where `encode` would be misled but a few,
    which are right (`tests/test_division.py` tries them all). That holds where residues are exact,
    for x from 2**-100 on; quotients of smaller ones are rounded to zeros in any case. The signs of
    zeros stay: the second term is ``0 * -inverse`` there.
    """
    residue = tl.fma(ratio, scale, x * -1.0)
    return tl.fma(residue, inverse * -1.0, ratio)


@triton.jit
def divide_given(x, scale):
    """``x / scale`` (float32) as far as `encode` can tell, for any scale.

    Over the scale's mantissa, once x is divided by its power of two: exactly, or so that encoded
    quotients are zeros or the largest. In two steps, as 2**149 is no float.
    """
    up = tl.where(tl.abs(scale) < 2.0**-64, 2.0**64, 1.0)
    scale = scale * up
    mantissa = ((scale.to(tl.int32, bitcast=True) & 0x7FFFFF) | 0x3F800000).to(
        tl.float32, bitcast=True
    )
    x = x * up * tl.div_rn(mantissa, scale)
    inverse = tl.div_rn(1.0, mantissa)
    ratio = x * inverse
    return tl.where(tl.abs(ratio) < 1024, correct(ratio, x, mantissa, inverse), ratio)
