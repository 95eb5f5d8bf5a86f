"""MXFP4 weights as fp8 weights with one scale per row, where that is exact.

An e2m1 number times ``2**e`` is an e4m3 number for e in -8..6. So a row of an MXFP4 weight whose
groups have scales that span at most `BINADES` binades is a row of e4m3 numbers times one power of
two: no bit is lost, and kernels that multiply stored fp8 numbers serve it. The weight takes twice
the memory. Scales of groups of zeros mean nothing, and do not count.

Such scales cannot be told from the fp8 row, nor can scales of groups without large numbers. So a
caller that converts a weight back keeps the e8m0 scales too.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from moe_ops import checks
from moe_ops.scheme import formats
from moe_ops.scheme.named import ROW, Scheme, as_scheme, scheme_of
from moe_ops.scheme.values import ELEMENTS, Quant
from moe_ops.tensors import QTensor

FP4, FP8 = ELEMENTS["fp4"], ELEMENTS["fp8"]
LOWEST, HIGHEST = -8, 6
"""Exponents with which every e2m1 number is an e4m3 number."""
BINADES = HIGHEST - LOWEST + 1
"""Largest number of different exponents of an exact row."""
BIAS, NAN = 127, 255
"""The exponent bias of e8m0 and of float32, and the e8m0 code that is no number."""
EXPONENT_BITS = 0xFF << 23
"""The exponent of a float32 number: all that a power of two has."""
SMALLEST = -126
"""Smallest exponent of a row's scale: of normal float32 numbers."""
NO_CODE = 16
"""Mark of bytes that stand for no 4-bit number."""


class ExactRows(NamedTuple):
    """How many rows of a layer's weights are exact as fp8."""

    scheme: Scheme
    """The scheme of the MXFP4 weights."""
    exact: int
    rows: int
    """Rows of both weights of all experts, of this rank."""


@lru_cache(maxsize=256)
def exact_fp8_scheme(scheme: Scheme) -> Scheme | None:
    """The scheme of the same activations and of weights that `as_fp8` returns.

    None unless the weights are e2m1 in groups with e8m0 scales, and the activations fp8 in groups
    that span K.

    Returns:
        The scheme, or None if the weights have no such form.
    """
    weight, activation = scheme.weight, scheme.activation
    if weight is None or activation is None:
        return None
    if weight.element != FP4 or weight.scale != "e8m0" or not weight.local:
        return None
    if activation.element != FP8 or activation.local:
        return None
    return scheme_of(activation, Quant(FP8, ROW))


def exact_rows(q: QTensor, scheme: str | Scheme) -> Tensor:
    """Which rows of a weight are exact as fp8: bool ``(E, N)``.

    A row is, if the largest exponent of its groups is at most ``BINADES - 1`` above the smallest.
    Groups of zeros do not count. A row with a scale that is NaN is not exact.

    Args:
        q: as `quantize_weight` returns it.
        scheme: a name, a key or a `Scheme`.

    Returns:
        bool ``(E, N)``: True where a row is exact.

    Raises:
        TypeError, ValueError: data or scales of another dtype or shape.
        NotImplementedError: a scheme without an fp8 form, see `exact_fp8_scheme`.
    """
    quant, scale = _checked_mxfp4(q, scheme)
    return torch.stack([_range(*pair, quant)[2] for pair in zip(q.data, scale, strict=True)])


