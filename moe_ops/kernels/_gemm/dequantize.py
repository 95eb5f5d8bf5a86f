"""Dequantize stored weights inside a kernel: `scheme/rounding.py::decode` in few instructions.

For 16-bit activations two neighbours along K are converted at once, in the 16-bit lanes of a word:

* Integers are written into the low mantissa bits of a float whose last mantissa bit has the value
  1 (128 in bf16, 1024 in fp16); that float is subtracted.
* The bits of small floats are moved to the sign, exponent and mantissa positions of the wider
  format. The result is the number (subnormals included) times a power of two, which a
  multiplication by `missing` corrects.

Both are exact, except that an e4m3 weight that is NaN becomes 480. For rows the GPU's own
conversion keeps NaN; with weights it took up to 1.2 times as long. e4m3 scales keep their sign.
Scales of rows keep NaN too, and all scales do on GPUs that convert e4m3 (see `converts_e4m3`).

If a tile has few rows and each step of K lies within one scale group, scales multiply the step's
product in float32. Otherwise they multiply the weights, rounded once.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl


class Format(NamedTuple):
    """How a weight and its scales are stored: constants of a kernel."""

    step: int
    """Distance in weight rows from one output column to the next."""
    up: int
    """Distance in weight rows from a gate row to its up row; 0 without a gate."""
    weight_rows: int
    """Weight rows per expert."""
    bits: int
    """Bits per number: 4, 6 or 8."""
    paired: bool
    """Whether an entry holds two neighbours along K: a byte two 4-bit numbers, a word two bytes."""
    exponent: int
    """Exponent bits of a float; 0: an integer."""
    keeps_nan: bool
    """Whether e4m3 numbers and scales that are NaN stay NaN on every GPU: in rows."""
    offset: int
    """The offset added to an integer when it is stored; 0: two's complement."""
    scale: str
    """The form of scales: ``float``, or one byte: ``e8m0``, ``e4m3``."""
    cols: int | None
    """Elements along K that share a scale; None: all."""
    in_tile: bool
    """Whether scales multiply the weights instead of a step's product."""
    rows: int
    """Weight rows that share a scale."""
    global_rows: int
    """Weight rows that share a global scale."""


@triton.constexpr_function
def missing(DTYPE, exponent):
    """Exponent-bias correction of small floats in DTYPE: ``2 ** (bias difference)``."""
    return 2.0 ** ((16 if tl.float16 == DTYPE else 128) - 2 ** (exponent - 1))


@triton.constexpr_function
def converts_e4m3():
    """Whether the GPU that kernels are being compiled for has conversions from e4m3."""
    return triton.knobs.runtime.interpret or tl.target_info.cuda_capability_geq(8, 9)


@triton.jit
def constant(VALUE: tl.constexpr, DTYPE: tl.constexpr):
    """A (1, 1) constant in DTYPE, made via float32: the interpreter has no bf16 constants."""
    return tl.full((1, 1), VALUE, tl.float32).to(DTYPE)


