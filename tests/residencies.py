"""Experts in host memory for tests of operators, and what their state should be."""

from __future__ import annotations

import torch

from moe_ops.pipeline.host_experts import store
from moe_ops.residency import Residency, StateLayout
from moe_ops.residency.state import CLOCK, HITS, MISSES, MISSING, RESIDENT, WAVES
from moe_ops.tensors import ExpertWeight, ExpertWeights


def residency(experts, slots, device, *, n=6, k=5, hidden=4):
    """Random weights of every kind of row: many bytes, odd bytes, one byte, and a bias."""
    g = torch.Generator().manual_seed(experts)

    def rows(*shape, dtype=torch.float32):
        x = torch.randn(experts, *shape, generator=g) * 50
        return x.to(dtype).to(device)

    first = ExpertWeight(rows(n, k), rows(n), rows(3, dtype=torch.uint8), None, rows())
    second = ExpertWeight(rows(hidden, n), rows(4096, 5, dtype=torch.int16))
    held = store(ExpertWeights(first, second), pinned=str(device).startswith("cuda"))
    return Residency(held.weights, slots, torch.device(device), "unquantized", held.memory)


def residency_of_weights(w1, w2, slots):
    """Slots on the device of two weights that are not quantized."""
    held = store(ExpertWeights(ExpertWeight(w1), ExpertWeight(w2)), pinned=w1.is_cuda)
    return Residency(held.weights, slots, w1.device, "unquantized", held.memory)


def decided(state, layout):
    """What `make_resident` decides, without what it leaves undefined, and bytes that are copied."""
    entries = state.tolist()
    missing = entries[MISSING]
    numbers = [entries[at] for at in (CLOCK, HITS, MISSES, WAVES, RESIDENT, MISSING)]
    lists = [entries[layout.held : layout.pending], entries[layout.place : layout.experts]]
    if missing:
        lists.append(entries[layout.pending : layout.place])
    lists += [entries[at : at + missing] for at in (layout.experts, layout.targets)]
    return numbers, lists


class Model:
    """Slots as a Python program would keep them."""

    def __init__(self, experts, slots):
        self.experts, self.slots, self.clock = experts, [None] * slots, 0
        self.used = [0] * slots
        self.hits = self.misses = self.waves = 0

    def call(self, wanted):
        """Run a call; returns for each wave the slots of its experts."""
        wanted, slots = sorted(wanted), len(self.slots)
        waves, todo = [{}], []
        for expert in wanted:
            if expert in self.slots:
                at = self.slots.index(expert)
                waves[0][expert], self.used[at] = at, self.clock
            else:
                todo.append(expert)
        self.hits += len(wanted) - len(todo)
        self.misses += len(todo)
        while todo:
            room = slots - len(waves[-1])
            if not room:
                waves.append({})
                room = slots
            taken, todo = todo[:room], todo[room:]
            if len(waves) == 1:
                free = [s for s in range(slots) if s not in waves[0].values()]
                old = [-1 if self.slots[s] is None else self.used[s] for s in range(slots)]
                free.sort(key=lambda slot: (old[slot], slot))
            else:
                free = range(slots)
            for expert, at in zip(taken, free, strict=False):
                waves[-1][expert] = at
                self.slots[at], self.used[at] = expert, self.clock
        self.waves += len(waves) if wanted else 0
        self.clock += 1
        return waves


def layout_of(owner):
    return StateLayout(owner.num_experts, owner.num_slots)
