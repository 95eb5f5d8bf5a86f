"""Elements narrower than a byte, two of them in a byte, and one-byte (e8m0) scales."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from moe_ops.scheme.values import Element


@lru_cache(maxsize=8)
def _magnitudes(element: Element) -> tuple[float, ...]:
    """The values of a small float's codes without sign, in the order of the codes."""
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

    Rounds as the hardware's conversions do, and like them keeps the sign of a zero.
    """
    grid = torch.tensor(_magnitudes(element), dtype=torch.float32, device=value.device)
    middle = (grid[1:] + grid[:-1]) / 2
    magnitude = value.abs()
    down = torch.bucketize(magnitude, middle, out_int32=True)
    up = torch.bucketize(magnitude, middle, right=True, out_int32=True)  # differs at ties
    code = torch.where(down % 2 == 0, down, up)
    return (code + (value.signbit() * len(grid))).to(element.storage)


def code_values(codes: Tensor, element: Element) -> Tensor:
    """The values of codes, as float32.

    The bits of a normal number are shifted to their float32 positions. (A lookup table would be
    copied from the host, which a CUDA graph cannot capture.)
    """
    mantissa = element.bits - 1 - element.exponent
    bias = 2 ** (element.exponent - 1) - 1
    magnitude = codes.int() & (2 ** (element.bits - 1) - 1)
    normal = ((magnitude << (23 - mantissa)) + ((127 - bias) << 23)).view(torch.float32)
    subnormal = magnitude.float() * 2.0 ** (1 - bias - mantissa)
    value = torch.where(magnitude < 2**mantissa, subnormal, normal)
    return torch.where(codes >= 2 ** (element.bits - 1), -value, value)


def join_nibbles(codes: Tensor, axis: int) -> Tensor:
    """Store 4-bit codes two to a byte along ``axis``, the even index in the low nibble."""
    low, high = codes.unflatten(axis, (-1, 2)).unbind(axis + 1)
    return low | (high << 4)


def split_nibbles(stored: Tensor, axis: int) -> Tensor:
    """The inverse of `join_nibbles`."""
    return torch.stack((stored & 15, stored >> 4), axis + 1).flatten(axis, axis + 1)


def join_codes(codes: Tensor, axis: int, element: Element) -> Tensor:
    """The bytes of codes, one per entry: `join_nibbles` if two of them share a byte."""
    return codes if element.values_per_byte == 1 else join_nibbles(codes, axis)


def split_codes(stored: Tensor, axis: int, element: Element) -> Tensor:
    """The inverse of `join_codes`."""
    return stored if element.values_per_byte == 1 else split_nibbles(stored, axis)


def e8m0_of(amax: Tensor, element: Element) -> Tensor:
    """The e8m0 scale s (uint8, for ``2**(s - 127)``) of groups of a small float.

    The exponent of ``amax``, rounded to the element's precision, minus the exponent of the
    element's largest number; computed on float32 bits, without a logarithm. 255 (NaN) if ``amax``
    is not finite.
    """
    half = 1 << (22 - (element.bits - 1 - element.exponent))
    exponent = (amax.float().view(torch.int32) + half) >> 23
    return _e8m0(exponent - (math.frexp(element.largest)[1] - 1), amax)


def e8m0_above(scale: Tensor) -> Tensor:
    """A float32 scale rounded up to a power of two, as an e8m0 exponent; 255 if not finite."""
    return _e8m0((scale.view(torch.int32) + 0x7FFFFF) >> 23, scale)


def _e8m0(exponent: Tensor, of: Tensor) -> Tensor:
    return torch.where(of.isfinite(), exponent.clamp(0, 254), 255).to(torch.uint8)


def e8m0_value(scale: Tensor) -> Tensor:
    """``2**(s - 127)`` in float32; NaN for 255."""
    return scale.view(torch.float8_e8m0fnu).float()
