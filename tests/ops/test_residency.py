"""Experts in host memory: who gets which slot in which wave, and that it is there by then."""

import random
from itertools import pairwise

import pytest
import torch
from conftest import HAS_CUDA, INTERPRETED
from residencies import (
    KERNELS,
    LEG,
    Model,
    decided,
    residency,
    residency_of_weights,
    serve,
    whole_weights,
)
from table_items import every_row

from moe_ops import ops
from moe_ops.dispatch.row_tiles import gemm_rule
from moe_ops.dispatch.tiles import plan_sizes, row_tile
from moe_ops.reference import residency as reference
from moe_ops.residency import OffloadStats, parse_amount, residency_of, waves_of
from moe_ops.residency.amount import Amount
from moe_ops.residency.state import ARRIVED
from moe_ops.tensors import ExpertWeight

STEPS = 50 if INTERPRETED else 10_000 if HAS_CUDA else 2000
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


def check_wave(owner, number, wave):
    """The rows of the current wave are those of the model, and hold the experts."""
    expected = [wave.get(expert, -1) for expert in range(owner.num_experts)]
    assert owner.row_maps[number].tolist() == expected
    for expert, slot in wave.items():
        for source, target in owner.pairs[number]:
            assert torch.equal(source[expert], target[slot].cpu())


