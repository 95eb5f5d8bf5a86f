"""The facts of a GPU that the choice of a kernel depends on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, NamedTuple

import torch


class Device(NamedTuple):
    """The facts of a GPU that decide which kernel runs, and with which tiles."""

    arch: int
    """Compute capability times ten; 90 is Hopper."""
    shared_memory: int
    """Bytes of shared memory that a block may use."""
    processors: int
    """Number of streaming multiprocessors."""
    name: str = ""
    """The GPU's name in PyTorch, by which tuned files are found; empty: use no tuned file."""
    portable_only: bool = False
    """Whether kernels that are written for one architecture are excluded."""
    row_tile: int | None = None
    """The row tile of every plan that is not batch-invariant; None: chosen by load."""


NO_GPU = Device(90, 232448, 132)
"""The facts of an H200, used without a GPU (in Triton's interpreter)."""
_ASSUMED: ContextVar[Device | None] = ContextVar("assumed", default=None)


@contextmanager
def assumed(device: Device | None) -> Iterator[None]:
    """Context manager: choose kernels for ``device`` instead of the actual GPU; None: no change."""
    token = _ASSUMED.set(device)
    try:
        yield
    finally:
        _ASSUMED.reset(token)


def device_facts(device: torch.device) -> Device:
    """The facts of the GPU that a tensor is on; `NO_GPU` for any other device."""
    return _ASSUMED.get() or _facts(device)


@cache
def _facts(device: torch.device) -> Device:
    if device.type != "cuda" or not torch.cuda.is_available():  # or only fake tensors are on it
        return NO_GPU
    major, minor = torch.cuda.get_device_capability(device)
    properties: Any = torch.cuda.get_device_properties(device)
    return Device(
        10 * major + minor,
        properties.shared_memory_per_block_optin,
        properties.multi_processor_count,
        properties.name,
    )


def plain_name(device: str) -> str:
    """A GPU's name as file names spell it."""
    return device.replace(" ", "_").replace("/", "_")


def row_tile_facts(device: torch.device) -> tuple[int, int | None]:
    """The fields ``arch`` and ``row_tile`` of `Device`, on which the row tile of a plan depends.

    The architecture is 0 without a GPU, also if a `Device` is assumed for CPU tensors.
    """
    facts = _ASSUMED.get()
    row_tile = None if facts is None else facts.row_tile
    if device.type not in ("cuda", "meta"):
        return 0, row_tile
    return _arch(device) if facts is None else facts.arch, row_tile


@cache
def _arch(device: torch.device) -> int:
    if device.type != "cuda" or not torch.cuda.is_available():
        return 0  # a device that only fake tensors are on
    return _facts(device).arch
