"""Offline quantization and dequantization of weights, in plain PyTorch on the weights' device."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops import checks
from moe_ops.scheme.formats import join_codes, split_codes
from moe_ops.scheme.named import Scheme, as_scheme
from moe_ops.scheme.packed import is_packed, unpack_weight
from moe_ops.scheme.rounding import (
    SMALLEST_AMAX,
    encode,
    encode_above,
    over,
    range_scale,
    scale_value,
    signed_scale,
    stored_values,
)
from moe_ops.scheme.values import FLOAT4_E2M1_MAX, FLOAT8_E4M3_MAX, WHOLE, Quant
from moe_ops.tensors import QTensor, TensorSpec


def quantize_weight(w: Tensor, scheme: str | Scheme) -> QTensor:
    """Quantize a weight to ``scheme``, with scales from the data of each group.

    The result is in the plain form; `pack_weight` converts it to the form that Hopper kernels read
    faster.

    Scales are rounded to their stored form first, and values are divided by the rounded scales; a
    group whose stored scale is 0 becomes zeros.

    * fp8, int8: ``s = max(amax, 1e-10) / L``.
    * int4: ``s = max(max / 7, -min / 8)``. With zero points: ``s = max(max - min, 1e-5) / 15``,
      ``zp = round(-min / s)``, where the range always includes 0.
    * mxfp4, mxfp6: a power of two, from the exponent bits of amax rounded to the element's
      precision.
    * nvfp4: ``g = 448 * 6 / amax`` per expert, ``s = e4m3(g * amax / 6)`` per block,
      ``q = e2m1(x * g / s)``; ``global_scale`` is ``1 / g``.
    * int4 with fp8 activations (w4a8): ``c = 8 / 448 * max(max / 7, -min / 8)`` per row, which is
      the ``global_scale``; then ``s = e4m3(max(max / 7, -min / 8) / c)`` per group, at most 56, so
      that ``q * s`` stays in the range of e4m3; ``q = round(x / c / s)``.

    Args:
        w: ``(E, N, K)`` bf16, fp16 or fp32.
        scheme: a name, a key or a `Scheme`.

    Returns:
        A `QTensor`. ``data`` ``(E, N, K)``, or ``(E, N, K / 2)`` uint8 for 4-bit elements, even k
        in the low nibble. Scales as `Quant.weight_scale_shape` says. Zero points ``(E, N, G)``
        uint8, packed to ``(E, ceil(N / 2), G)`` with even n in the low nibble for 4-bit elements.
        A global scale is ``(E,)``, or ``(E, N)`` for int4 with fp8 activations.
        Unquantized: ``data`` is ``w``.

    Raises:
        TypeError, ValueError: not a 3-D float weight; a size of 0; an odd K with 4-bit elements;
            an unknown scheme.
        NotImplementedError: a `Scheme` that operators cannot compute.

    Source:
        OCP MX v1.0 elements; vLLM ``quantize_weights`` (int4), whose zero points miss groups
        of one sign.
    """
    checks.tensor("w", w, 3, checks.FLOATS)
    quant = as_scheme(scheme).weight
    if 0 in w.shape:
        raise ValueError(f"w must have no size of 0, got shape {tuple(w.shape)}")
    if quant is None:
        return QTensor(w)
    (_, n, k), per_byte = w.shape, quant.element.values_per_byte
    if k % per_byte:
        raise ValueError(f"w.shape[2] must be even for 4-bit elements, got {k}")
    x, global_scale = w.float(), None
    if quant.channel_scale:
        low, high = x.amin(2).clamp(max=0), x.amax(2).clamp(min=0)
        global_scale = over(signed_scale(low, high).clamp(min=SMALLEST_AMAX), FLOAT8_E4M3_MAX) * 8
        x = x / global_scale[:, :, None]
    elif quant.global_scale:
        amax = x.abs().amax((1, 2), keepdim=True).clamp(min=SMALLEST_AMAX)
        factor = FLOAT8_E4M3_MAX * FLOAT4_E2M1_MAX / amax
        x, global_scale = x * factor, 1 / factor.flatten()  # not a view: Dynamo guards on views
    low, high = _group_range(x, quant)
    scale, zero_point = range_scale(low, high, quant, w.dtype)
    divisor = spread_scale(scale_value(scale), quant, n, k)
    ratio = torch.where(divisor == 0, 0, x / divisor)
    if zero_point is None:
        codes = encode(ratio, quant.element)
    else:
        codes = encode_above(ratio, spread_scale(zero_point, quant, n, k), quant.element)
        zero_point = torch.nn.functional.pad(zero_point, (0, 0, 0, n % per_byte))
        zero_point = join_codes(zero_point, 1, quant.element)
    return QTensor(join_codes(codes, 2, quant.element), scale, zero_point, global_scale)


def dequantize_weight(
    q: QTensor, scheme: str | Scheme, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Dequantize a weight to ``(E, N, K)``, computed in float32.

    ``(q - zero_point) * scale * global_scale``, in that order.

    Args:
        q: as `quantize_weight` or `pack_weight` returns it; a per-tensor or per-channel scale may
            also be ``(E,)``, ``(E, 2)`` (one for the first and one for the second half of the rows)
            or ``(E, N)``, and a global scale ``(E, 2)``.
        scheme: a name, a key or a `Scheme`.
        dtype: dtype of the result, rounded once.

    Returns:
        ``(E, N, K)`` in ``dtype``.

    Raises:
        TypeError: ``q`` is not a `QTensor`, or ``dtype`` not a dtype of floats.
        ValueError: ``q`` lacks a scale, zero point or global scale of the scheme, or has one of
            another size or device; an unknown name.
        NotImplementedError: a `Scheme` that operators cannot compute.
    """
    scheme = as_scheme(scheme)
    quant = scheme.weight
    if not isinstance(q, QTensor):
        raise TypeError(f"q must be a QTensor, got {type(q).__name__}")
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"dtype must be a torch.dtype of floats, got {dtype!r}")
    if quant is None:
        return q.data.to(dtype)
    if is_packed(q.data):
        q = unpack_weight(q, scheme)
    checks.tensor("q.data", q.data, 3, (quant.dtype,))
    data = stored_values(split_codes(q.data, 2, quant.element), quant.element)
    experts, n, k = data.shape
    if quant.zero_point:
        shape = quant.zero_point_shape(experts, n, k)
        zero_point = zero_point_value(_field(q, "zero_point", scheme, shape), quant, n)
        data -= spread_scale(zero_point, quant, n, k)
    groups = quant.weight_scale_shape(experts, n, k)
    data *= spread_scale(scale_value(_field(q, "scale", scheme, groups)), quant, n, k)
    if quant.global_scale:
        data *= halves(_field(q, "global_scale", scheme).float(), n)
    return data.to(dtype)


