"""Bytes of tensors that live at the same time, on the host or a GPU: what PyTorch allocates.

On the host a dispatch mode sees every operator's results. A result counts while its storage lives,
unless an argument has the same storage. Files that are mapped into memory do not count: no operator
makes them. Temporaries inside an operator are not seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def allocator_peaks(call: Callable[[], Any]) -> tuple[int, int]:
    """Bytes that a second call asks the GPU's allocator for at its peak, and bytes it sets aside.

    A block at hand, such as one that other tests have left, may be up to 1 MiB larger than asked.
    """
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()
    call()
    after = torch.cuda.memory_stats()
    kinds = ("requested_bytes.all", "allocated_bytes.all")
    asked, held = (after[f"{kind}.peak"] - before[f"{kind}.current"] for kind in kinds)
    return asked, held


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that operators allocate on the CPU while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._sizes: dict[StorageWeakRef, int] = {}
        self._known: set[StorageWeakRef] = set()

    @property
    def live(self) -> int:
        """Bytes that live now."""
        self._sizes = {ref: n for ref, n in self._sizes.items() if not ref.expired()}
        return sum(self._sizes.values())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {StorageWeakRef(x.untyped_storage()) for x in _tensors((args, kwargs))}
        made = {StorageWeakRef(x.untyped_storage()): x for x in _tensors(out)}
        for ref, x in made.items():
            if ref not in given and ref not in self._sizes:
                self._sizes[ref] = x.untyped_storage().nbytes()
        self.peak = max(self.peak, self.live)
        return out


def _tensors(tree):
    for x in tree_leaves(tree):
        if isinstance(x, torch.Tensor) and x.device.type == "cpu":
            yield x
