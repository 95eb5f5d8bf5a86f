"""Numbers that are narrower than a byte, two numbers in a byte, and scales of one byte."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from moe_ops.scheme.values import Element


@lru_cache(maxsize=8)
def _magnitudes(element: Element) -> tuple[float, ...]:
    """What the codes of a small float without its sign stand for, in their order."""
    mantissa = element.bits - 1 - element.exponent
    bias, steps = 2 ** (element.exponent - 1) - 1, 2**mantissa
    subnormal = [m * 2.0 ** (1 - bias - mantissa) for m in range(steps)]
    normal = [
        (1 + m / steps) * 2.0 ** (e - bias)
        for e in range(1, 2**element.exponent)
        for m in range(steps)
    ]
    return (*subnormal, *normal)


def encode(value: Tensor, element: Element) -> Tensor:
    """Codes (sign, exponent, mantissa) of the nearest numbers, ties to the even code.

    The rule of the hardware's conversions, which also keep the sign of a zero.
    """
    grid = torch.tensor(_magnitudes(element), device=value.device)
    middle = (grid[1:] + grid[:-1]) / 2
    magnitude = value.abs()
    down = torch.bucketize(magnitude, middle)
    up = torch.bucketize(magnitude, middle, right=True)  # differs from `down` at ties
    code = torch.where(down % 2 == 0, down, up)
    return (code + (value.signbit() * len(grid))).to(element.storage)


def decode(codes: Tensor, element: Element) -> Tensor:
    """Codes as float32.

    A normal number's bits are moved to where float32 has them. (No table: it would be copied from
    the host, which a CUDA graph cannot record.)
    """
    mantissa = element.bits - 1 - element.exponent
    bias = 2 ** (element.exponent - 1) - 1
    magnitude = codes.int() & (2 ** (element.bits - 1) - 1)
    normal = ((magnitude << (23 - mantissa)) + ((127 - bias) << 23)).view(torch.float32)
    subnormal = magnitude.float() * 2.0 ** (1 - bias - mantissa)
    value = torch.where(magnitude < 2**mantissa, subnormal, normal)
    return torch.where(codes >= 2 ** (element.bits - 1), -value, value)


def pack(codes: Tensor, axis: int) -> Tensor:
    """4-bit codes two to a byte along ``axis``, the even index in the low nibble."""
    low, high = codes.unflatten(axis, (-1, 2)).unbind(axis + 1)
    return low | (high << 4)


def unpack(packed: Tensor, axis: int) -> Tensor:
    """The inverse of `pack`."""
    return torch.stack((packed & 15, packed >> 4), axis + 1).flatten(axis, axis + 1)


def e8m0_of(amax: Tensor, element: Element) -> Tensor:
    """The exponent s (uint8, for ``2**(s - 127)``) that groups of a small float share.

    That of the largest magnitude, rounded to the element's precision, less that of the element's
    own largest; on the bits of a float32, with no logarithm. 255, a NaN, where amax is not finite.
    """
    half = 1 << (22 - (element.bits - 1 - element.exponent))
    exponent = (amax.float().view(torch.int32) + half) >> 23
    return _e8m0(exponent - (math.frexp(element.largest)[1] - 1), amax)


def e8m0_above(scale: Tensor) -> Tensor:
    """The least power of two that is not below a float32 scale, as its exponent; 255 for a NaN."""
    return _e8m0((scale.view(torch.int32) + 0x7FFFFF) >> 23, scale)


def _e8m0(exponent: Tensor, of: Tensor) -> Tensor:
    return torch.where(of.isfinite(), exponent.clamp(0, 254), 255).to(torch.uint8)


def e8m0_value(scale: Tensor) -> Tensor:
    """``2**(s - 127)`` in float32; NaN for 255."""
    return scale.view(torch.float8_e8m0fnu).float()