def dequantize_rows(q: Tensor, scale: Tensor, quant: Quant) -> Tensor:
    """Dequantize activations ``(.., R, K)`` to float32, without their global scale.

    Args:
        q: activations as ``quant`` stores them.
        scale: ``(.., R, groups)``, or a shape that broadcasts to it.
        quant: how the activations are quantized.

    Returns:
        float32 ``(.., R, K)``.
    """
    last = q.dim() - 1
    value = stored_values(split_codes(q, last, quant.element), quant.element)
    scale = scale_value(scale)
    if quant.local:
        scale = scale.repeat_interleave(quant.group.cols, last)[..., : value.shape[last]]
    return value * scale


def _field(q: QTensor, name: str, scheme: Scheme, shape: tuple[int, ...] = ()) -> Tensor:
    """Return a field that the scheme needs; ``shape`` is the one that `quantize_weight` makes.

    If groups span K, an expert may also have one number, or one for each of equal ranges of rows.
    """
    value, name = getattr(q, name), f"q.{name}"
    if value is None:
        raise ValueError(f"{name} must be a Tensor for scheme {scheme.name}, got None")
    checks.tensor(name, value, None, None)
    checks.same_device(name, value, "q.data", q.data)
    experts, n = q.data.shape[:2]
    if tuple(value.shape) == shape:
        return value
    if len(shape) == 3 and shape[2] > 1:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(value.shape)}")
    if value.shape[:1] != (experts,) or n % max(1, value[0].numel()):
        raise ValueError(
            f"{name} must have one number for each of the {experts} experts, or more that divide "
            f"its {n} rows, got shape {tuple(value.shape)}"
        )
    return value


def spread_scale(scale: Tensor, quant: Quant, n: int, k: int) -> Tensor:
    """Expand a weight's scales so that they broadcast to ``(E, N, K)``."""
    rows, cols = quant.group
    if cols == WHOLE:
        return halves(scale, n)
    if rows != 1:
        scale = scale.repeat_interleave(rows, 1)[:, :n]
    return scale.repeat_interleave(cols, 2)[:, :, :k]


def halves(scale: Tensor, n: int) -> Tensor:
    """Scales that span K as ``(E, N, 1)``, from one per tensor, per half or per row."""
    scale = scale.reshape(len(scale), -1, 1)
    return scale.repeat_interleave(n // scale.shape[1], 1)


def rows_per_scale(scale: Tensor | TensorSpec, quant: Quant, n: int) -> int:
    """Number of a weight's ``n`` rows that share a scale: all, half (w1), one or a block's rows."""
    if quant.group.cols == WHOLE:
        return n // (scale.numel() // scale.shape[0])
    return quant.group.rows


def zero_point_value(zero_point: Tensor, quant: Quant, n: int) -> Tensor:
    """Zero points ``(E, N, G)`` in float32, to be subtracted from stored values."""
    zero_point = split_codes(zero_point, 1, quant.element)[:, :n]
    return zero_point.float() - quant.element.offset


def _group_range(x: Tensor, quant: Quant) -> tuple[Tensor, Tensor]:
    """The lowest and highest number of each group, zero included, in the shape of the scales."""
    experts, n, k = x.shape
    rows = n if quant.group.rows == WHOLE else quant.group.rows
    cols = k if quant.group.cols == WHOLE else quant.group.cols
    padded = torch.nn.functional.pad(x, (0, -k % cols, 0, -n % rows))
    tiles = padded.view(experts, -(-n // rows), rows, -(-k // cols), cols)
    low, high = tiles.amin((2, 4)).clamp(max=0), tiles.amax((2, 4)).clamp(min=0)
    shape = quant.weight_scale_shape(experts, n, k)
    return low.view(shape), high.view(shape)
