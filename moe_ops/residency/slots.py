"""The slots of a layer on the device, the store behind them, and the table by which they are found.

Operators get the addresses of store and slots as one tensor, one of `Residency.tables`. Store,
slots and state are no arguments of operators: they are a cache, of which results do not depend. So
a compiler may call the products of a layer in any order, and copies nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from moe_ops.residency.host import HostMemory
from moe_ops.residency.state import COUNTERS, OffloadStats, StateLayout
from moe_ops.tensors import AnyTiles, ExpertWeight

COLUMNS = 4
"""Columns of a table: address of the store's tensor, of the slots' tensor, bytes of one expert, and
the chunks of one expert in all rows of the weight before."""
CHUNK = 16384
"""Bytes that a program copies at once."""

Pair = tuple[Tensor, Tensor]
"""A tensor of the store and the tensor of the slots that it is copied to, expert by expert."""


class Residency:
    """K slots on the device for the E experts of a layer, all of which are in host memory.

    Args:
        store: both weights on the host, E experts each. Every expert of a tensor is one range of
            memory.
        num_slots: K.
        device: the device of the slots.
        memory: the memory that the store lies in.

    Raises:
        RuntimeError: the device has no room for the slots.
    """

    def __init__(
        self,
        store: tuple[ExpertWeight, ExpertWeight],
        num_slots: int,
        device: torch.device,
        memory: HostMemory,
    ) -> None:
        self.store, self.num_slots, self.device, self.memory = store, num_slots, device, memory
        self.num_experts = len(store[0].data)
        self.layout = StateLayout(self.num_experts, num_slots)
        self.stream: int | None = None
        """The stream of the last call that was not captured."""
        self.side_stream: torch.cuda.Stream | None = None
        """Where experts of a wave are copied beside the products of the wave before."""
        self.ahead: tuple[AnyTiles, AnyTiles] | None = None
        """See `take_ahead`."""
        self.slots = tuple(_slots_of(weight, num_slots, device) for weight in store)
        self.pairs = tuple(map(tensor_pairs, store, self.slots))
        rows = [self._rows(pairs) for pairs in self.pairs]
        self.chunks = tuple(each[-1][-1] for each in rows)
        """Chunks of one expert of each weight."""
        longest = max(map(len, rows))
        rows = [each + each[-1:] * (longest - len(each)) for each in rows]
        self.table = torch.tensor(rows, dtype=torch.int64, device="cpu").to(device)
        """``(2, rows, COLUMNS)``; rows without bytes fill up the shorter part."""
        self.tables = tuple(self.table)
        self._mirror = HostMemory(2 * 8 * COUNTERS, pinned=device.type == "cuda")
        mirror = self._mirror.take(2 * 8 * COUNTERS)
        self.counters = mirror.view(torch.int64).view(2, COUNTERS).zero_()
        address = self._mirror.device_address(mirror)
        states = [self.layout.new_state(address + 8 * COUNTERS * i) for i in range(2)]
        self.state = torch.stack(states).to(device)
        """``(2, length)``: see `StateLayout`."""
        self.parts = tuple(
            (self.table.narrow(0, i, 2 - i), self.state.narrow(0, i, 2 - i)) for i in range(2)
        )
        """Table and state from each weight on."""
        for table in self.tables:
            _OPEN[table.data_ptr()] = self
            if device.type == "cuda":
                torch._dynamo.mark_static_address(table)
        self.row_maps = tuple(map(self.layout.rows_of, self.state))
        """For each weight int32 ``(E,)``: the slot of each expert of the current wave, -1: none."""

    def _rows(self, pairs: Sequence[Pair]) -> list[list[int]]:
        """The rows of a weight's table; the last has no bytes."""
        rows, before = [], 0
        for x, y in pairs:
            size = x.shape[1:].numel() * x.itemsize
            rows.append([self.memory.device_address(x), y.data_ptr(), size, before])
            before += -(-size // CHUNK)
        return [*rows, [0, 0, 0, before]]

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert."""
        return sum(x[0].nbytes for pairs in self.pairs for x, _ in pairs)

    def memory_of(self) -> list[Tensor]:
        """All memory that kernels reach by addresses: store, slots and counters."""
        return [*(x for pairs in self.pairs for pair in pairs for x in pair), self.counters]

    def take_ahead(self, tiles: AnyTiles) -> AnyTiles | None:
        """Return the second weight's tiles, in rows, if its experts are there already.

        The first weight's product sees to that, and sets `ahead`: the tiles of its call, and these.
        They serve one product that comes next, of the same routing: any other call of a product
        may give the slots to other experts.
        """
        ahead, self.ahead = self.ahead, None
        return ahead[1] if ahead is not None and _same_memory(ahead[0], tiles) else None

    def empty_(self) -> None:
        """Forget the experts in the slots, because the store has changed."""
        self.ahead = None
        self.layout.empty_(self.state)

    def stats(self) -> OffloadStats:
        """Return the counters. The host waits for nothing: calls that still run may be missing."""
        (hits, misses, first, waves), (_, _, second, _) = self.counters.tolist()
        return OffloadStats(hits, misses, first + second, waves)


def tensor_pairs(weight: ExpertWeight, other: ExpertWeight) -> list[Pair]:
    """The tensors of a weight that hold experts, each with that of another: a store or slots."""
    both = zip(weight.of_experts, other.of_experts, strict=True)
    return [(x, y) for x, y in both if x is not None and y is not None]


def _same_memory(tiles: AnyTiles, others: AnyTiles) -> bool:
    """Whether plan, ids and expert map are the same memory."""
    return all(
        x is y or (x is not None and y is not None and _place(x) == _place(y))
        for x, y in zip(tiles, others, strict=True)
    )


def _place(x: Tensor) -> tuple[object, ...]:
    return x.data_ptr(), x.shape, x.stride(), x.dtype


_OPEN: WeakValueDictionary[int, Residency] = WeakValueDictionary()


def _slots_of(weight: ExpertWeight, num_slots: int, device: torch.device) -> ExpertWeight:
    data, *rest = (_slots_for(x, num_slots, device) for x in weight.of_experts)
    return ExpertWeight(cast(Tensor, data), *rest)


def _slots_for(x: Tensor | None, num_slots: int, device: torch.device) -> Tensor | None:
    """Memory for K experts of a tensor, each laid out as in the store."""
    if x is None:
        return None
    size, strides = x.shape[1:].numel(), x.stride()[1:]
    shape = (num_slots, *x.shape[1:])
    return torch.empty_strided(shape, (size, *strides), dtype=x.dtype, device=device)


def residency_of(table: Tensor) -> tuple[Residency, int]:
    """The slots that a table belongs to, and the number of its weight: 0 or 1.

    Raises:
        ValueError: a tensor that is not one of `Residency.tables` itself. A copy would have to be
            read to find them, for which the host would wait.
    """
    owner = _OPEN.get(table.data_ptr())
    if owner is None or table.shape != owner.table.shape[1:]:
        raise ValueError("weight[5] must be one of `tables` of a Residency, got another tensor")
    return owner, int(table.data_ptr() != owner.table.data_ptr())


def open_residencies() -> list[Residency]:
    """All slots of this process."""
    return list({id(owner): owner for owner in _OPEN.values()}.values())
