"""Tensors, pointers, shared memory and barriers of Gluon kernels on the CPU.

See `gluon_interpreter`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

PATIENCE_S, POLL_S = 20, 0.1
"""A barrier that is waited for longer than PATIENCE_S never completes; POLL_S is how often a
waiting partition looks whether another one has failed."""
TURN = threading.RLock()
"""A partition holds it while it runs, until it waits for a barrier. Threads that run at once would
hand Python's own lock to each other at every tensor operation."""
DTYPES = {
    "int1": torch.bool, "int8": torch.int8, "uint8": torch.uint8, "int16": torch.int16,
    "uint16": torch.uint16, "int32": torch.int32, "uint32": torch.int64, "int64": torch.int64,
    "fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32,
    "fp8e4nv": torch.float8_e4m3fn,
}  # fmt: skip
"""Triton's names of dtypes. uint32 is kept in int64."""


def torch_dtype(dtype: Any) -> torch.dtype:
    """The torch dtype of a Triton dtype (or of a torch dtype)."""
    return dtype if isinstance(dtype, torch.dtype) else DTYPES[dtype.name]


class Value:
    """A tensor or scalar of a kernel."""

    def __init__(self, data: Any, unsigned: bool = False) -> None:
        self.data, self.unsigned = data, unsigned

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    @property
    def type(self) -> Any:
        return SimpleNamespace(layout=None)

    def to(self, dtype: Any, bitcast: bool = False) -> Value:
        unsigned, dtype = getattr(dtype, "name", "") == "uint32", torch_dtype(dtype)
        if unsigned:
            return Value(self.data.to(torch.int64) & 0xFFFFFFFF, True)
        if self.unsigned:
            return Value(signed(self.data)).to(dtype, bitcast)
        return Value(self.data.view(dtype) if bitcast else self.data.to(dtype))

    def reshape(self, shape: Any, *rest: int) -> Value:
        return Value(self.data.reshape(shape if not rest else (shape, *rest)), self.unsigned)

    def permute(self, order: Any, *rest: int) -> Value:
        return Value(self.data.permute(order if not rest else (order, *rest)))

    def split(self) -> tuple[Value, Value]:
        return Value(self.data[..., 0]), Value(self.data[..., 1])

    def __getitem__(self, key: Any) -> Value:
        return Value(self.data[key], self.unsigned)

    def __bool__(self) -> bool:
        return bool(self.data)

    def __index__(self) -> int:
        return int(self.data)

    def __invert__(self) -> Value:
        return Value(~self.data)

    def __neg__(self) -> Value:
        return Value(-self.data)


def signed(x: torch.Tensor) -> torch.Tensor:
    """The int32 with the bits of an unsigned number in an int64."""
    return ((x + 2**31) % 2**32 - 2**31).to(torch.int32)


def plain(x: Any) -> Any:
    """The tensor or number of a value."""
    return x.data if isinstance(x, Value) else x


def _operation(name: str) -> None:
    function = getattr(torch.Tensor, name)

    def compute(self: Value, other: Any) -> Value:
        if isinstance(other, Pointer):
            return NotImplemented
        x, y = torch.as_tensor(self.data), plain(other)
        if isinstance(y, float) and not x.is_floating_point():
            x = x.float()
        if name == "__rfloordiv__":
            done = torch.as_tensor(y) // x
        elif name == "__rmod__":
            done = torch.as_tensor(y) % x
        else:
            done = function(x, y)
        return Value(done & 0xFFFFFFFF if self.unsigned else done, self.unsigned)

    setattr(Value, name, compute)


_OPERATIONS = """
    add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod
    and rand or ror xor rxor lshift rshift lt le gt ge eq ne
"""
for _name in _OPERATIONS.split():
    _operation(f"__{_name}__")


class Pointer:
    """Addresses in a tensor: its memory, flat, and offsets in elements."""

    def __init__(self, memory: torch.Tensor, offset: Any = 0) -> None:
        self.memory, self.offset = memory, offset

    @property
    def dtype(self) -> Any:
        return SimpleNamespace(element_ty=self.memory.dtype)

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.memory, self.offset + plain(other))

    __radd__ = __add__

    def __getitem__(self, key: Any) -> Pointer:
        return Pointer(self.memory, self.offset[key])


class Shared:
    """Shared memory."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    @property
    def layout(self) -> None:
        """Layouts mean nothing here."""
        return None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    def index(self, i: Any) -> Shared:
        assert 0 <= int(i) < len(self.data)
        return Shared(self.data[int(i)])

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.data.narrow(dim, start, length))

    def permute(self, order: Any) -> Shared:
        return Shared(self.data.permute(order))

    def reshape(self, shape: Any) -> Shared:
        return Shared(self.data.view(shape))

    def reinterpret(self, dtype: Any, shape: Any, layout: Any) -> Shared:
        return Shared(self.data.view(torch.uint8).flatten().view(torch_dtype(dtype)).view(shape))

    def load(self, layout: Any) -> Value:
        return Value(self.data.clone())

    def store(self, value: Value) -> None:
        self.data.copy_(value.data)


class Barrier(Shared):
    """A barrier: pending arrivals and bytes of its phase, and the number of finished phases."""

    def __init__(self, count: int) -> None:
        self.count = self.arrivals = count
        self.bytes, self.finished = 0, 0
        self.changed = threading.Condition(TURN)

    def update(self, arrivals: int, nbytes: int) -> None:
        with self.changed:
            self.arrivals -= arrivals
            self.bytes += nbytes
            assert self.arrivals >= 0 and self.bytes >= 0, "arrivals and bytes as expected"
            if self.arrivals == 0 and self.bytes == 0:
                self.finished, self.arrivals = self.finished + 1, self.count
                self.changed.notify_all()

    def wait(self, parity: int, failures: Sequence[BaseException] = ()) -> None:
        """Wait for the end of a phase, in vain once another partition has failed."""
        last = time.monotonic() + PATIENCE_S
        with self.changed:
            while not self.changed.wait_for(lambda: self.finished % 2 != parity, POLL_S):
                assert not failures, "another partition failed"
                assert time.monotonic() < last, "a barrier that completes"


class Barriers:
    """The barriers of a ring."""

    def __init__(self, count: int) -> None:
        self.slots: list[Any] = [None] * count

    def index(self, i: Any) -> Slot:
        return Slot(self, int(i))


class Slot:
    """A place among `Barriers`."""

    def __init__(self, owner: Barriers, i: int) -> None:
        self.owner, self.i = owner, i

    @property
    def barrier(self) -> Barrier:
        return self.owner.slots[self.i]

    def put(self, barrier: Barrier) -> None:
        self.owner.slots[self.i] = barrier


def as_slot(x: Any) -> Slot:
    return x if isinstance(x, Slot) else x.index(0)
