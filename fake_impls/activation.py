"""Output of the activation."""

from __future__ import annotations

from torch import Tensor

from moe_ops import sizes


def activation(x: Tensor, activation: str) -> Tensor:
    """``(R, d)`` for ``(R, 2d)`` with a gate, ``(R, d)`` for ``(R, d)`` without."""
    sizes.axes("x", x, 2)
    rows, width = x.shape
    return x.new_empty((rows, sizes.activated("x", width, activation)))
