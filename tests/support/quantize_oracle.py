"""An oracle of quantization: computed number by number from the definitions."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import strategies as st

from moe_ops.scheme import SCHEMES, WHOLE, Group, Quant
from moe_ops.scheme.values import ELEMENTS

EIGHT_BIT = ("fp8", "int8")
QUANTS = tuple(
    dict.fromkeys(
        [
            *(
                s.activation
                for s in SCHEMES.values()
                if s.activation and s.activation.element.name in EIGHT_BIT
                if not s.activation.static and s.activation.scale in ("float32", "pow2")
            ),
            *(Quant(ELEMENTS[e], Group(1, cols)) for e in EIGHT_BIT for cols in (16, 32, 64)),
            Quant(ELEMENTS["int8"], Group(1, 32), "pow2"),
            Quant(ELEMENTS["fp8"], Group(1, WHOLE), "pow2"),
        ]
    )
)
"""Every way to quantize activations to 8 bits with float32 scales from the data."""
quants = st.sampled_from(QUANTS)

FP8_VALUES = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()
"""Every magnitude of e4m3, in order; the even ones end in a zero bit."""


def nearest_fp8(ratio: np.ndarray) -> np.ndarray:
    """The nearest of the 253 values, ties to even, saturated at the largest."""
    size = np.minimum(np.abs(ratio), 448.0)
    above = np.clip(np.searchsorted(FP8_VALUES, size), 1, 126)
    below = above - 1
    up, down = FP8_VALUES[above] - size, size - FP8_VALUES[below]
    pick = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    return np.copysign(FP8_VALUES[pick], ratio)


def nearest_int8(ratio: np.ndarray) -> np.ndarray:
    """The nearest integer, ties away from zero."""
    return np.copysign(np.floor(np.minimum(np.abs(ratio), 127.0) + 0.5), ratio)


def scale_of(amax: np.float32, quant: Quant) -> np.float32:
    """``max(amax, 1e-10) / L`` in float32, for ``pow2`` rounded up to a power of two."""
    scale = np.float32(max(amax, np.float32(1e-10))) / np.float32(quant.element.largest)
    if quant.scale == "pow2":
        mantissa, exponent = math.frexp(scale)
        scale = np.float32(2.0 ** (exponent - 1 if mantissa == 0.5 else exponent))
    return scale


def quantize(rows: torch.Tensor, quant: Quant, given: float | None = None):
    """Quantize float rows ``(R, K)`` group by group; returns values (float32) and scales."""
    x = rows.float().cpu().numpy()
    count, width = x.shape
    cols = width if quant.group.cols == WHOLE else quant.group.cols
    height = max(count, 1) if quant.per_tensor else 1
    groups = [slice(c, c + cols) for c in range(0, width, cols)]
    values = np.zeros_like(x)
    scales = np.zeros((1 if quant.per_tensor else count, len(groups)), np.float32)
    nearest = nearest_fp8 if quant.element.name == "fp8" else nearest_int8
    for i in range(len(scales)):
        for j, group in enumerate(groups):
            piece = x[i * height : (i + 1) * height, group]
            scale = scale_of(np.abs(piece).max(initial=0), quant)
            scale = scale if given is None else np.float32(given)
            scales[i, j] = scale
            values[i * height : (i + 1) * height, group] = nearest(
                (piece / scale).astype(np.float64)
            )
    return torch.from_numpy(values), torch.from_numpy(
        scales.reshape(quant.row_scale_shape(*x.shape))
    )


def random_rows(seed: int, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of very different magnitudes, with zeros, whole groups of zeros, and ties."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=g)
    x *= 2.0 ** torch.randint(-12, 12, (rows, 1), generator=g)
    x[torch.rand(rows, width, generator=g) < 0.1] = 0
    x[:, width // 2 : width // 2 + 32] = 0
    whole = torch.randint(-254, 255, (rows, width), generator=g) / 2
    x[1::4] = whole[1::4]  # with an amax of 127 these are ties
    x[1::4, :1] = 127
    x[2::7] = 0
    return x.to(dtype)


def assert_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert equal shapes, dtypes, strides and bytes; any two NaNs are equal."""
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    assert actual.is_contiguous() and expected.is_contiguous()
    actual, expected = actual.cpu(), expected.cpu()
    if actual.dtype.is_floating_point:
        either = (actual.float() == expected.float()) | (actual.isnan() & expected.isnan())
        sign = torch.signbit(actual.float()) == torch.signbit(expected.float())
        assert (either & (sign | actual.isnan())).all()
    else:
        assert torch.equal(actual, expected)


def to(device: str, *values):
    """The values with tensors moved to the device."""
    return [v.to(device) if torch.is_tensor(v) else v for v in values]
