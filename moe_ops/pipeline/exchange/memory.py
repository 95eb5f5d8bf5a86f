"""Memory that all ranks of a group can write: symmetric memory of GPUs, shared memory of one host.

Allocation is collective: all ranks of the group must take part, with the same layout.
"""

from __future__ import annotations

import os
import tempfile
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_ops.pipeline.exchange.groups import RankGroup
from moe_ops.windows import WindowLayout, Windows


def allocate(
    layout: WindowLayout, group: RankGroup, device: torch.device, timeout: float
) -> Windows:
    """Allocate this rank's window, and learn the addresses of the others.

    On GPUs the windows are PyTorch's symmetric memory: the ranks must be GPUs of one NVLink domain
    (or of one host with peer access), one process each. On the CPU they are files that processes of
    one host map into memory.

    Args:
        layout: the same on all ranks.
        group: the ranks.
        device: of this rank.
        timeout: seconds to wait for a rank in a call.

    Raises:
        RuntimeError: GPUs that cannot write to each other's memory; processes of several hosts.
    """
    if group.size == 1:
        return allocate_here(layout, device, timeout)[0]
    process_group = group.process_group()
    rank = dist.get_rank(process_group)
    if device.type == "cuda":
        return _symmetric(layout, process_group, rank, device, timeout)
    own, addresses, keep = _shared(layout, process_group, rank)
    return _windows(layout, rank, own, addresses, timeout, keep)


def allocate_here(layout: WindowLayout, device: torch.device, timeout: float) -> list[Windows]:
    """Allocate the windows of all ranks in this process, on one device: to simulate ranks.

    Ranks must run at the same time: on streams of their own, or on the CPU in threads.
    """
    memory = [_zeros(layout, device) for _ in range(layout.ranks)]
    addresses = [window.data_ptr() for window in memory]
    return [
        _windows(layout, rank, own, addresses, timeout, memory) for rank, own in enumerate(memory)
    ]


def _zeros(layout: WindowLayout, device: torch.device) -> Tensor:
    return torch.zeros(layout.parts.end, dtype=torch.uint8, device=device)


def _windows(
    layout: WindowLayout, rank: int, own: Tensor, addresses: list[int], timeout: float, keep: Any
) -> Windows:
    error = torch.zeros(1, dtype=torch.int32, device="cpu")
    if own.is_cuda:
        error = error.pin_memory()
    table = torch.tensor([*addresses, error.data_ptr()], dtype=torch.int64, device="cpu")
    return Windows(layout, own, rank, table.to(own.device), error, timeout, tuple(addresses), keep)


def _symmetric(
    layout: WindowLayout, group: Any, rank: int, device: torch.device, timeout: float
) -> Windows:
    symmetric_memory = import_module("torch.distributed._symmetric_memory")  # takes a while
    own = symmetric_memory.empty(layout.parts.end, dtype=torch.uint8, device=device)
    handle = symmetric_memory.rendezvous(own, group)
    own.zero_()
    addresses = list(handle.buffer_ptrs)
    windows = _windows(layout, rank, own, addresses, timeout, handle)
    # A rank must not write before the others have filled their windows with zeros.
    torch.cuda.synchronize(device)
    dist.barrier(group)
    return windows


def _shared(layout: WindowLayout, group: Any, rank: int) -> tuple[Tensor, list[int], Any]:
    """This rank's window, the addresses of all windows here, and what keeps them mapped."""
    size, ranks = layout.parts.end, dist.get_world_size(group)
    folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
    handle, path = tempfile.mkstemp(prefix="moe_ops_window_", dir=folder)
    os.close(handle)
    own = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
    own.zero_()
    paths: list[Any] = [None] * ranks
    dist.all_gather_object(paths, path, group)
    try:
        mapped = [
            own if r == rank else torch.from_file(p, shared=True, size=size, dtype=torch.uint8)
            for r, p in enumerate(paths)
        ]
        dist.barrier(group)
    finally:
        os.unlink(path)
    return own, [window.data_ptr() for window in mapped], mapped
