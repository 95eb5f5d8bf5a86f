"""Host memory that a GPU reads: page-locked, mapped, and of the exact size.

PyTorch's pinned memory is rounded up to powers of two. Here an anonymous mapping is registered with
CUDA instead, and freed with the last tensor in it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

PORTABLE_AND_MAPPED = 3
"""Flags of ``cudaHostRegister``."""
ALIGNMENT = 256
"""Alignment in bytes of the tensors."""
LIMITS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)
"""Files with the limit and the use of a container's memory."""


def available_bytes() -> int | None:
    """Return how much memory processes may still take; None: the system does not say."""
    room = []
    with suppress(OSError, ValueError, IndexError):
        with open("/proc/meminfo") as lines:
            fields = dict(line.split(":", 1) for line in lines)
        room.append(int(fields["MemAvailable"].split()[0]) * 1024)
    for limit, used in LIMITS:
        with suppress(OSError, ValueError), open(limit) as most, open(used) as now:
            room.append(int(most.read()) - int(now.read()))
    return min(room, default=None)


def check_host_room(needed: int) -> None:
    """Raise RuntimeError with both numbers if host memory is too small."""
    room = available_bytes()
    if room is not None and needed > room:
        raise RuntimeError(
            f"resident experts must have host memory for all experts, {needed} bytes, got {room} "
            "bytes available"
        )


class HostMemory:
    """Memory on the host, which a GPU can read if ``pinned``, cut into tensors one after the other.

    Args:
        size: bytes.
        pinned: whether a GPU reads it.

    Raises:
        RuntimeError: there is not enough, or CUDA cannot register it: both numbers. Nothing is left
            registered.
    """

    def __init__(self, size: int, *, pinned: bool) -> None:
        self._taken, self._registered, self._map = 0, None, None
        check_host_room(size)
        if pinned:
            mapped = -(-max(size, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
            self._map = mmap.mmap(-1, mapped, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with suppress(AttributeError, OSError):
                self._map.madvise(mmap.MADV_HUGEPAGE)
            self._registered = _Registration(torch.frombuffer(self._map, dtype=torch.uint8))

    def take(self, size: int) -> Tensor:
        """Return the next bytes, as a tensor with a storage of its own."""
        if self._map is None:
            return torch.empty(size, dtype=torch.uint8, device="cpu")
        at = self._taken
        self._taken += padded_size(size)
        if not size:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        return torch.frombuffer(self._map, dtype=torch.uint8, offset=at, count=size)

    def device_address(self, x: Tensor) -> int:
        """Return the address at which the device reads a tensor that lies in this memory."""
        moved = 0 if self._registered is None else self._registered.moved
        return x.data_ptr() + moved


def padded_size(size: int) -> int:
    """Return the bytes that `HostMemory.take` uses for a tensor."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class _Registration:
    """Memory registered with CUDA until this object is gone, and kept until then."""

    def __init__(self, memory: Tensor) -> None:
        self.memory, pointer, size = memory, memory.data_ptr(), memory.nbytes
        self.pointer: int | None = None
        error = int(torch.cuda.cudart().cudaHostRegister(pointer, size, PORTABLE_AND_MAPPED))
        if error:
            _forget_error()
            room = available_bytes()
            raise RuntimeError(
                f"resident experts must have {size} bytes of host memory that CUDA can register, "
                f"got CUDA error {error} with {room} bytes available (a limit on locked memory, as "
                "ulimit -l shows, or under WSL half of the memory)"
            )
        self.pointer = pointer
        self.moved = _device_pointer(pointer) - pointer
        """What to add to an address to get that of the device."""

    def __del__(self) -> None:
        """Give the pages back; at the end of the process CUDA may be gone."""
        if self.pointer is not None:
            with suppress(Exception):
                torch.cuda.cudart().cudaHostUnregister(self.pointer)


def _forget_error() -> None:
    """Let PyTorch report the error that CUDA keeps for the next launch, and drop it."""
    with suppress(Exception):
        torch.zeros(1, device="cuda")
        torch.cuda.synchronize()


def _device_pointer(pointer: int) -> int:
    """Return the address of registered memory on the device, which may differ under WSL."""
    name = "nvcuda.dll" if os.name == "nt" else "libcuda.so.1"
    address = ctypes.c_uint64()
    driver: Any = ctypes.CDLL(name)
    error = driver.cuMemHostGetDevicePointer_v2(
        ctypes.byref(address), ctypes.c_void_p(pointer), ctypes.c_uint(0)
    )
    if error:
        raise RuntimeError(
            f"resident experts must be readable by the GPU, got CUDA error {error} for their "
            "device address"
        )
    return address.value
