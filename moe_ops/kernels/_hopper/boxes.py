"""Caches of TMA descriptors: making a descriptor takes as long as a launch.

A TMA descriptor holds the address, shape and strides of a tensor and the TMA box, the block that
one copy transfers. It depends on these values alone, so a descriptor made for an address serves any
later tensor of the same dtype, shape and strides at that address.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moe_ops.dispatch.hopper import ROW_BYTES

MOST = 4096
"""The most descriptors that one `Boxes` caches."""


class Base(NamedTuple):
    """The address and dtype of a tensor, which the descriptor need not keep alive."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        """The address, as `Tensor.data_ptr` returns it."""
        return self.address


class Boxes:
    """A cache of the TMA descriptors of the tensors that one kernel was called with.

    Args:
        make: makes a tensor's descriptor; returns None if TMA cannot address the tensor.
    """

    def __init__(self, make: Callable[[Tensor], TensorDescriptor | None]) -> None:
        self.make = make
        self.made: dict[Any, TensorDescriptor | None] = {}

    def of(self, x: Tensor) -> TensorDescriptor | None:
        """The descriptor of a tensor, from the cache or made now."""
        place = (x.data_ptr(), x.shape, x.stride(), x.dtype)
        box = self.made.get(place, self)
        if box is self:
            if len(self.made) >= MOST:
                self.made.clear()
            box = self.made[place] = self.make(x)
        return box


def descriptor(
    x: Tensor,
    box: Sequence[int],
    shape: Sequence[int] = (),
    strides: Sequence[int] = (),
    *,
    swizzled: bool = True,
) -> TensorDescriptor:
    """The TMA descriptor of a tensor, or of a view with ``shape`` and ``strides`` of its memory.

    A box has a swizzle of its rows' bytes in shared memory, at most 128, if it is ``swizzled``.
    """
    width = min(ROW_BYTES, box[-1] * x.itemsize) if swizzled else 0
    layout = _layout(width, 8 * x.itemsize, len(box))
    base = Base(x.data_ptr(), x.dtype)
    return TensorDescriptor(
        base, list(shape or x.shape), list(strides or x.stride()), list(box), layout
    )


@cache
def _layout(swizzle_bytes: int, bits: int, rank: int) -> Any:
    return gl.NVMMASharedLayout(swizzle_bytes, bits, rank=rank)
