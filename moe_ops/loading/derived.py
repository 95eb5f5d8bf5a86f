"""Tensors that are derived from a checkpoint's: quantized weights, e4m3 scales."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from moe_ops import checks
from moe_ops.scheme import FLOAT8_E4M3_MAX, Quant, Scheme, quantize_weight
from moe_ops.scheme.rounding import SMALLEST_AMAX, over

FLOATS = (*checks.FLOATS, torch.float64)
"""Dtypes of weights and scales that are not quantized."""


def quantized_parts(
    projections: dict[str, Tensor], scheme: Scheme, interleaved: bool
) -> Iterator[tuple[str, str, Tensor]]:
    """Quantize plain projections ``(N, K)`` of one expert, into the tensors of a checkpoint.

    Gate and up are quantized separately. They are quantized together if their rows alternate and
    all rows share a scale.

    Args:
        projections: the projections by shard, all in the layer's dtype.
        scheme: the layer's scheme.
        interleaved: whether gate and up rows alternate in the layer.

    Yields:
        Shard, kind, and the tensor without an axis for experts.
    """
    quant = scheme.weight
    shares = quant is not None and (quant.per_tensor or "global_scale" in quant.parts)
    if not (interleaved and shares and len(projections) == 2):
        for shard, w in projections.items():
            for kind, x in _fields(w, scheme):
                yield shard, kind, x
        return
    for kind, both in _fields(torch.cat([*projections.values()]), scheme):
        parts = both.chunk(2) if both.dim() else (both, both)
        for shard, x in zip(projections, parts, strict=True):
            yield shard, kind, x


def _fields(w: Tensor, scheme: Scheme) -> Iterator[tuple[str, Tensor]]:
    tensors = (x[0] for x in quantize_weight(w[None], scheme) if x is not None)
    return zip(("weight", *scheme.weight_parts), tensors, strict=True)


def has_plain_scales(kind: str, x: Tensor, quant: Quant | None) -> bool:
    """Whether ``x`` are float group scales, for a scheme with e4m3 scales and one scale per row."""
    return kind == "scale" and quant is not None and quant.channel_scale and x.dtype in FLOATS


def channel_scales(scales: Tensor) -> dict[str, Tensor]:
    """Split float group scales ``(N, G)`` into e4m3 group scales and one float32 scale per row.

    With ``c = max(amax of a row, 1e-10) / 448`` the scales are ``e4m3(e4m3(s / c) / 8)`` and
    ``8 * c``. Group scales are at most 56, so that a 4-bit integer times its scale is within e4m3's
    range.

    Returns:
        The tensors by kind.

    Source:
        vLLM ``convert_bf16_scales_to_fp8``, which keeps c above 1 / (448 * 512).
    """
    s = scales.float()
    if s.dim() != 2 or not s.numel():  # a wrong shape is refused when scales are placed
        return {"scale": s.to(torch.float8_e4m3fn)}
    row = over(s.abs().amax(1, keepdim=True).clamp(min=SMALLEST_AMAX), FLOAT8_E4M3_MAX)
    eighth = (s / row).to(torch.float8_e4m3fn).float() / 8
    return {"scale": eighth.to(torch.float8_e4m3fn), "channel_scale": row[:, 0] * 8}
