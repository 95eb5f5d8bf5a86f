"""TMA descriptors ("boxes") of tensors, remembered: making one takes as long as a launch.

A descriptor says where a tensor lies, its sizes, and the box that one copy takes. It depends on
these values alone, so one that was made for an address serves whatever lies there later.
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
"""Descriptors that one `Boxes` remembers."""


class Base(NamedTuple):
    """What a descriptor asks of its tensor, which need not live as long."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        """As tensors have it."""
        return self.address


class Boxes:
    """The descriptors of the tensors that one kernel has seen.

    Args:
        make: a tensor's descriptor; None if there can be none.
    """

    def __init__(self, make: Callable[[Tensor], TensorDescriptor | None]) -> None:
        self.make = make
        self.known: dict[Any, TensorDescriptor | None] = {}

    def of(self, x: Tensor) -> TensorDescriptor | None:
        """The tensor's descriptor, made once."""
        place = (x.data_ptr(), x.shape, x.stride(), x.dtype)
        found = self.known.get(place, self)
        if found is self:
            if len(self.known) >= MOST:
                self.known.clear()
            found = self.known[place] = self.make(x)
        return found


def descriptor(
    x: Tensor, box: Sequence[int], shape: Sequence[int] = (), strides: Sequence[int] = ()
) -> TensorDescriptor:
    """The descriptor of a tensor, or of what ``shape`` and ``strides`` make of its memory.

    A box lies in shared memory with the swizzle of 128 bytes; one of float32 is not swizzled.
    """
    layout = _layout(0 if x.dtype == torch.float32 else ROW_BYTES, 8 * x.itemsize, len(box))
    base = Base(x.data_ptr(), x.dtype)
    return TensorDescriptor(
        base, list(shape or x.shape), list(strides or x.stride()), list(box), layout
    )


@cache
def _layout(swizzle_bytes: int, bits: int, rank: int) -> Any:
    return gl.NVMMASharedLayout(swizzle_bytes, bits, rank=rank)
