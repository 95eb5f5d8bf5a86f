"""The slots of a layer on the device, the store behind them, and the table by which they are found.

Operators get the addresses of store and slots as one tensor, `Residency.table`. Neither the store
nor the slots are arguments of operators: a compiler may copy what an operator mutates, and CUDA
graphs of compiled programs take no tensors on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from moe_ops.residency.host import HostMemory
from moe_ops.residency.state import COUNTERS, OffloadStats, StateLayout, waves_of
from moe_ops.tensors import AnyTiles, ExpertWeight

COLUMNS = 4
"""Columns of a table: address of the store's tensor, of the slots' tensor, bytes of one expert, and
the chunks of one expert in all rows before."""
CHUNK = 16384
"""Bytes that a program copies at once."""
STORED = ("data", "bias", "scale", "zero_point", "global_scale")
"""The fields of an `ExpertWeight` that hold experts."""

Pair = tuple[Tensor, Tensor]
"""A tensor of the store and the tensor of the slots that it is copied to, expert by expert."""


class Residency:
    """K slots on the device for the E experts of a layer, all of which are in host memory.

    Args:
        store: both weights on the host, E experts each. Every expert of a tensor is one range of
            memory.
        num_slots: K.
        device: the device of the slots.
        scheme: key of the scheme that multiplies them.
        memory: the memory that the store lies in.

    Raises:
        RuntimeError: the device has no room for the slots.
    """

    def __init__(
        self,
        store: tuple[ExpertWeight, ExpertWeight],
        num_slots: int,
        device: torch.device,
        scheme: str,
        memory: HostMemory,
    ) -> None:
        self.store, self.num_slots, self.device, self.scheme = store, num_slots, device, scheme
        self.memory, self.num_experts = memory, len(store[0].data)
        self.layout = StateLayout(self.num_experts, num_slots)
        self.stream: int | None = None
        """The stream of the last call that was not captured."""
        self.slots = tuple(_slots_of(weight, num_slots, device) for weight in store)
        self.pairs: list[Pair] = []
        counts = []
        for weight, slots in zip(store, self.slots, strict=True):
            both = zip(weight[: len(STORED)], slots, strict=False)
            pairs = [(x, y) for x, y in both if x is not None and y is not None]
            self.pairs += pairs
            counts.append(len(pairs))
        self.table = torch.tensor(self._rows(), dtype=torch.int64, device="cpu").to(device)
        self.tables = self.table.split(counts)
        self._mirror = HostMemory(8 * COUNTERS, pinned=device.type == "cuda")
        self.counters = self._mirror.take(8 * COUNTERS).view(torch.int64).zero_()
        mirror = self._mirror.device_address(self.counters)
        self.state = self.layout.new_state(device, mirror)
        for table in self.tables:
            _OPEN[table.data_ptr()] = self
        if device.type == "cuda":
            for x in (self.state, *self.tables):
                torch._dynamo.mark_static_address(x)
        self.row_map = self.layout.rows_of(self.state)

    def _rows(self) -> list[list[int]]:
        """The rows of the table."""
        rows, before = [], 0
        for x, y in self.pairs:
            size = x.shape[1:].numel() * x.itemsize
            rows.append([self.memory.device_address(x), y.data_ptr(), size, before])
            before += -(-size // CHUNK)
        return rows

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert."""
        return sum(x.shape[1:].numel() * x.itemsize for x, _ in self.pairs)

    def pairs_of(self, table: Tensor) -> list[Pair]:
        """The tensors that the rows of a part of the table describe."""
        first = (table.data_ptr() - self.table.data_ptr()) // (8 * COLUMNS)
        return self.pairs[first : first + len(table)]

    def memory_of(self) -> list[Tensor]:
        """All memory that kernels reach by addresses: store, slots and counters."""
        return [*(x for pair in self.pairs for x in pair), self.counters]

    def rows_of(self, state: Tensor) -> Tensor:
        """The slot of each expert of the current wave, by a state: this one's, or a copy of it."""
        if state.data_ptr() == self.state.data_ptr():
            return self.row_map
        return self.layout.rows_of(state)

    def empty_(self) -> None:
        """Forget the experts in the slots, because the store has changed."""
        self.layout.empty_(self.state)

    def stats(self) -> OffloadStats:
        """Return the counters. The host waits for nothing: calls that still run may be missing."""
        hits, misses, copied, waves = self.counters.tolist()
        return OffloadStats(hits, misses, copied, waves)


_OPEN: WeakValueDictionary[int, Residency] = WeakValueDictionary()


def _slots_of(weight: ExpertWeight, num_slots: int, device: torch.device) -> ExpertWeight:
    data, *rest = (_slots_for(x, num_slots, device) for x in weight[: len(STORED)])
    return ExpertWeight(cast(Tensor, data), *rest)


def _slots_for(x: Tensor | None, num_slots: int, device: torch.device) -> Tensor | None:
    """Memory for K experts of a tensor, each laid out as in the store."""
    if x is None:
        return None
    size, strides = x.shape[1:].numel(), x.stride()[1:]
    shape = (num_slots, *x.shape[1:])
    return torch.empty_strided(shape, (size, *strides), dtype=x.dtype, device=device)


def residency_of(table: Tensor) -> tuple[Residency, int]:
    """The slots that a part of a table belongs to, and the number of its first weight: 0 or 1.

    Raises:
        ValueError: a tensor that is not `Residency.table`, or one of `Residency.tables`, itself. A
            copy would have to be read to find them, for which the host would wait.
    """
    owner = _OPEN.get(table.data_ptr())
    if owner is None or len(table) > len(owner.table):
        raise ValueError("table must be one of `tables` of a Residency, got another tensor")
    return owner, int(table.data_ptr() != owner.table.data_ptr())


def open_residencies() -> list[Residency]:
    """All slots of this process."""
    return list({id(owner): owner for owner in _OPEN.values()}.values())


class Waves(NamedTuple):
    """The two operators of a device that decide and copy, and the loop around a product."""

    make_resident: Callable[..., None]
    copy_experts: Callable[..., None]

    def run(
        self,
        table: Tensor,
        state: Tensor,
        tiles: AnyTiles,
        multiply: Callable[[ExpertWeight], None],
    ) -> None:
        """Copy the experts of each wave that are missing, and call ``multiply`` with their slots.

        The first weight's call decides for both. If one wave is enough, it also copies the second
        weight, so that the second weight's call copies nothing.
        """
        owner, number = residency_of(table)
        _, topk_ids, expert_map = tiles
        if topk_ids is None:
            raise NotImplementedError(
                "tiles[1] must be topk_ids for experts in host memory, got None"
            )
        sizes = (owner.num_experts, owner.num_slots)
        count = waves_of(*sizes, topk_ids.numel())
        if number == 0 and count:
            self.make_resident(topk_ids, expert_map, state, *sizes)
        weight = owner.slots[number]._replace(rows=owner.rows_of(state))
        for wave in range(count):
            last = wave == count - 1
            if count > 1:
                self.copy_experts(table, state, *sizes, wave, number == 1 and last)
            elif number == 0:
                self.copy_experts(owner.table, state, *sizes, wave, True)
            multiply(weight)
