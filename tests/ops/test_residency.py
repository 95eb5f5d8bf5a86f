"""Experts in host memory: who gets which slot in which wave, and that it is there by then."""

import random

import pytest
import torch
from conftest import INTERPRETED
from residencies import Model, decided, layout_of, residency
from table_items import every_row

from moe_ops import ops
from moe_ops.reference import residency as reference
from moe_ops.residency import OffloadStats, parse_amount, residency_of, waves_of
from moe_ops.residency.amount import Amount

STEPS = 80 if INTERPRETED else 10_000
HOSTILE = (-1, -(2**40), 2**31 + 1, 2**32)


def routings(rng, experts, steps):
    """Ids of every kind: few, repeated, hot, all experts, cyclic, alternating, padding, no expert.

    Yields:
        ``(T, k)`` ids.
    """
    hot = rng.sample(range(experts), max(1, experts // 4))
    for step in range(steps):
        kind, k = step % 8, rng.randint(1, 4)
        tokens = rng.choice((1, 1, 2, 7))
        chosen = {
            0: lambda _: rng.randrange(experts),
            1: lambda _: rng.choice(hot),
            2: lambda i: i % experts,
            3: lambda i, step=step: (step + i) % experts,
            4: lambda _: hot[0],
            5: lambda _: rng.choice((*HOSTILE, experts, rng.randrange(experts))),
            6: lambda _: rng.choice(HOSTILE),
            7: lambda i, odd=step // 8 % 2: odd * (experts // 2) + i % (experts // 2 + 1),
        }[kind]
        if kind == 2:
            tokens = -(-experts // k)
        yield torch.tensor([[chosen(t * k + j) for j in range(k)] for t in range(tokens)])


def wanted_by(ids, expert_map, experts):
    size = experts if expert_map is None else len(expert_map)
    known = [i for i in ids.flatten().tolist() if 0 <= i < size]
    if expert_map is not None:
        known = [int(expert_map[i]) for i in known]
    return {i for i in known if 0 <= i < experts}


def check_wave(owner, wave):
    """The rows of the current wave are those of the model, and hold the experts."""
    expected = [wave.get(expert, -1) for expert in range(owner.num_experts)]
    assert owner.row_map.tolist() == expected
    for expert, slot in wave.items():
        for source, target in owner.pairs:
            assert torch.equal(source[expert], target[slot].cpu())


@pytest.mark.kernel
@every_row(
    ("experts", "slots", "mapped"),
    [(8, 3, False), (12, 1, False), (20, 7, True), (9, 8, False), (5, 5, True)],
)
def test_slots_are_those_of_a_python_lru(experts, slots, mapped, device):
    """Thousands of random calls, whose waves find their experts in the slots."""
    rng = random.Random(experts)
    owner, model = residency(experts, slots, device), Model(experts, slots)
    expert_map = None
    if mapped:
        places = rng.sample(range(2 * experts), experts)
        rows = [places.index(i) if i in places else -1 for i in range(2 * experts)]
        expert_map = torch.tensor(rows, dtype=torch.int32, device=device)
    sizes, at = (experts, slots), layout_of(owner)
    for step, ids in enumerate(routings(rng, experts, STEPS // 5)):
        ids = ids.to(device) if step % 3 else ids.clamp(-9, 2**31 - 1).to(device, torch.int32)
        waves = model.call(wanted_by(ids, expert_map, experts))
        ops.make_resident(ids, expert_map, owner.state, *sizes)
        count = waves_of(*sizes, ids.numel())
        assert len(waves) <= count <= -(-experts // slots)
        for wave in range(count):
            for number, table in enumerate(owner.tables):
                last = number == 1 and wave == count - 1
                ops.copy_experts(table, owner.state, *sizes, wave, last)
            if step % 16 < 8 or INTERPRETED:
                check_wave(owner, waves[wave] if wave < len(waves) else {})
        held = owner.state[at.held : at.last_use].tolist()
        assert held == [-1 if expert is None else expert for expert in model.slots]
        assert owner.state[at.last_use : at.pending].tolist() == model.used
    copied = model.misses * owner.expert_bytes
    assert owner.stats() == OffloadStats(model.hits, model.misses, copied, model.waves)


@pytest.mark.kernel
def test_the_kernel_decides_as_the_reference(device):
    rng = random.Random(0)
    for experts, slots in ((6, 2), (33, 17)):
        owner = residency(experts, slots, device)
        state, at = owner.state.cpu(), layout_of(owner)
        for ids in routings(rng, experts, 24):
            ops.make_resident(ids.to(device), None, owner.state, experts, slots)
            reference.make_resident(ids, None, state, experts, slots)
            assert decided(owner.state, at) == decided(state, at)
            count = waves_of(experts, slots, ids.numel())
            ops.copy_experts(owner.table, owner.state, experts, slots, count - 1, True)
            if int(state[7]):
                state[at.held : at.last_use] = state[at.pending : at.place]


@pytest.mark.kernel
def test_a_call_that_stops_in_the_middle_leaves_no_wrong_expert(device):
    """Slots that were to change hold nothing until all is copied."""
    owner = residency(8, 3, device)
    at, sizes = layout_of(owner), (8, 3)

    def held():
        return owner.state[at.held : at.last_use].tolist()

    ops.make_resident(torch.tensor([[1, 4]], device=device), None, owner.state, *sizes)
    assert held() == [-1, -1, -1]
    ops.copy_experts(owner.table, owner.state, *sizes, 0, True)
    assert held() == [1, 4, -1]
    ops.make_resident(torch.tensor([[4, 5, 6]], device=device), None, owner.state, *sizes)
    ops.copy_experts(owner.tables[0], owner.state, *sizes, 0, False)
    assert held() == [-1, 4, -1]  # slot 0 has the first weight of expert 6 alone
    ops.make_resident(torch.tensor([[4, 1, 5]], device=device), None, owner.state, *sizes)
    ops.copy_experts(owner.table, owner.state, *sizes, 0, True)
    assert held() == [1, 4, 5]
    check_wave(owner, {1: 0, 4: 1, 5: 2})


def test_a_table_is_found_by_itself_alone(device):
    owner = residency(4, 2, device)
    assert [residency_of(table) for table in owner.tables] == [(owner, 0), (owner, 1)]
    with pytest.raises(ValueError, match="table must be one of `tables` of a Residency"):
        residency_of(owner.table.clone())


SMALL = Amount(64, 4, 10**8)


@every_row(
    ("value", "counts"),
    [
        (4, [4, 4]), (64, [64, 64]), (0.5, [32, 32]), (1.0, [64, 64]), (1e-9, [4, 4]),
        ("6.4GB", [32, 32]), ("6.5 GB", [32, 32]), ("12.8GB", [64, 64]), ("900GB", [64, 64]),
        ("0.8GB", [4, 4]),
    ],
)  # fmt: skip
def test_amounts(value, counts):
    assert parse_amount("resident", value, [SMALL, SMALL]) == counts


def test_amounts_of_layers_that_differ():
    """A size gives each layer the same share, and k is at most the rank's experts."""
    layers = [SMALL, Amount(8, 4, 10**9), Amount(2, 4, 10**6)]
    assert parse_amount("resident", 0.5, layers) == [32, 4, 2]
    assert parse_amount("resident", "7.3GB", layers) == [32, 4, 2]


@every_row(
    ("value", "error", "text"),
    [
        (3, ValueError, "resident must be an int from top_k = 4 to 64 experts, got 3"),
        (65, ValueError, "to 64 experts, got 65"),
        (0.0, ValueError, r"a float in \(0, 1\]"),
        (1.01, ValueError, r"a float in \(0, 1\]"),
        (float("nan"), ValueError, "got nan"),
        ("0.1GB", ValueError, "room for top_k experts of each layer, 0.40GB, got '0.1GB'"),
        ("20", ValueError, 'a size such as "20GB"'),
        ("20GiB", ValueError, "got '20GiB'"),
        ("-1GB", ValueError, "got '-1GB'"),
        (True, TypeError, "got bool"),
        (None, TypeError, "got NoneType"),
    ],
)
def test_amounts_outside_their_range(value, error, text):
    with pytest.raises(error, match=text):
        parse_amount("resident", value, [SMALL])
