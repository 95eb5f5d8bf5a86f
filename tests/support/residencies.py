"""Experts in host memory for tests of operators, and what their state should be."""

from __future__ import annotations

import importlib

import torch
from legs import HAS_CUDA, INTERPRETED

from moe_ops.pipeline import host_experts
from moe_ops.pipeline.host_experts import store
from moe_ops.residency import Residency
from moe_ops.residency.state import CLOCK, HITS, LEFT, MISSES, WAVES
from moe_ops.tensors import ExpertWeight, ExpertWeights

KERNELS = HAS_CUDA or INTERPRETED
LEG = importlib.import_module(f"moe_ops.{'kernels' if KERNELS else 'reference'}.residency")
if INTERPRETED:  # fewer programs, which share the work, take less time
    LEG.PROGRAMS = 6


def residency(experts, slots, device, *, n=6, k=5, hidden=4):
    """Random weights of every kind of row: many bytes, odd bytes, one byte, and a bias."""
    g = torch.Generator().manual_seed(experts)

    def rows(*shape, dtype=torch.float32):
        x = torch.randn(experts, *shape, generator=g) * 50
        return x.to(dtype).to(device)

    first = ExpertWeight(rows(n, k), rows(n), rows(3, dtype=torch.uint8), None, rows())
    second = ExpertWeight(rows(hidden, n), rows(4096, 5, dtype=torch.int16))
    held = store(ExpertWeights(first, second), pinned=str(device).startswith("cuda"))
    return Residency(held.weights, slots, torch.device(device), held.memory)


def residency_of_weights(first, second, slots):
    """Slots on the device of two weights, which lie there."""
    device = first.data.device
    held = store(ExpertWeights(first, second), pinned=first.data.is_cuda)
    return Residency(held.weights, slots, device, held.memory)


def whole_weights(owner):
    """Both weights as operators take them: all experts, which are in host memory."""
    both = zip(owner.slots, owner.tables, strict=True)
    return [[*host_experts.whole(slots, table, owner.num_experts)] for slots, table in both]


def serve(owner, number, ids, expert_map=None, wave=0, weights=1, *, most=None):
    """Make the experts of a wave resident, by the kernel if there is one."""
    if not KERNELS:
        for each in range(number, number + weights):
            LEG.make_resident(owner, each, ids, expert_map, wave, most)
        return
    tiles = None, ids, expert_map
    out = LEG.tiles_in_rows(owner, number, tiles)[:weights]
    LEG.make_resident(owner, number, tiles, 16, wave, out, most=most or owner.num_slots)


def decided(owner, number=0):
    """What a wave decides: numbers, and the slot, the last use and the row of each expert."""
    state, at = owner.state[number].tolist(), owner.layout
    numbers = [state[entry] for entry in (CLOCK, LEFT, HITS, MISSES, WAVES)]
    return numbers, state[at.slot : at.keys], owner.row_maps[number].tolist()


class Model:
    """Slots as a Python program would keep them."""

    def __init__(self, experts, slots):
        self.slots = [*range(slots)]  # the expert of each slot
        self.used = {}  # the clock of the last wave with an expert, whose slot held it then
        self.clock = self.hits = self.misses = self.waves = 0

    def call(self, wanted, most=None):
        """Run a call; returns for each wave the slots of its experts."""
        todo, waves, most = sorted(wanted), [], most or len(self.slots)
        while todo or not waves:
            there = [e for e in todo if e in self.slots and e in self.used]
            wave = there[:most]
            self.hits += len(wave)
            gains = [e for e in todo if e not in there][: most - len(wave)]
            self.misses += len(gains)
            wave += gains
            for expert in gains:
                if expert not in self.slots:
                    free = [i for i, e in enumerate(self.slots) if e not in wave]
                    oldest = min(free, key=lambda i: (self.used.get(self.slots[i], -1), i))
                    self.slots[oldest] = expert
            self.used.update(dict.fromkeys(wave, self.clock))
            self.clock += 1
            self.waves += bool(wave)
            waves.append({expert: self.slots.index(expert) for expert in wave})
            todo = [e for e in todo if e not in wave]
        return waves