@pytest.mark.kernel
@every_row(
    ("experts", "slots", "mapped"),
    [(8, 3, False), (12, 1, False), (20, 7, True), (9, 8, False), (5, 5, True)],
)
def test_slots_are_those_of_a_python_lru(experts, slots, mapped, device):
    """Random calls, thousands on a GPU, whose waves find their experts in the slots."""
    rng = random.Random(experts)
    owner, model = residency(experts, slots, device), Model(experts, slots)
    expert_map = None
    if mapped:
        places = rng.sample(range(2 * experts), experts)
        rows = [places.index(i) if i in places else -1 for i in range(2 * experts)]
        expert_map = torch.tensor(rows, dtype=torch.int32, device=device)
    at = owner.layout
    for step, ids in enumerate(routings(rng, experts, STEPS // 5)):
        ids = ids.to(device) if step % 3 else ids.clamp(-9, 2**31 - 1).to(device, torch.int32)
        halves = slots > 1 and step % 5 == 0
        most = slots // 2 if halves else slots
        waves = model.call(wanted_by(ids, expert_map, experts), most)
        for wave, following in pairwise(waves) if halves else ():
            assert not {*wave.values()} & {*following.values()}  # products of one run beside copies
        count = waves_of(experts, most, ids.numel())
        assert len(waves) <= count <= -(-experts // most)
        both = step % 2 == 0
        for number in (0, 1):
            for wave in range(count):
                if number == wave == 0 and both:
                    serve(owner, 0, ids, expert_map, weights=2, most=most)
                elif wave > 0 or not both:
                    serve(owner, number, ids, expert_map, wave, most=most)
                if step % 16 < 8 or INTERPRETED:
                    check_wave(owner, number, waves[wave] if wave < len(waves) else {})
            slot = owner.state[number, at.slot : at.last_use].tolist()
            assert [slot.index(i) for i in range(slots)] == model.slots
            assert sum(s >= 0 for s in slot) == slots
            used = owner.state[number, at.last_use : at.keys].tolist()
            assert used == [model.used.get(expert, -1) for expert in range(experts)]
            assert owner.state[number, ARRIVED] == 0
    copied = model.misses * owner.expert_bytes
    assert owner.stats() == OffloadStats(model.hits, model.misses, copied, model.waves)


@pytest.mark.kernel
def test_waves_of_half_of_the_slots(device):
    """Experts that are all there take as many waves, and nothing is copied."""
    owner, ids = residency(6, 4, device), torch.arange(4, device=device).view(2, 2)
    serve(owner, 0, ids)
    for wave, experts in enumerate(([0, 1], [2, 3], [])):
        serve(owner, 0, ids, None, wave, most=2)
        assert (owner.row_maps[0] >= 0).nonzero().flatten().tolist() == experts
    assert owner.stats()[:2] == (4, 4)


@pytest.mark.kernel
def test_the_kernel_decides_as_the_reference(device):
    rng = random.Random(0)
    for experts, slots in ((6, 2), (33, 17)):
        owner, other = residency(experts, slots, device), residency(experts, slots, "cpu")
        for step, ids in enumerate(routings(rng, experts, 24)):
            for wave in range(waves_of(experts, slots, ids.numel())):
                serve(owner, 0, ids.to(device), None, wave)
                reference.make_resident(other, 0, ids, None, wave)
                assert decided(owner) == decided(other)
            if step == 12:
                owner.empty_()
                other.empty_()


@pytest.mark.kernel
@pytest.mark.skipif(not KERNELS, reason="references read the plan of all experts")
def test_plans_of_waves(device):
    """Each wave has the tiles of its experts alone, and a wave without experts has none.

    In the last case there are more blocks of tiles than programs.
    """
    rows, g = torch.zeros(1, 1, device=device).bfloat16(), torch.Generator().manual_seed(0)
    cases = ((40, 9, 30, (70, 3)), (40, 9, 9, (70, 3)), (40, 9, 4, (70, 3)), (2, 1, 2, (14000, 1)))
    for experts, slots, wanted, shape in cases:
        owner, num_ids = residency(experts, slots, device), shape[0] * shape[1]
        ids = torch.randint(wanted, shape, generator=g, dtype=torch.int32).to(device)
        plan = ops.plan_slots(ids, None, experts, "unquantized", torch.bfloat16)
        rule = gemm_rule("unquantized", rows, [plan, ids, None])
        sizes, tile = plan_sizes(num_ids, experts, rule), row_tile(rule, num_ids, experts)
        number = int(plan[0]) // tile
        parts = [plan[at : at + number] for at in (sizes.experts_at, sizes.firsts_at)]
        tiles = [plan[4:][: number * tile].view(-1, tile), *parts]
        served = []
        for wave in range(waves_of(experts, slots, num_ids)):
            out = torch.full_like(plan, -7)
            LEG.make_resident(
                owner, 1, (plan, ids, None), tile, wave, [(out, ids, None)], most=slots
            )
            mine = (owner.row_maps[1][tiles[1]] >= 0).nonzero().flatten()
            served += mine.tolist()
            assert out[0] == len(mine) * tile
            if len(mine):
                assert torch.equal(out[1:4], plan[1:4])
            assert torch.equal(out[4:][: len(mine) * tile].view(-1, tile), tiles[0][mine])
            expected = (owner.row_maps[1][tiles[1][mine]], tiles[2][mine])
            for at, values in zip((sizes.experts_at, sizes.firsts_at), expected, strict=True):
                assert torch.equal(out[at : at + len(mine)], values)
        assert sorted(served) == [*range(number)]


@pytest.mark.kernel
@pytest.mark.skipif(not KERNELS, reason="references take rows of experts")
@pytest.mark.parametrize("is_mapped", [False, True])
def test_maps_beside_plans(is_mapped, device):
    """A kernel of one token reads ids, though so many slots of few experts have a plan."""
    owner, ids = residency(9, 5, device), torch.tensor([[8, 2, 5, 0]], device=device)
    expert_map = torch.arange(9, device=device, dtype=torch.int32).flip(0) if is_mapped else None
    plan = ops.plan_slots(ids, expert_map, 9, "unquantized", torch.bfloat16)
    tiles = plan, ids, expert_map
    out = LEG.tiles_in_rows(owner, 0, tiles)
    LEG.make_resident(owner, 0, tiles, 16, 0, out, most=5)
    for (_, _, mapped), rows in zip(out, owner.row_maps, strict=True):
        assert torch.equal(mapped[ids], rows[8 - ids if is_mapped else ids])
        assert mapped[ids].unique().numel() == 4
    for _, _, mapped in LEG.tiles_in_rows(owner, 0, tiles, overlapping=True):
        assert mapped is expert_map  # the next wave overwrites rows


@pytest.mark.kernel
def test_products_of_calls_that_are_interleaved(device):
    """Another call may come between both products: the second then sees to its own experts."""
    g = torch.Generator().manual_seed(0)
    w1, w2 = (torch.randn(6, *s, generator=g).to(device) / 8 for s in ((32, 16), (16, 16)))
    owner = residency_of_weights(ExpertWeight(w1), ExpertWeight(w2), 2)
    calls = []
    for _ in range(3):
        x = torch.randn(5, 16, generator=g).to(device)
        ids = torch.rand(5, 6, generator=g).argsort(1)[:, :2].to(device, torch.int32)
        tiles = [ops.plan_slots(ids, None, 6, "unquantized", x.dtype), ids, None]
        calls.append((x, tiles))

    def product(a, number, tiles, *rest):
        weights = [(w1, w2)[number]], whole_weights(owner)[number]
        whole, out = (ops.expert_product(a, None, w, None, tiles, *rest) for w in weights)
        assert torch.equal(out, whole)
        return whole

    def first(call):
        return product(call[0], 0, call[1], 2, "unquantized", w1.dtype, "silu", True)

    def second(h, call):
        product(h, 1, call[1], 1, "unquantized", w1.dtype, "", True)

    products = [first(call) for call in calls]
    assert all(x is None or x.data_ptr() % 16 == 0 for x in (owner.ahead or [[]])[-1])
    for h, call in zip(products, calls, strict=True):
        second(h, call)
        second(h, call)
    for call in calls:
        second(first(call), call)
    for number in (2, 1, 2):
        second(products[number], calls[number])
    owner.empty_()
    second(products[2], calls[2])


def test_a_table_is_found_by_itself_alone(device):
    owner = residency(4, 2, device)
    assert [residency_of(table) for table in owner.tables] == [(owner, 0), (owner, 1)]
    with pytest.raises(ValueError, match="must be one of `tables` of a Residency"):
        residency_of(owner.tables[0].clone())


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
