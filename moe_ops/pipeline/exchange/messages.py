"""Rows of several tensors as bytes of one message."""

from __future__ import annotations

import torch
from torch import Tensor


def bytes_of_fp8(rows: Tensor) -> Tensor:
    """8-bit floats as uint8, which every backend sends."""
    return rows.view(torch.uint8) if rows.dtype.itemsize == 1 else rows


def padded(x: Tensor, size: int, fill: int = 0) -> Tensor:
    """``(T, n)`` to ``(size, n)``, with rows of ``fill`` (of 8-bit numbers: of zeros)."""
    if not torch.compiler.is_compiling() and x.shape[0] == size:
        return x
    stored = bytes_of_fp8(x)
    rows = stored.new_full((size - x.shape[0], x.shape[1]), fill)
    return torch.cat([stored, rows]).view(x.dtype)


def message_of(parts: list[Tensor]) -> Tensor:
    """Rows of several tensors ``(T, n)`` side by side as bytes: ``(T, bytes)`` uint8."""
    return torch.cat([_viewed(part, torch.uint8) for part in parts], 1)


def parts_of(message: Tensor, parts: list[Tensor]) -> list[Tensor]:
    """Invert `message_of`: tensors with the dtypes and widths of ``parts``, a row a message."""
    widths = [part.shape[1] * part.dtype.itemsize for part in parts]
    pieces = message.split(widths, 1)
    return [_viewed(piece, part.dtype) for piece, part in zip(pieces, parts, strict=True)]


def _viewed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy of ``(T, n)`` whose rows are read as numbers of another dtype."""
    # Along one axis: a compiler may give an axis of one number any stride, and `contiguous` would
    # return a single row as it lies in memory. Neither may be viewed as another dtype.
    numbers = x.clone(memory_format=torch.contiguous_format).view(-1)
    return numbers.view(dtype).view(x.shape[0], x.shape[1] * x.dtype.itemsize // dtype.itemsize)


def sum_of_ranks(parts: Tensor, ranks: int) -> Tensor:
    """Sum ``(R * P, H)`` to ``(P, H)`` in float32 in the order of ranks; round once."""
    if ranks == 1:
        return parts
    first, *others = parts.view(ranks, parts.shape[0] // ranks, parts.shape[1]).unbind(0)
    total = first.float()
    for part in others:
        total = total + part
    return total.to(parts.dtype)
