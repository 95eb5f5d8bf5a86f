"""The arithmetic of quantization, to the bit: one definition, in plain PyTorch.

References and the offline quantizer of weights use these functions; kernels repeat them and are
compared with them bit by bit. ``q = round(x / s)`` with a true division, in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops.scheme.values import Element, Quant

SMALLEST_AMAX = 1e-10
"""Groups of zeros get this as their largest magnitude, so that no scale is zero."""


def scale_of(amax: Tensor, quant: Quant) -> Tensor:
    """The scale of groups with largest magnitude ``amax`` (float32): ``max(amax, 1e-10) / L``.

    ``pow2`` rounds it up to a power of two by its bits: adding all ones below the exponent carries
    into the exponent exactly when the mantissa is not zero. A NaN stays one.
    """
    scale = amax.float().clamp(min=SMALLEST_AMAX) / quant.element.largest
    if quant.scale == "pow2":
        bits = scale.view(torch.int32)
        rounded = ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32)
        scale = torch.where(scale.isnan(), scale, rounded)
    return scale


def encode(ratio: Tensor, element: Element) -> Tensor:
    """``x / s`` (float32) as stored values.

    fp8: nearest, ties to even, saturated at 448. int8: nearest, ties away from zero, saturated at
    127.
    """
    bounded = ratio.clamp(-element.largest, element.largest)
    if element.name == "fp8":
        return bounded.to(element.storage)
    whole = bounded.trunc()
    return (whole + torch.where((bounded - whole).abs() >= 0.5, bounded.sign(), 0.0)).to(
        element.storage
    )


def decode(data: Tensor, element: Element) -> Tensor:
    """Stored values as float32."""
    return data.float()
