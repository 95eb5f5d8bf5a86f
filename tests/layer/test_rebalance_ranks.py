"""Balancing over the ranks of a group: rows travel between processes, over gloo."""

import gc
import pickle
import weakref
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from ranks import spawn

import moe_ops
from moe_ops import EplbState
from moe_ops.parallel.agreement import agree
from moe_ops.parallel.rebalance import keep_rows
from moe_ops.parallel.rounds import Spread, choose_sources, plan_rounds
from moe_ops.parallel.travel import RowExchange

LAYERS, EXPERTS, REDUNDANT, GROUPS = 3, 12, 4, 4
PHYSICAL = EXPERTS + REDUNDANT
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


@st.composite
def spread_placements(draw):
    """Two placements over ranks, the new one of experts that the old one has; some rows empty."""
    ranks, rows = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    size = ranks * rows
    old = draw(st.lists(st.integers(-1, 9), min_size=size, max_size=size))
    held = sorted({expert for expert in old if expert >= 0} | {-1})
    new = draw(st.permutations(old) | st.lists(st.sampled_from(held), min_size=size, max_size=size))
    nodes = draw(st.sampled_from([n for n in range(1, ranks + 1) if ranks % n == 0]))
    return old, list(new), Spread(rows, ranks, nodes), draw(st.integers(1, 3))


@given(case=spread_placements())
def test_rounds(case):
    """Rounds lead to the new placement, with no more rows in flight than there is room for."""
    old, new, spread, limit = case
    rows, aside, waiting = list(old), {}, None
    written = []
    for row, copies in plan_rounds(*case):
        if row is not None:
            assert waiting is None, "one row at a time is aside"
            aside[~row], waiting = rows[row], ~row
        read = {copy: (aside if copy.source < 0 else rows)[copy.source] for copy in copies}
        sent = {c.source for c in copies if spread.rank(c.source) != spread.rank(c.target)}
        busy = Counter(map(spread.rank, sent)), Counter(spread.rank(t) for t, _ in copies)
        assert max([*busy[0].values(), *busy[1].values()]) <= limit
        for copy, expert in read.items():
            rows[copy.target] = expert
            written.append(copy.target)
            if copy.source == waiting:
                waiting = None
    assert all(expert in (-1, row) for expert, row in zip(new, rows, strict=True))
    changed = [row for row, expert in enumerate(new) if expert >= 0 and expert != old[row]]
    assert sorted(written) == changed and waiting is None


def test_rounds_take_near_rows_and_idle_ranks():
    spread = Spread(2, 4, 2)
    old, new = [0, 1, 0, 2, 0, 3, 0, 4], [0, 1, 0, 2, 0, 0, 0, 0]
    ((_, copies),) = plan_rounds(old, new, spread, 2)
    assert sorted(copies) == [(5, 4), (7, 6)]  # from the rank itself
    old, new = [0, 1, 2, 3, 0, 4, 5, 6], [0, 1, 0, 3, 0, 4, 0, 0]
    ((_, copies),) = plan_rounds(old, new, spread, 2)
    assert sorted(copies) == [(2, 0), (6, 4), (7, 4)]  # from the same node


@pytest.mark.parametrize(
    ("new", "expected"),
    [
        ([0, 1, 0, 2, 0, 5, 0, 6], {4: 0, 6: 2}),  # the lower row, then the rank that is idle
        ([0, 1, 5, 2, 0, 5, 0, 6], {2: 5, 4: 0, 6: 2}),  # rather a row that stays
        ([0, 1, 0, 5, 0, 0, 4, 0], {3: 5, 4: 0, 5: 2, 7: 0}),  # rank 2 sends, ranks 0 and 1 do not
        ([0, 0, 0, 2, 0, 5, 4, 6], {1: 0, 4: 0}),  # a rank that copies its own row sends nothing
    ],
)
def test_ties_of_sources(new, expected):
    """Expert 0 is in rows 0 and 2, on ranks 0 and 1."""
    assert choose_sources([0, 1, 0, 2, 3, 5, 4, 6], new, Spread(2, 4)) == expected


def test_rounds_of_a_permutation_use_every_rank():
    """Every rank sends and receives its two rows at once; with less room a cycle is opened."""
    spread, old = Spread(2, 4), list(range(8))
    new = old[2:] + old[:2]
    ((aside, copies),) = plan_rounds(old, new, spread, 2)
    assert aside is None and len(copies) == 8
    ring = old[1:] + old[:1]
    first, *others = plan_rounds(old, ring, spread, 1)
    assert first.aside == 0 and {r.aside for r in others} == {None} and len(others) < 6
    assert plan_rounds([0, 1], [1, 0], Spread(1, 2), 1) == [(None, [(0, 1), (1, 0)])]
    ((_, copies),) = plan_rounds([0, 1, 2, 3], [0] * 4, Spread(1, 4), 1)
    assert copies == [(1, 0), (2, 0), (3, 0)]  # a row counts once, wherever it goes
    with pytest.raises(ValueError, match="limit must be at least 1, got 0"):
        plan_rounds(old, new, spread, 0)
    with pytest.raises(ValueError, match="experts of old_phy2log only, got 9"):
        plan_rounds(old, [9, *old[1:]], spread, 1)


