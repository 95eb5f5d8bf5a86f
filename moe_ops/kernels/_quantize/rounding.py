"""The arithmetic of quantization inside a kernel, bitwise equal to `scheme/rounding.py`."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from moe_ops.scheme import Quant


class Rule(NamedTuple):
    """How numbers are rounded to stored values: a constant of a kernel."""

    largest: float
    """The largest magnitude of a stored value."""
    kind: str
    """``fp8``; ``integer``; ``fp6``; or ``fp4``, whose codes are packed two to a byte."""
    scale: str
    """Form of the scale: ``float32``, ``pow2``, ``e8m0`` or ``e4m3``."""
    mantissa: int = 0
    """Mantissa bits of fp4 and fp6."""
    top: int = 0
    """The exponent of the largest fp4 or fp6 number, which is the exponent bias plus one."""


def rule_of(quant: Quant) -> Rule:
    """The `Rule` of quantized activations."""
    element = quant.element
    if element.exponent:
        kind, mantissa = f"fp{element.bits}", element.bits - 1 - element.exponent
        return Rule(element.largest, kind, quant.scale, mantissa, 2 ** (element.exponent - 1))
    kind = "fp8" if quant.dtype.is_floating_point else "integer"
    return Rule(element.largest, kind, quant.scale)


@triton.jit
def magnitude(x):
    """``|x|`` (float32) as int32 bits, which sort as ``|x|`` does, with NaN above infinity."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_of(amax, RULE: tl.constexpr):
    """The scale of groups with largest magnitude ``amax``, in float32.

    ``max(amax, 1e-10) / largest``, for ``pow2`` rounded up to a power of two. For one-byte scales
    (``e8m0``, ``e4m3``) the value that the byte stands for.
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
    """The number to cast to the dtype of stored scales: for e8m0 s, where scale = 2**(s - 127)."""
    if RULE.scale == "e8m0":
        scale = magnitude(scale) >> 23
    return scale


@triton.jit
def small_code(size, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """The code (int32, without a sign) of the nearest small float, ties to the even code.

    ``size`` (float32) is from 0 to the largest small float.
    """
    DROPPED: tl.constexpr = 23 - MANTISSA
    SMALLEST: tl.constexpr = 2.0 ** (1 - BIAS)
    bits = size.to(tl.int32, bitcast=True)
    normal = (bits + (1 << (DROPPED - 1)) - 1 + ((bits >> DROPPED) & 1)) >> DROPPED
    # From 2**23 on floats are whole numbers, so the addition rounds: the low bits are the code.
    whole = size * (2.0**MANTISSA / SMALLEST) + 8388608.0
    subnormal = whole.to(tl.int32, bitcast=True) & 255
    return tl.where(size < SMALLEST, subnormal, normal - ((127 - BIAS) << MANTISSA))


@triton.jit
def encode(ratio, RULE: tl.constexpr):
    """Round and clamp ``x / s`` (float32) to a stored value.

    Returns int32 for integers and for the codes of fp4 and fp6. fp8 is returned as it is: the cast
    to fp8 (`stored_as`) rounds and saturates.
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
        # Half away from zero. (Adding 0.5 itself would round the float below 0.5 up to 1.)
        below_half = (value.to(tl.int32, bitcast=True) & ~0x7FFFFFFF) | 0x3EFFFFFF
        value = (value + below_half.to(tl.float32, bitcast=True)).to(tl.int32)
    else:
        value = ratio  # the cast saturates, and keeps NaN
    return value


@triton.jit
def stored_as(value, DTYPE: tl.constexpr, RULE: tl.constexpr):
    """What `encode` returned in the dtype of its tensor; bf16 may hold fp8 numbers."""
    if RULE.kind == "fp8" and tl.bfloat16 == DTYPE:
        value = value.to(tl.float8e4nv)
    return value.to(DTYPE)


@triton.jit
def divide(x, scale, RULE: tl.constexpr):
    """``x / scale`` (float32) as far as `encode` can tell, for scales that `scale_of` found for x.

    One IEEE division per scale and three operations per number. An IEEE division of each number
    takes fifteen operations, and many more where the numerator is zero. If the scale is a power of
    two, the product with the reciprocal is the quotient; other scales need `correct`.
    """
    if RULE.scale == "e4m3":  # the scale may be 0
        ratio = tl.where(scale == 0, 0.0, tl.div_rn(x, tl.where(scale == 0, 1.0, scale)))
    else:
        inverse = tl.div_rn(1.0, scale)
        ratio = x * inverse
        if RULE.scale == "float32":  # for an infinite scale the quotients are 0 or NaN already
            ratio = correct(ratio, x, tl.where(inverse == 0, 0.0, scale), inverse)
    return ratio


@triton.jit
def correct(ratio, x, scale, inverse):
    """Correct a finite ``x * inverse`` to ``x / scale``, as far as `encode` can tell.

    ``inverse`` is ``1 / scale``, correctly rounded. Before it is rounded, the result has a relative
    error below 2**-47. Only a few quotients lie that close to a rounding boundary of `encode`, and
    these come out right (`tests/ops/test_division.py` tries them all). This needs exact residues,
    which holds for x from 2**-100 on; quotients of smaller x are encoded as zeros in any case.
    Zeros keep their signs: the second term is ``0 * -inverse`` there.
    """
    residue = tl.fma(ratio, scale, x * -1.0)
    return tl.fma(residue, inverse * -1.0, ratio)


@triton.jit
def divide_given(x, scale):
    """``x / scale`` (float32) as far as `encode` can tell, for any scale.

    x is divided by the scale's power of two first, then by its mantissa. The first division is
    exact, or its result is so small or large that the encoded quotient is zero or the largest
    value. It takes two steps, because 2**149 is not a float32.
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