@triton.jit
def pairs(stored, FORMAT: tl.constexpr):
    """Two neighbours along K per int32: ``stored`` (K, N), or (K / 2, N) if packed, to (K / 2, N).

    Each 16-bit lane holds an integer in its low bits, the other bits 0; or a small float in its
    high bits, the other bits undefined.
    """
    LIFT: tl.constexpr = 16 - FORMAT.bits if FORMAT.exponent > 0 else 0
    if FORMAT.paired:
        APART: tl.constexpr = 4 if FORMAT.bits == 4 else 8  # bits from one number to the next
        ONES: tl.constexpr = (1 << FORMAT.bits) - 1
        both = stored.to(tl.int32)
        word = (both | (both << (16 - APART))) << LIFT
        if FORMAT.exponent == 0:
            word &= ONES * 0x00010001
    else:
        both = tl.reshape(stored, (stored.shape[0] // 2, 2, stored.shape[1]))
        even, odd = tl.split(tl.permute(both, (0, 2, 1)))
        word = (even.to(tl.int32) | (odd.to(tl.int32) << 16)) << LIFT
    return word


@triton.jit
def lanes(word, DTYPE: tl.constexpr):
    """Unpack the two 16-bit floats of each word to neighbours along K: (K / 2, N) to (K, N)."""
    low = word.to(tl.int16).to(DTYPE, bitcast=True)
    high = (word >> 16).to(tl.int16).to(DTYPE, bitcast=True)
    both = tl.permute(tl.join(low, high), (0, 2, 1))
    return tl.reshape(both, (2 * word.shape[0], word.shape[1]))


@triton.jit
def integers(stored, DTYPE: tl.constexpr, FORMAT: tl.constexpr):
    """Integers minus their offset as 16-bit floats, exactly."""
    OFFSET: tl.constexpr = 1 << (FORMAT.bits - 1)
    word = pairs(stored, FORMAT)
    if FORMAT.offset == 0:
        word ^= OFFSET * 0x00010001
    if tl.float16 == DTYPE:  # 1024 + integer
        value = lanes(word | 0x64006400, DTYPE) - constant(1024 + OFFSET, DTYPE)
    elif FORMAT.bits == 4:  # 128 + integer
        value = lanes(word | 0x43004300, DTYPE) - constant(128 + OFFSET, DTYPE)
    else:  # bf16 has seven mantissa bits: bit 7 decides whether 128 or 256 is subtracted
        value = lanes((word & 0x007F007F) | 0x43004300, DTYPE)
        value -= lanes((~word & 0x00800080) | 0x43004300, DTYPE)
    return value


@triton.jit
def floats(stored, DTYPE: tl.constexpr, FORMAT: tl.constexpr):
    """Small floats as 16-bit floats."""
    EXPONENT: tl.constexpr = 5 if tl.float16 == DTYPE else 8
    MAGNITUDE: tl.constexpr = (1 << (15 - EXPONENT + FORMAT.exponent)) - (
        1 << (16 - EXPONENT + FORMAT.exponent - FORMAT.bits)
    )
    word = pairs(stored, FORMAT)
    moved = (word >> (EXPONENT - FORMAT.exponent)) & (MAGNITUDE * 0x00010001)
    value = lanes((word & -0x7FFF8000) | moved, DTYPE)
    return value * constant(missing(DTYPE, FORMAT.exponent), DTYPE)


@triton.jit
def codes(stored, FORMAT: tl.constexpr):
    """The bits of each number as int32, (K, N)."""
    code = stored.to(tl.int32)
    if FORMAT.paired:
        APART: tl.constexpr = 4 if FORMAT.bits == 4 else 8
        low, high = code & ((1 << APART) - 1), code >> APART
        both = tl.permute(tl.join(low, high), (0, 2, 1))
        code = tl.reshape(both, (2 * stored.shape[0], stored.shape[1]))
    return code


@triton.jit
def wide(stored, FORMAT: tl.constexpr):
    """Integers minus their offset, or small floats, in float32."""
    code = codes(stored, FORMAT)
    if FORMAT.exponent == 0:
        if FORMAT.offset == 0:
            code = (code ^ 128) - 128  # sign-extend two's complement
        value = code.to(tl.float32) - FORMAT.offset
    else:
        SIGN: tl.constexpr = 1 << (FORMAT.bits - 1)
        magnitude = (code & (SIGN - 1)) << (24 + FORMAT.exponent - FORMAT.bits)
        value = (((code & SIGN) << (32 - FORMAT.bits)) | magnitude).to(tl.float32, bitcast=True)
        value *= missing(tl.float32, FORMAT.exponent)
    return value


@triton.jit
def numbers(stored, DTYPE: tl.constexpr, FORMAT: tl.constexpr):
    """The stored numbers, (K, N), in DTYPE, before zero points and scales."""
    if FORMAT.keeps_nan and FORMAT.exponent == 4:  # such rows need a GPU that converts them
        code = codes(stored, FORMAT).to(tl.int8)
        value = code.to(tl.float8e4nv, bitcast=True).to(DTYPE)
    elif tl.float32 == DTYPE:
        value = wide(stored, FORMAT)
    elif FORMAT.exponent == 0:
        value = integers(stored, DTYPE, FORMAT)
    else:
        value = floats(stored, DTYPE, FORMAT)
    return value


@triton.jit
def spread(groups, BLOCK_K: tl.constexpr):
    """Repeat one entry per group along K, (G, N), for every element of K: (BLOCK_K, N)."""
    GROUPS: tl.constexpr = groups.shape[0]
    COLS: tl.constexpr = groups.shape[1]
    shape: tl.constexpr = (GROUPS, BLOCK_K // GROUPS, COLS)
    return tl.reshape(tl.broadcast_to(tl.expand_dims(groups, 1), shape), (BLOCK_K, COLS))


@triton.jit
def load_groups(base, start, inside, K: tl.constexpr, BLOCK_K: tl.constexpr, FORMAT: tl.constexpr):
    """Load the entries (scales, zero points) of the groups that a step of K touches, (G, N).

    ``base`` points to the first entry of each weight row.
    """
    if FORMAT.cols is None:
        value = tl.load(base, mask=inside, other=0)[None, :]
    else:
        COUNT: tl.constexpr = max(1, BLOCK_K // FORMAT.cols)
        group = start // FORMAT.cols + tl.arange(0, COUNT)
        mask = (group < (K + FORMAT.cols - 1) // FORMAT.cols)[:, None] & inside[None, :]
        value = tl.load(base[None, :] + group[:, None], mask=mask, other=0)
    return value


@triton.jit
def e4m3_value(stored, KEEPS_NAN: tl.constexpr):
    """Bytes of e4m3 numbers in float32, whether the GPU converts them or not."""
    if converts_e4m3():
        value = stored.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        moved = stored.to(tl.int8, bitcast=True).to(tl.int32) << 20  # extends the sign
        value = (moved & -0x78100000).to(tl.float32, bitcast=True) * 2.0**120
        if KEEPS_NAN:
            value = tl.where(tl.abs(value) > 448, float("nan"), value)
    return value


@triton.jit
def scale_value(stored, FORMAT: tl.constexpr):
    """Scales in float32. An e8m0 code of 0 stands for 2**-127 and becomes 0."""
    if FORMAT.scale == "e8m0":
        value = (stored.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    elif FORMAT.scale == "e4m3":
        value = e4m3_value(stored, FORMAT.keeps_nan)
    else:
        value = stored.to(tl.float32)
    return value


@triton.jit
def plain_numbers(
    stored, zero_point, DTYPE: tl.constexpr, BLOCK_K: tl.constexpr, FORMAT: tl.constexpr
):
    """A tile of weights (BLOCK_K, N) in DTYPE, exactly, minus zero points (G, N); not scaled."""
    value = numbers(stored, DTYPE, FORMAT)
    if zero_point is not None:
        value -= spread(zero_point, BLOCK_K).to(DTYPE)
    return value


@triton.jit
def dequantize(
    stored, scale, zero_point, DTYPE: tl.constexpr, BLOCK_K: tl.constexpr, FORMAT: tl.constexpr
):
    """Dequantize a tile of weights (BLOCK_K, N) to DTYPE, times ``scale`` (G, N) if in_tile."""
    value = plain_numbers(stored, zero_point, DTYPE, BLOCK_K, FORMAT)
    if FORMAT.in_tile:
        # If DTYPE represents the scale exactly, a product in DTYPE is rounded once, as in float32.
        HOLDS: tl.constexpr = (
            scale.dtype == DTYPE
            or FORMAT.scale == "e4m3"
            or (FORMAT.scale == "e8m0" and tl.bfloat16 == DTYPE)
        )
        COMPUTE: tl.constexpr = DTYPE if HOLDS else tl.float32
        factor = spread(scale_value(scale, FORMAT).to(COMPUTE), BLOCK_K)
        value = (value.to(COMPUTE) * factor).to(DTYPE)
    return value
