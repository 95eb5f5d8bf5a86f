"""The state of a layer's slots: one int64 tensor on the device, which operators change."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

CLOCK, HITS, MISSES, BYTES, WAVES, MIRROR, RESIDENT, MISSING = range(8)
"""Entries at the beginning of the state: calls so far, four counters, the address of a copy of the
counters that the host reads (0: none), and of the last call the wanted experts that were resident,
and the others."""
HEADER = 8
COUNTERS = 4
"""Number of counters, which begin at `HITS`."""


class OffloadStats(NamedTuple):
    """What the slots of a layer, or of all layers of a model, have done so far."""

    hits: int
    """Experts that a call wanted and a slot held: at most one an expert, layer and call."""
    misses: int
    """Experts that a call wanted and that were copied from host memory."""
    bytes_copied: int
    """Bytes copied from host memory."""
    waves: int
    """Waves of calls: one for each call that wants no more experts than there are slots."""

    @property
    def hit_rate(self) -> float:
        """Hits over hits and misses; 1 before the first call."""
        wanted = self.hits + self.misses
        return self.hits / wanted if wanted else 1.0


class StateLayout(NamedTuple):
    """Offsets of the parts of a state, in entries.

    Wanted experts are numbered: resident ones first, then missing ones, each in the order of
    experts. The wave of number p is ``p // K``. Missing experts have numbers from `RESIDENT` on.
    """

    num_experts: int
    """E, experts of the rank."""
    num_slots: int
    """K."""

    @property
    def held(self) -> int:
        """``(K,)``: the expert in each slot, -1: none."""
        return HEADER

    @property
    def last_use(self) -> int:
        """``(K,)``: the clock of the last call that wanted the slot's expert."""
        return HEADER + self.num_slots

    @property
    def pending(self) -> int:
        """``(K,)``: the experts in the slots once the last wave of the call has been copied."""
        return HEADER + 2 * self.num_slots

    @property
    def place(self) -> int:
        """``(E,)``: ``wave * K + slot`` of each wanted expert, -1 of the others."""
        return HEADER + 3 * self.num_slots

    @property
    def experts(self) -> int:
        """``(E,)``: the missing experts, in order."""
        return self.place + self.num_experts

    @property
    def targets(self) -> int:
        """``(E,)``: the slot that each missing expert is copied to."""
        return self.experts + self.num_experts

    @property
    def rows(self) -> int:
        """int32 ``(E,)``: the slot of each expert of the current wave, -1 of the others."""
        end = self.targets + self.num_experts
        return end + end % 2  # aligned to 16 bytes

    @property
    def length(self) -> int:
        """The number of entries."""
        return self.rows + (self.num_experts + 1) // 2

    def rows_of(self, state: Tensor) -> Tensor:
        """The part `rows` of a state."""
        return state.view(torch.int32).narrow(0, 2 * self.rows, self.num_experts)

    def new_state(self, device: torch.device, mirror: int = 0) -> Tensor:
        """A state in which no slot holds an expert."""
        state = torch.zeros(self.length, dtype=torch.int64, device="cpu")
        state[MIRROR] = mirror
        self.empty_(state)
        return state.to(device)

    def empty_(self, state: Tensor) -> None:
        """Forget the experts in the slots; counters stay."""
        state[self.held : self.last_use].fill_(-1)


def waves_of(num_experts: int, num_slots: int, num_ids: int) -> int:
    """The largest number of waves that a routing of ``num_ids`` slots may want."""
    return -(-min(num_experts, num_ids) // num_slots)
