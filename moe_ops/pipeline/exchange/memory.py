"""Memory that all ranks of a group can write: symmetric memory of GPUs, shared memory of one host.

Allocation is collective: all ranks of the group must take part, with the same layout.
"""

from __future__ import annotations

import json
import mmap
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, TypeVar
from uuid import uuid4
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from moe_ops import ops
from moe_ops.pipeline.exchange.groups import RankGroup
from moe_ops.windows import WindowLayout, Windows

Result = TypeVar("Result")
FOLDER = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
"""Folder of the files that processes of one host map into memory."""
_SHARED: WeakValueDictionary[Any, Windows] = WeakValueDictionary()
"""Shared windows by name, layout, group, device and timeout."""


@torch.inference_mode(False)  # later calls write to the windows
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
        RuntimeError: on all ranks: GPUs that cannot write to each other's memory; processes of
            several hosts; no room in `FOLDER`.
    """
    if group.size == 1:
        return allocate_here(layout, device, timeout)[0]
    process_group = group.process_group()
    rank = dist.get_rank(process_group)
    if device.type == "cuda":
        return _symmetric(layout, process_group, rank, device, timeout)
    own, addresses, keep = _shared(layout, process_group, rank)
    return _windows(layout, rank, own, addresses, timeout, keep)


def allocate_shared(
    name: str, layout: WindowLayout, group: RankGroup, device: torch.device, timeout: float
) -> Windows:
    """Return the windows of a name that are there on all ranks, else allocate them: all together.

    A rank may hold windows that the others have freed: the traceback of an error that it caught
    keeps their layer. So each rank says which windows it holds. The name is the same on all ranks,
    as are the other arguments: see `allocate`.
    """
    key = (name, layout, group, device, timeout)
    windows = _SHARED.get(key)
    held = None if windows is None else windows.generation
    own = json.dumps([held, uuid4().hex])
    texts = [own] if group.size == 1 else group.gather_texts(own, device)
    generations, proposals = zip(*map(json.loads, texts), strict=True)
    if windows is None or {*generations} != {held}:
        windows = _SHARED[key] = allocate(layout, group, device, timeout)
        windows.generation = proposals[0]
    return windows


@torch.inference_mode(False)  # later calls write to the windows
def allocate_here(layout: WindowLayout, device: torch.device, timeout: float) -> list[Windows]:
    """Allocate the windows of all ranks in this process, on one device: to simulate ranks.

    Ranks must run at the same time: on streams of their own, or on the CPU in threads.
    """
    size = layout.parts.end
    memory = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(layout.ranks)]
    addresses = [window.data_ptr() for window in memory]
    return [
        _windows(layout, rank, own, addresses, timeout, memory) for rank, own in enumerate(memory)
    ]


def restart(windows: Sequence[Windows], live_ranks: Sequence[int], group: Any) -> None:
    """Let the live ranks begin anew without the others; all of them take part.

    A window is written to by others, so each rank writes to its own while nobody else runs.

    Args:
        windows: this rank's, which all have connected.
        live_ranks: the ranks that go on.
        group: the process group of these ranks; None: there is one.
    """
    _all_idle(windows[0].own.device, group)
    for own in windows:
        own.restart(live_ranks)
    _all_idle(windows[0].own.device, group)


def _all_idle(device: torch.device, group: Any) -> None:
    """Wait until the devices of all ranks of a group have done what they were given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if group is not None:
        dist.barrier(group)


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
    """This rank's window, the addresses of all windows here, and what keeps them mapped.

    Files have names only while they are empty: a rank that dies leaves no memory behind. They are
    mapped once the file system has room for all of them. (Memory of a file that has none kills the
    process with SIGBUS at the first access.)
    """
    size = layout.parts.end
    paths: list[str] = _gathered(group, f"{FOLDER}/moe_ops_window_{uuid4().hex}")
    descriptors: dict[int, int] = {}

    def opened(of: int, flags: int = 0) -> None:
        descriptors[of] = os.open(paths[of], os.O_RDWR | os.O_CLOEXEC | flags, 0o600)

    def open_others() -> None:
        for other in {*range(len(paths))} - {rank}:
            opened(other)

    def mapped() -> list[Tensor]:
        files = [mmap.mmap(descriptors[of], size) for of in range(len(paths))]
        return [torch.frombuffer(file, dtype=torch.uint8) for file in files]

    try:
        try:
            one_host = f"the ranks' processes must share files in {FOLDER}"
            _together(group, one_host, lambda: opened(rank, os.O_CREAT | os.O_EXCL))
            _together(group, one_host, open_others)
        finally:  # of all ranks, also those that died
            for path in paths:
                with suppress(FileNotFoundError):
                    os.unlink(path)
        room = (
            f"{FOLDER} must have room for a window of {size} bytes for each of {len(paths)} ranks "
            "(make it larger, or max_num_tokens smaller)"
        )
        _together(group, room, lambda: os.posix_fallocate(descriptors[rank], 0, size))
        windows = _together(group, room, mapped)
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)
    return windows[rank], [window.data_ptr() for window in windows], windows


def _together(group: Any, rule: str, step: Callable[[], Result]) -> Result:
    """Run a step on all ranks, which wait for each other.

    Raises:
        RuntimeError: on all ranks, if the step fails on any: the rule, and what the ranks got.
    """
    result: Any = None
    failure: str | None = None
    try:
        result = step()
    except Exception as error:  # whatever it is, the other ranks must hear of it
        failure = str(error)
    failures = enumerate(_gathered(group, failure))
    got = ", ".join(f"{why} on rank {rank}" for rank, why in failures if why is not None)
    if got:
        raise RuntimeError(f"{rule}, got {got}")
    return result


def _gathered(group: Any, value: Any) -> list[Any]:
    """Return the values of all ranks, in the order of ranks."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values


def out_of_window(used: Tensor, rows: Tensor, *others: Tensor) -> list[Tensor]:
    """Copy rows out of a window, with zeros for those that are not ``used``, and all of the others.

    An operator does so: compilers drop a `clone` of a result, and may compute it later.
    """
    row = torch.arange(rows.shape[0], dtype=torch.int32, device=rows.device)
    end = row.new_full((2,), rows.shape[0], dtype=torch.int64)
    copied = ops.gather_rows(rows, torch.where(used, row, -1), end, 1)
    return [copied, *(ops.gather_rows(x, row, end, 1) for x in others)]
