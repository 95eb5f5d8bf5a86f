"""Weights that torchao quantized: tensor subclasses, split into the tensors that they store.

They are known by the names of their classes and attributes; torchao is not imported. ``axes`` says
which axes of a weight are ``(E, N, K)``.
"""

from __future__ import annotations

from typing import Any

import torch

from moe_ops.tensors import QTensor

FLOAT8, MX, NVFP4 = "Float8Tensor", "MXTensor", "NVFP4Tensor"
Axes = tuple[int, int, int]


def is_torchao_tensor(weight: Any) -> bool:
    """Whether a weight is one of the torchao tensors that are known here."""
    return type(weight).__name__ in (FLOAT8, MX, NVFP4)


def unsupported_pair(w1: Any, w2: Any, axes: Axes) -> str:
    """Say why two weights, one or both of them quantized, are not supported; empty if they are."""
    for weight in (w1, w2):
        if not is_torchao_tensor(weight):
            return f"a quantized weight beside one of {weight.dtype} (two of a kind work)"
        reason = _unsupported(weight, axes)
        if reason:
            return reason
    first, second = torchao_scheme(w1, axes), torchao_scheme(w2, axes)
    return "" if first == second else f"weights in {first} and {second} (two of a kind work)"


def torchao_scheme(weight: Any, axes: Axes) -> str:
    """Return the name of the scheme in which a supported weight is stored.

    Activations are quantized if a Float8Tensor asks for it. With 4-bit weights activations are
    never quantized, even if torchao would quantize them.
    """
    kind = type(weight).__name__
    if kind == FLOAT8:
        return str(_float8_scheme(weight, axes))
    return "mxfp4_w4a16" if kind == MX else "nvfp4_w4a16"


def stored(weight: Any, axes: Axes) -> QTensor:
    """Return the tensors of a supported weight as ``(E, N, K)``; no weight is copied."""
    kind, data, scale = type(weight).__name__, weight.qdata, weight.scale
    if kind == FLOAT8:
        return QTensor(data.permute(axes), scale.permute(axes))
    if kind == MX:
        return QTensor(data.view(torch.uint8), scale.view(torch.uint8))
    whole = weight.per_tensor_scale
    if whole is None:
        whole = torch.ones((), dtype=torch.float32, device=data.device)
    whole = whole.float().reshape(-1)
    scale = scale.view(torch.float8_e4m3fn)
    return QTensor(data.view(torch.uint8), scale, None, whole.expand(data.shape[0]))


def _unsupported(weight: Any, axes: Axes) -> str:
    kind = type(weight).__name__
    if kind == FLOAT8:
        if weight.qdata.dtype != torch.float8_e4m3fn:
            return f"{kind} of {weight.qdata.dtype} (torch.float8_e4m3fn works)"
        if _float8_scheme(weight, axes) is None:
            return (
                f"{kind} with block_size {list(weight.block_size)} (one scale a row along the "
                "contraction or an expert works, and blocks of powers of two from 16 on)"
            )
        return ""
    if kind == MX and weight.elem_dtype != torch.float4_e2m1fn_x2:
        return f"{kind} of {weight.elem_dtype} (torch.float4_e2m1fn_x2 works)"
    group = 32 if kind == MX else 16
    if weight.block_size != group:
        return f"{kind} with block_size {weight.block_size} ({group} works)"
    if weight.is_swizzled_scales:
        return f"{kind} with swizzled scales (is_swizzled_scales=False works)"
    return "" if axes == (0, 1, 2) else f"{kind} in a transposed layout (Float8Tensor works)"


def _float8_scheme(weight: Any, axes: Axes) -> str | None:
    """Return the scheme, or None if its scales are neither per row, per expert nor per block."""
    experts, rows, cols = (weight.block_size[axis] for axis in axes)
    _, n, k = (weight.qdata.shape[axis] for axis in axes)
    quantized = weight.act_quant_kwargs is not None
    if experts != 1:
        return None
    if cols == k and rows in (1, n):  # one scale per expert is the scale of each row
        return "fp8_channel" if quantized else "fp8_w8a16"
    if any(size < 16 or size & (size - 1) for size in (rows, cols)):
        return None
    sizes = f"{rows}" if rows == cols else f"{rows}x{cols}"
    return f"fp8_block{sizes}" if quantized else f"fp8_w8a16_block{sizes}"