@given(
    old=st.permutations([0, 1, 2, 3, 4, 5, 0, 1]), new=st.permutations([0, 1, 2, 3, 4, 5, 2, 2]),
    gpus=st.sampled_from([1, 2, 4]),
)  # fmt: skip
def test_experts_that_stay_keep_their_rows(old, new, gpus):
    kept = keep_rows(torch.tensor([old]), torch.tensor([new]), gpus)[0]
    for mine, held, wanted in zip(
        kept.chunk(gpus), torch.tensor(old).chunk(gpus), torch.tensor(new).chunk(gpus), strict=True
    ):
        assert torch.equal(mine.sort().values, wanted.sort().values)
        shared = Counter(held.tolist()) & Counter(wanted.tolist())
        assert int((mine == held).sum()) == shared.total()


def tensors_of(experts, layer):
    """One row for each expert in tensors of several dtypes and layouts."""
    g = torch.Generator().manual_seed(layer)
    wide = torch.randn(EXPERTS, 6, 4 + layer, generator=g)[experts]
    return [
        wide.to(BF16),
        wide.to(FP8),
        (wide * 40).to(torch.uint8),
        wide.transpose(1, 2).contiguous().transpose(1, 2),
        wide[:, 0, 0].clone(),
        (wide[:, :1] > 0),
        torch.nn.Parameter(wide[:, :, 1].clone()),
    ]


def loads_of(rank, number):
    g = torch.Generator().manual_seed(100 * number + rank)
    return torch.randint(0, 1000, (LAYERS, PHYSICAL), generator=g, dtype=torch.int32)


def same(a, b):
    return all(torch.equal(x.float(), y.float()) for x, y in zip(a, b, strict=True))


def check_rows_travel(rank, ranks):
    """Three times: placements, loads and rows are those of one process with all experts."""
    each = PHYSICAL // ranks
    mine = slice(rank * each, (rank + 1) * each)
    whole = EplbState.make(LAYERS, EXPERTS, REDUNDANT, ranks)
    state = EplbState.make(LAYERS, EXPERTS, REDUNDANT, group=dist.group.WORLD)
    held = [tensors_of(p, i) for i, p in enumerate(whole.physical_to_logical_map)]
    own = [[x.detach()[mine].clone() for x in tensors] for tensors in held]
    addresses = [x.data_ptr() for tensors in own for x in tensors]
    moved = 0
    for number in range(3):
        state.expert_load.copy_(loads_of(rank, number))
        whole.expert_load.copy_(sum(loads_of(r, number) for r in range(ranks)))
        assert torch.equal(state.logical_load(), whole.logical_load())
        before = state.physical_to_logical_map.clone()
        nodes = 2 if number == 1 else 1
        whole.rebalance_(held, GROUPS, nodes, ranks)
        state.rebalance_(own, GROUPS, nodes, ranks, rows_in_flight=1 + number)
        assert all(map(torch.equal, state, whole))
        moved += int((before != state.physical_to_logical_map).sum())
        for layer, tensors in enumerate(own):
            experts = state.physical_to_logical_map[layer, mine]
            assert same(tensors, tensors_of(experts, layer)), (number, layer)
    assert moved > PHYSICAL
    assert addresses == [x.data_ptr() for tensors in own for x in tensors]


def check_steps(rank, ranks):
    """After every step the rows of every layer are what its maps say; the rest comes later."""
    each = PHYSICAL // ranks
    mine = slice(rank * each, (rank + 1) * each)
    state = EplbState.make(LAYERS, EXPERTS, REDUNDANT, group=dist.group.WORLD)
    first = state.physical_to_logical_map.clone()
    own = [tensors_of(p[mine], i) for i, p in enumerate(first)]
    state.expert_load.copy_(loads_of(rank, 7))
    steps = state.rebalance_steps(own, 1, 1, ranks)
    assert torch.equal(state.physical_to_logical_map, first)
    for done in steps:
        for layer, placed in enumerate(state.physical_to_logical_map):
            assert same(own[layer], tensors_of(placed[mine], layer))
            assert torch.equal(placed, first[layer]) == (layer > done)
            for expert, places in enumerate(state.logical_to_physical_map[layer]):
                count = int(state.logical_replica_count[layer, expert])
                assert (placed[places[:count]] == expert).all() and (places[count:] == -1).all()
        assert not state.expert_load[: done + 1].any()
        if done == 1:
            break  # not used up: the next balancing goes on from here
    state.expert_load.copy_(loads_of(rank, 8))
    state.rebalance_(own, 1, 1, ranks)
    for layer, placed in enumerate(state.physical_to_logical_map):
        assert same(own[layer], tensors_of(placed[mine], layer))