def as_fp8(q: QTensor, scheme: str | Scheme) -> QTensor:
    """Convert a weight to fp8 with a scale per row, bit for bit: for `exact_fp8_scheme`.

    Besides input and output, memory is needed for one expert only.

    Args:
        q: as `quantize_weight` returns it.
        scheme: a name, a key or a `Scheme`.

    Returns:
        A `QTensor`: ``data`` float8_e4m3fn ``(E, N, K)``; ``scale`` float32 ``(E, N, 1)``, powers
        of two.

    Raises:
        ValueError: a row that is not exact.
        TypeError, ValueError, NotImplementedError: as `exact_rows`.
    """
    quant, scale = _checked_mxfp4(q, scheme)
    experts, n, width = q.data.shape
    data = q.data.new_empty((experts, n, 2 * width))
    row_scale = q.data.new_empty((experts, n, 1), dtype=torch.float32)
    table = _fp8_bytes(q.data.device).view(torch.int16).flatten()  # of two numbers
    for expert in range(experts):
        low, high, exact = _range(q.data[expert], scale[expert], quant)
        if not bool(exact.all()):
            row = int((~exact).nonzero()[0])
            raise ValueError(
                f"q.scale must have exponents that span at most {BINADES} binades in each row (and "
                f"no NaN), got {int(low[row]) - BIAS}..{int(high[row]) - BIAS} in row {row} of "
                f"expert {expert}"
            )
        exponent = (high - BIAS - HIGHEST).clamp(min=SMALLEST)
        place = _table_rows(scale[expert], exponent, width, quant.group.cols // 2)
        at = (place * 256 + q.data[expert]).flatten()
        data[expert].view(torch.int16).copy_(table.index_select(0, at).view(n, width))
        row_scale[expert, :, 0] = ((exponent + BIAS) << 23).view(torch.float32)
    return QTensor(data.view(torch.float8_e4m3fn), row_scale)


def from_fp8(q: QTensor, exponents: Tensor, scheme: str | Scheme) -> QTensor:
    """Convert fp8 back to MXFP4, bit for bit: the inverse of `as_fp8`.

    Args:
        q: as `as_fp8` returns it.
        exponents: the scales that `as_fp8` was given, uint8 ``(E, N, ceil(K / cols))``.
        scheme: the scheme that `as_fp8` was given.

    Returns:
        The weight as `quantize_weight` returns it.

    Raises:
        ValueError: scales that are no powers of two; fp8 numbers that are not e2m1 numbers times
            the powers of two of their groups.
        TypeError, ValueError, NotImplementedError: as `exact_rows`.
    """
    quant = _quant_of(scheme)
    checks.tensor("q.data", q.data, 3, (torch.float8_e4m3fn,))
    experts, n, k = q.data.shape
    scale = _shaped("q.scale", q.scale, torch.float32, (experts, n, 1)).contiguous()
    is_power = (scale.view(torch.int32) & ~EXPONENT_BITS) == 0
    if not bool(is_power.all()):
        expert, row, _ = (~is_power).nonzero()[0].tolist()
        raise ValueError(
            "q.scale must hold powers of two (as as_fp8 returns them), got "
            f"{scale[expert, row, 0].item()} in row {row} of expert {expert}"
        )
    shape = quant.weight_scale_shape(experts, n, k)
    exponents = _shaped("exponents", exponents, torch.uint8, shape)
    data = exponents.new_empty((experts, n, k // 2))
    table = _codes(q.data.device).flatten()
    for expert in range(experts):
        exponent = (scale[expert, :, 0].view(torch.int32) >> 23) - BIAS
        place = _table_rows(exponents[expert], exponent, k, quant.group.cols)
        at = (place * 256 + q.data[expert].view(torch.uint8)).flatten()
        codes = table.index_select(0, at).view(n, k)
        if bool((codes == NO_CODE).any()):
            raise ValueError(
                "q.data must hold e2m1 numbers times the powers of two of their groups (as as_fp8 "
                f"returns them), got others in expert {expert}"
            )
        data[expert] = formats.join_nibbles(codes, 1)
    return QTensor(data, exponents)


def _quant_of(scheme: str | Scheme) -> Quant:
    scheme = as_scheme(scheme)
    quant = scheme.weight
    if quant is None or exact_fp8_scheme(scheme) is None:
        raise NotImplementedError(
            "scheme must have fp8 activations in groups that span K and e2m1 weights with e8m0 "
            f"scales, got {scheme.name}"
        )
    return quant


def _checked_mxfp4(q: QTensor, scheme: str | Scheme) -> tuple[Quant, Tensor]:
    """How an MXFP4 weight is quantized, and its scales."""
    if not isinstance(q, QTensor):
        raise TypeError(f"q must be a QTensor, got {type(q).__name__}")
    quant = _quant_of(scheme)
    checks.tensor("q.data", q.data, 3, (FP4.storage,))
    experts, n, width = q.data.shape
    shape = quant.weight_scale_shape(experts, n, 2 * width)
    return quant, _shaped("q.scale", q.scale, torch.uint8, shape)


def _shaped(name: str, x: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    checks.tensor(name, x, 3, (dtype,))
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(x.shape)}")
    return x


def _range(data: Tensor, scale: Tensor, quant: Quant) -> tuple[Tensor, Tensor, Tensor]:
    """The smallest and the largest e8m0 scale of one expert's rows, and which rows are exact."""
    each = quant.group.cols // 2
    magnitudes = pad(data & 0x77, (0, -data.shape[1] % each))
    used = (magnitudes.view(len(data), -1, each) != 0).any(2)
    codes = scale.int()
    low = torch.where(used, codes, NAN).amin(1)
    high = torch.where(used, codes, 0).amax(1)
    return low, high, (high - low < BINADES) & (scale != NAN).all(1)


def _table_rows(scale: Tensor, exponent: Tensor, width: int, each: int) -> Tensor:
    """Rows of the tables, ``(N, width)``, for ``each`` entries a group.

    Args:
        scale: e8m0 scales of one expert's groups.
        exponent: of the scale of each row.
        width: entries of a row.
        each: entries of a group.
    """
    above = scale.int() - BIAS - exponent[:, None]
    places = above.clamp(LOWEST, HIGHEST) - LOWEST  # outside lie groups of zeros
    return places.repeat_interleave(each, 1)[:, :width]


def _fp8_bytes(device: torch.device) -> Tensor:
    """The e4m3 bytes of both numbers of a byte, ``(BINADES, 256, 2)``, by exponent."""
    pairs = torch.arange(256, dtype=torch.uint8, device=device)[:, None]
    return _scaled_codes(formats.split_nibbles(pairs, 1), device)


def _codes(device: torch.device) -> Tensor:
    """The e2m1 codes of e4m3 bytes, ``(BINADES, 256)``, by exponent; `NO_CODE` if there is none."""
    codes = torch.arange(16, dtype=torch.uint8, device=device)
    table = torch.full((BINADES, 256), NO_CODE, dtype=torch.uint8, device=device)
    return table.scatter_(1, _scaled_codes(codes, device).long(), codes.expand(BINADES, -1))


def _scaled_codes(codes: Tensor, device: torch.device) -> Tensor:
    """The e4m3 bytes of e2m1 codes times ``2**e``, along a new first axis for e."""
    powers = torch.arange(LOWEST, HIGHEST + 1, device=device).float().exp2()
    values = powers.view(-1, *[1] * codes.dim()) * formats.code_values(codes, FP4)
    return values.to(torch.float8_e4m3fn).view(torch.uint8)
