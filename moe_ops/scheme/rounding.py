"""The arithmetic of quantization, exact to the bit: one definition, in plain PyTorch.

References and the offline weight quantizer use these functions. Kernels reimplement them and are
tested to be bitwise equal. ``q = round(x / s)`` with an IEEE division, in float32. Elements of
fewer than 8 bits are in `formats.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops.scheme import formats
from moe_ops.scheme.values import Element, Quant

SMALLEST_AMAX = 1e-10
"""Lower bound of a group's largest magnitude, so that no scale is zero."""


def over(x: Tensor, number: float) -> Tensor:
    """``x / number`` by IEEE division; for a Python number CUDA multiplies by the reciprocal."""
    return x / torch.full((), number, dtype=x.dtype, device=x.device)


def scale_of(amax: Tensor, quant: Quant) -> Tensor:
    """The scale of groups with largest magnitude ``amax`` (float32): ``max(amax, 1e-10) / L``.

    ``pow2`` rounds the scale up to a power of two: adding ones in all mantissa bits carries into
    the exponent exactly if the mantissa is not zero. NaN stays NaN.
    """
    scale = over(amax.float().clamp(min=SMALLEST_AMAX), quant.element.largest)
    if quant.scale == "pow2":
        bits = scale.view(torch.int32)
        rounded = ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32)
        scale = torch.where(scale.isnan(), scale, rounded)
    return scale


def range_scale(
    low: Tensor, high: Tensor, quant: Quant, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Scales of groups in their stored form, and zero points if the quantization has them.

    Args:
        low: float32, the lowest number of each group, at most 0.
        high: float32, the highest number of each group, at least 0.
        quant: how the groups are quantized.
        dtype: dtype of scales whose form is ``input``.
    """
    amax = torch.maximum(-low, high)
    if quant.scale == "e8m0":
        if quant.element.exponent:
            return formats.e8m0_of(amax, quant.element), None
        return formats.e8m0_above(over(amax, quant.element.largest)), None
    if quant.scale == "e4m3":
        whole = not quant.element.exponent
        scale = signed_scale(low, high) if whole else over(amax, quant.element.largest)
        return scale.clamp(max=448.0).to(torch.float8_e4m3fn), None
    stored = dtype if quant.scale == "input" else torch.float32
    if quant.zero_point:
        steps = 2**quant.element.bits - 1
        scale = over((high - low).clamp(min=1e-5), steps).to(stored)
        zero_point = (-low / scale.float()).round().clamp(0, steps)
        return scale, torch.where(scale == 0, 0, zero_point).to(torch.uint8)
    if quant.element.name == "int4":
        return signed_scale(low, high).clamp(min=SMALLEST_AMAX / 7).to(stored), None
    return scale_of(amax, quant).to(stored), None


def signed_scale(low: Tensor, high: Tensor) -> Tensor:
    """The scale of int4, whose range is -8 to 7."""
    return torch.maximum(over(high, 7), over(-low, 8))


def scale_value(scale: Tensor) -> Tensor:
    """Stored scales as float32."""
    return formats.e8m0_value(scale) if scale.dtype == torch.uint8 else scale.float()


def encode_above(ratio: Tensor, zero_point: Tensor, element: Element) -> Tensor:
    """``round(x / s) + zero_point``, ties to even, saturated at the stored integer's range."""
    return (ratio.round() + zero_point).clamp(0, 2**element.bits - 1).to(element.storage)


def encode(ratio: Tensor, element: Element) -> Tensor:
    """Round ``x / s`` (float32) to stored values, one per entry.

    Floats: nearest, ties to even, saturated at the largest. 8-bit integers: nearest, ties away from
    zero, saturated at +-127. int4: nearest, ties to even, saturated at -8 and 7.
    """
    if element.bits == 4 and element.offset:
        return (ratio.round().clamp(-8, 7) + element.offset).to(element.storage)
    bounded = ratio.clamp(-element.largest, element.largest)
    if element.exponent:
        return formats.encode(bounded, element)
    if element.name == "fp8":
        return bounded.to(element.storage)
    whole = bounded.trunc()
    whole += torch.where((bounded - whole).abs() >= 0.5, bounded.sign(), 0.0)
    return (whole + element.offset).to(element.storage)


def stored_values(data: Tensor, element: Element) -> Tensor:
    """Stored values, one per entry, as float32."""
    if element.exponent:
        return formats.code_values(data, element)
    return data.float() - element.offset
