"""Bounds checks for Triton's interpreter: a pointer may access only the tensor it comes from.

A launch sees virtual addresses, with a window of 2**48 addresses per tensor. So an address
identifies its tensor however far an index is off, and adjacent allocations hide no error. Bins of
histograms and indices of gathers are checked too, because on a GPU they are addresses in shared
memory. A launch with very many accesses is stopped: it has a loop without a valid bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from triton.runtime import interpreter

import moe_ops

BITS = 48
MIDDLE = 1 << (BITS - 1)
MOST_ACCESSES = 100_000
"""Limit of accesses per launch, above what any launch of a small problem needs."""


class Window:
    """The virtual addresses of one tensor."""

    def __init__(self, x: Tensor, number: int) -> None:
        self.x, self.real = x, x.data_ptr()
        self.first = (number << BITS) + MIDDLE + self.real % 256  # aligned as the tensor is
        steps = zip(x.shape, x.stride(), strict=True)
        count = 1 + sum((size - 1) * step for size, step in steps) if x.numel() else 0
        self.length = count * x.itemsize
        """Bytes from the first element to the end of the last one."""
        self.own: np.ndarray | None = None
        """Mask of those that belong to elements of the tensor; None: all."""
        if not x.is_contiguous():
            own = torch.zeros(count, dtype=torch.bool)
            own.as_strided(x.shape, x.stride()).fill_(True)
            self.own = np.repeat(own.numpy(), x.itemsize)

    def real_addresses(self, made_up: np.ndarray, size: int, kernel: str) -> np.ndarray:
        """Real addresses of ``size`` bytes at each address; IndexError if any is out of bounds."""
        offset = (made_up - np.uint64(self.first)).astype(np.int64)
        inside = (offset >= 0) & (offset + size <= self.length)
        if self.own is not None:
            at = np.where(inside, offset, 0)
            inside &= self.own[at] & self.own[at + size - 1]
        if not inside.all():
            raise IndexError(
                f"{kernel} leaves its {self.x.dtype} tensor of shape {tuple(self.x.shape)} and "
                f"strides {self.x.stride()} at element {offset[~inside][0] // self.x.itemsize}"
            )
        return offset.astype(np.uint64) + np.uint64(self.real)


class Memory:
    """The tensors of the current launch."""

    def __init__(self) -> None:
        self.windows: list[Window] = []
        self.kernel, self.accesses, self.launches = "", 0, 0

    def begin(self, kernel: str) -> None:
        """Begin a launch: drop the windows of the previous one."""
        self.windows, self.kernel, self.accesses = [], kernel, 0
        self.launches += 1

    def window(self, x: Tensor) -> Window:
        """Make a window for a tensor."""
        self.windows.append(Window(x, len(self.windows) + 1))
        return self.windows[-1]

    def real(self, pointers: Any, mask: Any) -> Any:
        """Real addresses of the lanes that are not masked."""
        self.accesses += 1
        if self.accesses > MOST_ACCESSES:
            raise IndexError(f"{self.kernel} accesses memory more than {MOST_ACCESSES} times")
        active = np.asarray(mask.data, dtype=bool)
        if active.shape != pointers.data.shape:
            active = np.broadcast_to(active, pointers.data.shape)
        used = pointers.data[active]
        numbers = used >> np.uint64(BITS)
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        if used.size and (numbers == numbers[0]).all():  # nearly always, and faster than sorting
            used = self.located(used, int(numbers[0]), size)
        else:
            for number in np.unique(numbers):
                mine = numbers == number
                used[mine] = self.located(used[mine], int(number), size)
        real = np.zeros_like(pointers.data)
        real[active] = used
        return interpreter.TensorHandle(real, pointers.dtype)

    def located(self, made_up: np.ndarray, number: int, size: int) -> np.ndarray:
        """Real addresses of ``size`` bytes at each address of the window with this number."""
        if number == 0:
            return self.shared(made_up, size)
        if number > len(self.windows):
            raise IndexError(f"{self.kernel} accesses memory of no tensor")
        return self.windows[number - 1].real_addresses(made_up, size, self.kernel)

    def shared(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """Check that addresses are in memory that kernels find by addresses, and return them."""
        inside = np.zeros(addresses.shape, dtype=bool)
        for windows in moe_ops.windows.open_windows():
            length = windows.layout.parts.end
            for first, end in [(a, a + length) for a in windows.addresses] + [
                (windows.error.data_ptr(), windows.error.data_ptr() + 4)
            ]:
                inside |= (addresses >= first) & (addresses + np.uint64(size) <= end)
        for x in (x for owner in moe_ops.residency.open_residencies() for x in owner.memory_of()):
            end = x.data_ptr() + x.untyped_storage().nbytes()
            inside |= (addresses >= x.data_ptr()) & (addresses + np.uint64(size) <= end)
        if not inside.all():
            raise IndexError(f"{self.kernel} accesses memory of no tensor")
        return addresses


def _everywhere(pointers: Any) -> Any:
    return interpreter.TensorHandle(np.ones_like(pointers.data, dtype=bool), interpreter.tl.int1)


def _builder_patches(memory: Memory) -> dict[str, Callable[..., Any]]:
    """Methods of the interpreter's builder that access memory, by name."""
    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store
    rmw, cas = builder.create_atomic_rmw, builder.create_atomic_cas
    histogram, gather = builder.create_histogram, builder.create_gather

    def inside(values: np.ndarray, stop: int, what: str) -> None:
        if values.size and not (values.min() >= 0 and values.max() < stop):
            raise IndexError(f"{memory.kernel} {what} {values.min()}..{values.max()} of {stop}")

    def create_histogram(self, data, bins, mask):
        counted = data.data if mask is None else data.data[mask.data]
        inside(counted, bins, "counts in the bins")
        return histogram(self, data, bins, mask)

    def create_gather(self, src, indices, axis):
        inside(indices.data, src.data.shape[axis], "gathers")
        return gather(self, src, indices, axis)

    return {
        "create_masked_load": lambda self, at, mask, *rest: load(
            self, memory.real(at, mask), mask, *rest
        ),
        "create_masked_store": lambda self, at, value, mask, *rest: store(
            self, memory.real(at, mask), value, mask, *rest
        ),
        "create_atomic_rmw": lambda self, op, at, value, mask, *rest: rmw(
            self, op, memory.real(at, mask), value, mask, *rest
        ),
        "create_atomic_cas": lambda self, at, *rest: cas(
            self, memory.real(at, _everywhere(at)), *rest
        ),
        "create_histogram": create_histogram,
        "create_gather": create_gather,
    }


@contextmanager
def checked_memory() -> Iterator[Memory]:
    """Check all accesses of kernels interpreted in this context; IndexError if out of bounds."""
    memory, convert, run = Memory(), interpreter._implicit_cvt, interpreter.GridExecutor.__call__

    def implicit_cvt(argument: Any) -> Any:
        converted = convert(argument)
        if isinstance(argument, Tensor):
            converted.handle.data = np.array([memory.window(argument).first], dtype=np.uint64)
        return converted

    def call(self, *arguments: Any, **constants: Any) -> None:
        memory.begin(self.fn.__name__)
        run(self, *arguments, **constants)

    with ExitStack() as stack:
        for name, patch in _builder_patches(memory).items():
            builder = interpreter.InterpreterBuilder
            stack.enter_context(mock.patch.object(builder, name, patch))
        stack.enter_context(mock.patch.object(interpreter, "_implicit_cvt", implicit_cvt))
        stack.enter_context(mock.patch.object(interpreter.GridExecutor, "__call__", call))
        yield memory


def install() -> ExitStack:
    """Check every access until the returned object is closed."""
    stack = ExitStack()
    stack.enter_context(checked_memory())
    return stack