def check_errors(rank, ranks):
    """What one rank gets wrong raises on all of them, and nothing has changed."""
    each, last = PHYSICAL // ranks, ranks - 1
    state = EplbState.make(1, EXPERTS, REDUNDANT, group=dist.group.WORLD)
    state.expert_load.copy_(loads_of(rank, 1)[:1])
    weight = torch.arange(float(each))[:, None]
    before = [x.clone() for x in (*state, weight)]

    def refused(error, own, others, weights, *numbers, **more):
        """``own`` is the message of the last rank, ``others`` that of the rest."""
        message = own if rank == last else others
        with pytest.raises(error if rank == last else ValueError, match=message):
            state.rebalance_(weights, *numbers, **more)
        assert all(map(torch.equal, (*state, weight), before))

    good = (1, 1, ranks)
    wrong = [[weight, weight[1:].clone()]] if rank == last else [[weight]]
    rule = rf"len\(weights\[0\]\[1\]\) must be the number of physical experts of a rank = {each}"
    refused(ValueError, rule, f"failed on rank {last} of the group: len", wrong, *good)
    wrong = [[weight, None]] if rank == last else [[weight]]
    refused(TypeError, "must be a Tensor", f"failed on rank {last}.*must be a Tensor", wrong, *good)
    wrong = [[weight.double() if rank == last else weight]]
    refused(ValueError, *["the rows of weights.0. must be the same on every"] * 2, wrong, *good)
    wrong = 2 if rank == last else 1
    refused(ValueError, *["num_groups must be the same on every"] * 2, [[weight]], wrong, 1, ranks)
    refused(ValueError, *["num_gpus must be the number of ranks"] * 2, [[weight]], 1, 1, ranks + 1)
    refused(ValueError, *["must be a multiple of num_groups = 5"] * 2, [[weight]], 5, 1, ranks)
    refused(ValueError, *["must be at least 1"] * 2, [[weight]], *good, rows_in_flight=0)
    trained = torch.nn.Parameter(weight.clone())
    moe_ops.parallel.trained.watch([trained])
    if rank == last:
        trained.sum().backward()
        trained.grad = None
    rule = "weights.0..0. must not be trained while its rows move"
    refused(NotImplementedError, rule, rule, [[trained]], *good)
    for load in (state.expert_load, before[1]):
        load[0, 2] = -3 if rank == last else 2**31 - 1
    rule = "expert_load must not be negative on any rank, got 1 negative numbers"
    refused(ValueError, *[rule] * 2, [[weight]], *good)
    with pytest.raises(ValueError, match=f"ep_size must be the number of ranks of .* = {ranks}"):
        EplbState.make(1, EXPERTS, REDUNDANT, ranks + 1, group=dist.group.WORLD)
    state.physical_to_logical_map[0, 0] += rank == last
    with pytest.raises(ValueError, match="digest of physical_to_logical_map must be the same"):
        state.rebalance_([[weight]], *good)


def check_group(rank, ranks):
    """A group of some of the processes, and any form of a group."""
    halves = [dist.new_group([r for r in range(ranks) if r % 2 == i]) for i in range(2)]
    group = halves[rank % 2]
    rows = EXPERTS // group.size()
    for form in (
        group,
        group.group_name,
        moe_ops.pipeline.exchange.groups.RankGroup.resolve(group),
    ):
        state = EplbState.make(1, EXPERTS, 0, group=form)
        assert pickle.loads(pickle.dumps(state)).group_name == group.group_name
        mine = slice(group.rank() * rows, (group.rank() + 1) * rows)
        weight = state.physical_to_logical_map[0, mine].clone()
        state.expert_load.copy_(loads_of(rank, 3)[:1, :EXPERTS])
        state.rebalance_([[weight]], 1, 1, group.size())
        assert torch.equal(weight, state.physical_to_logical_map[0, mine])


class Kept:
    """Something that a frame holds."""


def test_an_error_that_was_caught_keeps_nothing():
    """A layer that its traceback kept would keep windows, which the other ranks free."""
    seen = []

    def fail():
        kept = Kept()
        seen.append(weakref.ref(kept))
        raise ValueError("as a check does")

    gc.disable()  # cycles stay
    try:
        with pytest.raises(ValueError, match="as a check does") as caught:
            agree(lambda text: [text], fail)
        del caught
        assert seen[0]() is None
    finally:
        gc.enable()


def check_rows_for_several(rank, ranks):
    """A row that goes to two ranks takes one place among the two that leave at a time."""
    old, new = [*range(2 * ranks)], [0, 1, 0, 3, 0, 1, *range(6, 2 * ranks)]
    weight = torch.tensor(old[2 * rank : 2 * rank + 2])
    spread, where = Spread(2, ranks), torch.device("cpu")
    RowExchange(dist.group.WORLD, spread, [[weight]], 2, where).move(0, old, new)
    assert weight.tolist() == new[2 * rank : 2 * rank + 2]


def check(rank, ranks):
    check_rows_travel(rank, ranks)
    check_steps(rank, ranks)
    check_errors(rank, ranks)
    if ranks == 4:
        check_group(rank, ranks)
        check_rows_for_several(rank, ranks)


@pytest.mark.parametrize("ranks", [2, 4])
def test_balancing_over_ranks(ranks):
    spawn(check, ranks)
