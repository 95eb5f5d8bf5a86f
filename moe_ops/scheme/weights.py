"""Weights into a scheme and back, offline: plain PyTorch on whatever device they are on."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops import checks
from moe_ops.scheme.rounding import decode, encode, scale_of
from moe_ops.scheme.values import WHOLE, Quant, Scheme, get_scheme
from moe_ops.tensors import QTensor


def quantize_weight(w: Tensor, scheme: str | Scheme) -> QTensor:
    """A weight as ``scheme`` stores it, every scale from the data of its group.

    Args:
        w: ``(E, N, K)`` bf16, fp16 or fp32.
        scheme: a name or value.

    Returns:
        A `QTensor`; ``data`` ``(E, N, K)`` for 8-bit elements, the scale as
        `Quant.weight_scale_shape` says, float32. Unquantized: ``data`` is ``w``.

    Raises:
        TypeError, ValueError: not a 3-D float weight; an unknown scheme.
    """
    checks.tensor("w", w, 3, checks.FLOATS)
    quant = as_scheme(scheme).weight
    if quant is None:
        return QTensor(w)
    scale = scale_of(_group_amax(w.float().abs(), quant), quant)
    ratio = w.float() / spread(scale, quant, w.shape[1], w.shape[2])
    return QTensor(encode(ratio, quant.element), scale)


def dequantize_weight(
    q: QTensor, scheme: str | Scheme, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The numbers that a quantized weight stands for: ``(E, N, K)``, product in float32.

    Args:
        q: as `quantize_weight` returns it; a per-tensor scale may also be ``(E, 2)``, one for the
            first and one for the second half of the rows, and a scale of channels ``(E, N)``.
        scheme: a name or value.
        dtype: of the result, rounded once.
    """
    quant = as_scheme(scheme).weight
    if quant is None:
        return q.data.to(dtype)
    data = decode(q.data, quant.element)
    if q.scale is None:
        raise ValueError(f"q.scale must be a Tensor for scheme {as_scheme(scheme).name}, got None")
    return (data * spread(q.scale.float(), quant, data.shape[1], data.shape[2])).to(dtype)


def as_scheme(scheme: str | Scheme) -> Scheme:
    """The value behind a name; a value stays itself."""
    return get_scheme(scheme) if isinstance(scheme, str) else scheme


def spread(scale: Tensor, quant: Quant, n: int, k: int) -> Tensor:
    """A weight's scales, broadcastable to ``(E, N, K)``."""
    if quant.per_tensor:
        scale = scale.view(len(scale), -1, 1)
        return scale.repeat_interleave(n // scale.shape[1], 1)
    rows, cols = quant.group
    scale = scale.view(*scale.shape[:2], -1)
    if rows != 1:
        scale = scale.repeat_interleave(rows, 1)[:, :n]
    if cols != WHOLE:
        scale = scale.repeat_interleave(cols, 2)[:, :, :k]
    return scale


def rows_per_scale(scale: Tensor, quant: Quant, n: int) -> int:
    """How many of a weight's ``n`` rows share a scale: all, a half (w1), one or a block's."""
    if quant.per_tensor:
        return n // (scale.numel() // scale.shape[0])
    return n if quant.group.rows == WHOLE else quant.group.rows


def _group_amax(magnitude: Tensor, quant: Quant) -> Tensor:
    """The largest of each group, as `Quant.weight_scale_shape` says."""
    experts, n, k = magnitude.shape
    rows = n if quant.group.rows == WHOLE else quant.group.rows
    cols = k if quant.group.cols == WHOLE else quant.group.cols
    padded = torch.nn.functional.pad(magnitude, (0, -k % cols, 0, -n % rows))
    tiles = padded.view(experts, -(-n // rows), rows, -(-k // cols), cols)
    return tiles.amax((2, 4)).view(quant.weight_scale_shape(experts, n, k))
