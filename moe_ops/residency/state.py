"""The state of a weight's slots: int64 entries on the device, which products change.

A call runs in waves. A wave serves wanted experts that no wave of the call has served: in the first
wave all that are resident, and then the first missing ones in the order of experts, K in all (or
half as many, so that copies for one wave may run beside the products of the wave before). A missing
expert takes the slot of the expert that was used longest ago and is not in the wave. (All slots
have experts, from the beginning on. They hold the experts' numbers once these are used.)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

CLOCK, BEGUN, LEFT, ARRIVED, HITS, MISSES, BYTES, WAVES, MIRROR, HEADER = range(10)
"""Entries at the beginning of a state: waves so far; that number when the call began; experts that
the call wants after the current wave; programs of the current launch that have read the state; four
counters; the address of a copy of the counters that the host reads (0: none). Then come the parts:
see `StateLayout`."""
COUNTERS = 4
"""Number of counters, which begin at `HITS`."""
IDS_OF_HALVES = 8
"""Slots an expert from which on a call on a GPU has waves of half of the slots."""


class OffloadStats(NamedTuple):
    """What the slots of a layer, or of all layers of a model, have done so far."""

    hits: int
    """Experts that a call wanted and a slot held: at most one an expert, layer and call."""
    misses: int
    """Experts that a call wanted and that were copied from host memory."""
    bytes_copied: int
    """Bytes copied from host memory."""
    waves: int
    """Waves of calls. On a GPU a call with many tokens has waves of half of the slots; any other
    has one wave if it wants no more experts than there are slots."""

    @property
    def hit_rate(self) -> float:
        """Hits over hits and misses; 1 before the first call."""
        wanted = self.hits + self.misses
        return self.hits / wanted if wanted else 1.0


class StateLayout(NamedTuple):
    """Offsets of the parts of a state, in entries."""

    num_experts: int
    """E, experts of the rank."""
    num_slots: int
    """K."""

    @property
    def slot(self) -> int:
        """``(E,)``: the slot of each expert, -1: none."""
        return HEADER

    @property
    def last_use(self) -> int:
        """``(E,)``: the clock of each expert's last wave; -1: none since the store changed."""
        return HEADER + self.num_experts

    @property
    def keys(self) -> int:
        """``(E,)``, scratch: experts that may lose their slots lose them in the order of keys."""
        return HEADER + 2 * self.num_experts

    @property
    def experts(self) -> int:
        """``(K,)``, scratch: the experts that the current wave copies."""
        return HEADER + 3 * self.num_experts

    @property
    def targets(self) -> int:
        """``(K,)``, scratch: the slots that these experts are copied to."""
        return self.experts + self.num_slots

    @property
    def freed(self) -> int:
        """``(K,)``, scratch: the slots that experts lose."""
        return self.targets + self.num_slots

    @property
    def rows(self) -> int:
        """int32 ``(E,)``: the slot of each expert of the current wave, -1 of the others."""
        end = self.freed + self.num_slots
        return end + end % 2  # aligned to 16 bytes

    @property
    def length(self) -> int:
        """The number of entries of a weight's state."""
        end = self.rows + (self.num_experts + 1) // 2
        return end + end % 2

    def rows_of(self, state: Tensor) -> Tensor:
        """The part `rows` of a state."""
        return state.view(torch.int32).narrow(0, 2 * self.rows, self.num_experts)

    def new_state(self, mirror: int = 0) -> Tensor:
        """A state in which no expert is resident, on the host."""
        state = torch.zeros(self.length, dtype=torch.int64, device="cpu")
        state[MIRROR] = mirror
        state[self.slot : self.last_use] = -1
        state[self.slot : self.slot + self.num_slots] = torch.arange(self.num_slots, device="cpu")
        self.empty_(state)
        return state

    def empty_(self, state: Tensor) -> None:
        """Forget the experts in the slots; counters stay."""
        state[..., self.last_use : self.keys].fill_(-1)


def waves_of(num_experts: int, num_slots: int, num_ids: int) -> int:
    """The largest number of waves that a routing of ``num_ids`` slots may want."""
    return -(-min(num_experts, num_ids) // num_slots)


def wave_slots(num_experts: int, num_slots: int, num_ids: int) -> int:
    """The most experts of a wave, on a GPU, in a routing of ``num_ids`` slots."""
    streams = num_ids >= IDS_OF_HALVES * num_experts and num_slots > 1
    return num_slots // 2 if streams else num_slots
