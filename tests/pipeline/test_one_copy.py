"""Exchanges that send one copy to each rank of a token's experts: simulated ranks, against one."""

import threading
from functools import partial

import pytest
import torch
from exchanges import World
from hypothesis import given, settings
from hypothesis import strategies as st
from modular import roundings as rounds
from modular import setup
from pairwise import half_exhaustive
from ranks import mine

import moe_ops
from moe_ops.parallel import determine_expert_ranks
from moe_ops.pipeline.exchange import messages
from moe_ops.pipeline.exchange.groups import RankGroup
from moe_ops.pipeline.exchange.replicas import ReplicaExchange
from moe_ops.testing import (
    ROUTINGS,
    Problem,
    assert_layer_matches,
    bounded_oracle,
    run_ranks,
)

ALL = moe_ops.pipeline.AllGatherPrepareAndFinalize
EXACT = moe_ops.pipeline.ExactAllToAllPrepareAndFinalize
FIXED = moe_ops.pipeline.FixedCapacityPrepareAndFinalize
SCHEMES = (
    "unquantized", "fp8_tensor", "fp8_tensor_static", "fp8_channel", "fp8_block128", "int8_tensor",
    "mxfp4_mxfp8", "nvfp4", "int4_w4a16_g32",
)  # fmt: skip


def skewed(tokens, ranks):
    """Counts of ranks: none for every third one, and most for the last one."""
    counts = [0 if rank % 3 == 1 else rank % 3 + 1 for rank in range(ranks)]
    counts[-1] += max(0, tokens - sum(counts))
    return counts


MANY = [(8, 20, 3, "uniform"), (16, 33, 10, "skewed"), (64, 257, 10, "uniform")]
"""Ranks, experts, experts of a token and routing."""


@pytest.mark.parametrize(
    ("sizes", "scheme"),
    half_exhaustive(MANY, ["unquantized", "fp8_block128", "fp8_tensor"]),
    ids=str,
)
def test_many_ranks(sizes, scheme):
    """Bitwise what gathered tokens give, which is bitwise what one process computes."""
    ranks, num_experts, top_k, routing = sizes
    counts = skewed(40, ranks)
    problem = Problem(
        sum(counts), num_experts, top_k, 64, 32, torch.bfloat16, routing=routing, scheme=scheme
    )
    s = setup(problem, moe_ops.pipeline.TritonExperts)
    world = World(s, determine_expert_ranks(ranks, num_experts), counts)
    gathered = world.results(lambda group: ALL(group, max(counts)))
    whole = torch.cat(gathered)
    assert torch.equal(whole, world.expected())
    roundings = rounds(world.kind, problem)
    exact = bounded_oracle(problem, s.exact, s.config, roundings)
    assert_layer_matches(whole, exact, world.reference(roundings))
    for part in (
        lambda group: FIXED(group, max(counts), world.expert_ranks),
        lambda group: FIXED(group),
        lambda group: EXACT(group, None, world.expert_ranks),
        lambda group: EXACT(group),
    ):
        for out, expected in zip(world.results(part), gathered, strict=True):
            assert out.shape == expected.shape and torch.equal(out, expected)


@settings(deadline=None)
@given(data=st.data())
def test_any_ranks(data):
    ranks = data.draw(st.integers(1, 6), "ranks")
    num_experts = data.draw(st.integers(ranks, 12), "experts")
    counts = data.draw(st.lists(st.integers(0, 5), min_size=ranks, max_size=ranks), "counts")
    top_k = data.draw(st.integers(1, min(num_experts, 4)), "k")
    order = data.draw(st.permutations(range(num_experts)), "order")
    problem = Problem(
        sum(counts), num_experts, top_k, 32, 16,
        data.draw(st.sampled_from((torch.float32, torch.bfloat16)), "dtype"),
        on_input=data.draw(st.booleans(), "on input"),
        routing=data.draw(st.sampled_from(ROUTINGS), "routing"),
        scheme=data.draw(st.sampled_from(SCHEMES), "scheme"),
    )  # fmt: skip
    kinds = (moe_ops.pipeline.TritonExperts, moe_ops.pipeline.GroupedGemmExperts)
    s = setup(problem, data.draw(st.sampled_from(kinds), "experts' class"))
    if data.draw(st.booleans(), "int64"):
        s = s._replace(inputs=s.inputs._replace(topk_ids=s.inputs.topk_ids.long()))
    expert_ranks = torch.tensor(order) % ranks
    world = World(s, expert_ranks, counts, type(s.kernel.fused_experts))
    room = data.draw(st.sampled_from((None, max(1, *counts), 9)), "room")
    known = data.draw(st.sampled_from((None, world.expert_ranks)), "known")
    expected = world.results(lambda group: ALL(group, room))
    assert torch.equal(torch.cat(expected), world.expected())
    for kind in (FIXED, EXACT):
        found = world.results(lambda group, kind=kind: kind(group, room, known))
        for out, wanted in zip(found, expected, strict=True):
            assert torch.equal(out, wanted)


@pytest.mark.parametrize("kind", [ALL, FIXED, EXACT])
def test_one_row(kind):
    """A row whose weights and ids lie in memory where no tensor of their own would put them."""
    s = setup(Problem(3, 8, 1, 32, 16), moe_ops.pipeline.TritonExperts)
    world = World(s, torch.zeros(8), (3,))
    expected = world.expected()
    kernel, arguments = world.kernel(0, kind(RankGroup(1)))
    arguments["topk_ids"] = arguments["topk_ids"].long()
    for name in ("topk_ids", "topk_weights"):
        arguments[name] = arguments[name].as_strided((3, 1), (1, 3))
    assert torch.equal(kernel.apply(**arguments), expected)
    for row in (slice(1, 2), slice(0)):
        own = {n: arguments[n][row] for n in ("hidden_states", "topk_ids", "topk_weights")}
        torch.testing.assert_close(kernel.apply(**arguments | own), expected[row])


@pytest.mark.parametrize("top_k", [1, 2])
def test_compiled_messages(top_k, device):
    """An axis of one number has any stride in a compiled graph."""

    def there_and_back(x, logits):
        weights, ids = moe_ops.fused_topk(x, logits, top_k, renormalize=True)
        parts = [weights, ~ids]
        return messages.parts_of(messages.message_of(parts), parts)

    backend = "inductor" if device == "cuda" else "aot_eager"
    compiled = torch.compile(there_and_back, fullgraph=True, dynamic=True, backend=backend)
    for tokens in (5, 33):
        x, logits = torch.randn(tokens, 16, device=device), torch.randn(tokens, 8, device=device)
        for part, expected in zip(compiled(x, logits), there_and_back(x, logits), strict=True):
            assert part.dtype == expected.dtype and torch.equal(part, expected)


def small_world(counts=(7, 0, 3, 6), device="cpu", **changes):
    problem = Problem(sum(counts), 10, 3, 32, 16, torch.bfloat16).with_(**changes)
    s = setup(problem, moe_ops.pipeline.TritonExperts, device)
    return World(s, torch.arange(10, device=device) * 7 % 4, counts)


@pytest.mark.kernel
@pytest.mark.parametrize("kind", [FIXED, EXACT])
def test_one_copy_travels(kind, device):
    """Each rank gets the tokens that have one of its experts, once, in the order of tokens.

    Copies that come back unchanged sum to the token times their number.
    """
    world = small_world(routing="holes", device=device)
    x, ids = world.s.inputs.hidden_states, world.s.inputs.topk_ids
    weights = world.s.inputs.topk_weights
    valid = (ids >= 0) & (ids < 10)
    ranks = torch.where(valid, world.expert_ranks[torch.where(valid, ids, 0).long()], -1)

    def run(rank, group):
        tokens = mine(world.counts, rank)
        part = kind(group, 8, world.expert_ranks)
        given = (x[tokens], weights[tokens], ids[tokens], 10, world.expert_map(rank), False)
        prepared = part.prepare(*given, world.s.config)
        rest = (prepared.topk_weights, prepared.topk_ids, False)
        out = part.finalize(prepared.a1q, *rest, moe_ops.pipeline.TopKWeightAndReduceNoOP())
        copies = (ranks[tokens, :, None] == torch.arange(4, device=device)).any(1).sum(1)
        assert torch.equal(out, (x[tokens].float() * copies[:, None]).bfloat16())
        return prepared

    for rank, (rows, scale, meta, its_ids, its_weights) in enumerate(run_ranks(4, run)):
        assert scale is None and meta is None
        wanted = (ranks == rank).any(1)
        real = (its_ids != -1).any(1)
        if kind is FIXED:
            assert len(rows) == 4 * 8
            assert not rows[~real].any() and (its_ids[~real] == -1).all()
            blocks = [slice(8 * r, 8 * r + 8) for r in range(4)]
            of_ranks = [int(wanted[mine(world.counts, r)].sum()) for r in range(4)]
            assert [int(real[block].sum()) for block in blocks] == of_ranks
        else:
            assert real.all()
        for found, all_of in ((rows, x), (its_ids, ids), (its_weights, weights)):
            assert torch.equal(found[real], all_of[wanted])


def test_copies_that_do_not_fit():
    """They are counted, raise in checking mode, and are as if these slots had been skipped."""
    world = small_world((3, 0, 7, 6), routing="one_expert")
    ids, places = world.s.inputs.topk_ids.clone(), world.expert_ranks
    size = 4  # of 8
    dropped = []
    for rank in range(4):
        own, lost = ids[mine(world.counts, rank)], 0
        for to in range(4):
            late = (places[own.long()] == to).any(1).nonzero().flatten()[size:]
            lost += len(late)
            for token in late:
                own[token][places[own[token].long()] == to] = -1
        dropped.append(lost)
    assert sum(dropped) > 0
    lacking = World(
        world.s._replace(inputs=world.s.inputs._replace(topk_ids=ids)), places, world.counts
    )
    expected = lacking.results(lambda group: ALL(group, 8))

    def part(group):
        return FIXED(group, 8, places, capacity_factor=0.5)

    for out, wanted in zip(world.results(part), expected, strict=True):
        assert torch.equal(out, wanted)

    def count(rank, group):
        own = world.s.inputs.topk_ids[mine(world.counts, rank)]
        found = part(group).num_dropped(own, 10)
        assert found.dtype == torch.int32 and found.shape == (1,)
        by_map = FIXED(group, 8, capacity_factor=0.5)
        assert torch.equal(by_map.num_dropped(own, 10, world.expert_map(rank)), found)
        with pytest.raises(ValueError, match="max_num_tokens must be given to count"):
            FIXED(group, None, places).num_dropped(own, 10)
        return int(found)

    assert run_ranks(4, count) == dropped
    with moe_ops.checking():
        message = (
            rf"capacity_factor must leave room .* got 0.5 \(4 rows\): .* \[0, 0, {dropped[2]}, "
        )
        with pytest.raises(ValueError, match=message):
            world.results(part)
        lacking.results(part)
        world.results(lambda group: FIXED(group, 8, places))


@pytest.mark.parametrize("most", [None, 9])
@pytest.mark.parametrize("tokens", [0, 1, 6])
def test_rows_that_arrive(tokens, most):
    """Warm-up counts with the rows that arrive; an exact exchange brings no more than that."""
    s = setup(Problem(3 * tokens, 10, 3, 32, 16, torch.bfloat16), moe_ops.pipeline.TritonExperts)
    world = World(s, torch.arange(10) * 7 % 3, (tokens,) * 3)
    names = ("hidden_states", "topk_weights", "topk_ids")

    def run(rank, group):
        for part in (
            ALL(group, most),
            ALL(group, most, equal_num_tokens=True),
            FIXED(group, most, world.expert_ranks, capacity_factor=0.5),
            EXACT(group, most, world.expert_ranks),
            ReplicaExchange(ALL(group, most), rank, 3),
        ):
            own = world.own(rank, s.arguments())
            given = [own[name] for name in names]
            rows = part.prepare(*given, 10, world.expert_map(rank), False, s.config).a1q
            most_rows = part.num_arriving(tokens)
            if type(part) is EXACT:
                assert len(rows) <= most_rows
            elif tokens or most:  # without either, ranks agree on one row
                assert len(rows) == most_rows, part

    run_ranks(3, run)


@pytest.mark.parametrize(("factor", "rows", "capacity"), [
    (1, 7, 7), (1.0, 1, 1), (0.5, 7, 4), (0.5, 1, 1), (0.1, 30, 3), (0.101, 30, 4), (1e-9, 5, 1),
])  # fmt: skip
def test_capacity(factor, rows, capacity):
    part = FIXED(moe_ops.testing.SimulatedGroup(2), capacity_factor=factor)
    assert part.capacity(rows) == capacity


def test_errors():
    """On the rank that made them, before any collective."""
    group = moe_ops.testing.SimulatedGroup(2)  # it has no other rank to wait for
    for kind in (FIXED, EXACT):
        with pytest.raises(TypeError, match="expert_ranks must have a dtype of .*int32.*int64"):
            kind(group, 4, torch.zeros(3, dtype=torch.int64))
        with pytest.raises(ValueError, match="expert_ranks must have 1 axes"):
            kind(group, 4, torch.zeros(3, 1, dtype=torch.int32))
        for wrong in (2, -1):
            with pytest.raises(ValueError, match=rf"expert_ranks must be in 0..1, got {wrong}"):
                kind(group, 4, torch.tensor([0, wrong, 1], dtype=torch.int32))
        with pytest.raises(ValueError, match="max_num_tokens must be at least 1, got 0"):
            kind(group, 0)
        s = small_world((3, 2)).s
        x, ids, weights = s.inputs.hidden_states, s.inputs.topk_ids, s.inputs.topk_weights
        rest = (10, None, False, s.config)
        with pytest.raises(ValueError, match=r"expert_ranks.shape\[0\] must be E = 10, got 9"):
            kind(group, 9, torch.zeros(9, dtype=torch.int32)).prepare(x, weights, ids, *rest)
        with pytest.raises(ValueError, match="expert_map must be given without expert_ranks"):
            kind(group, 9).prepare(x, weights, ids, *rest)
        with pytest.raises(ValueError, match="at most max_num_tokens = 4 tokens, got 5"):
            kind(group, 4).prepare(x, weights, ids, *rest)
        with pytest.raises(ValueError, match="topk_ids must be the tensor that prepare returned"):
            kind(group).send_back(x, ids)
    for factor in (0, -1.0, 1.5, float("nan")):
        with pytest.raises(ValueError, match="capacity_factor must be above 0 and at most 1, got"):
            FIXED(group, capacity_factor=factor)
    with pytest.raises(TypeError, match="capacity_factor must be a number, got bool True"):
        FIXED(group, capacity_factor=True)


def test_errors_on_all_ranks():
    world = small_world()
    others = (world.expert_ranks + 1) % 4
    for kind in (FIXED, EXACT):
        with moe_ops.checking():
            world.results(lambda group, kind=kind: kind(group, 8, world.expert_ranks))
            with pytest.raises(ValueError, match="expert_ranks must be the ranks whose expert_map"):
                world.results(lambda group, kind=kind: kind(group, 8, others))

    def scaled(rank, group, kind):
        scales = {"a1_scale": torch.tensor([1.0 + rank // 3]), "a2_scale": torch.ones(1)}
        config = moe_ops.FusedMoEQuantConfig("fp8_tensor_static", **scales)
        x, ids, weights = torch.ones(2, 32), torch.zeros(2, 1).int(), torch.ones(2, 1)
        part = kind(group, None, world.expert_ranks)
        with pytest.raises(ValueError, match=r"a1_scale .* got \[1.0, 1.0, 1.0, 2.0\]"):
            part.prepare(x, weights, ids, 10, None, False, config)

    for kind in (FIXED, EXACT):
        run_ranks(4, partial(scaled, kind=kind))


def test_simulated_collectives():
    def run(rank, group):
        x = torch.arange(4) + 10 * rank
        assert group.all_gather(x > 10).tolist() == [False] * 4 + [False, *[True] * 3]
        blocks = [1, 3] if rank == 0 else [2, 2]
        back = group.start_exchange(x, blocks, [1, 2] if rank == 0 else [3, 2])
        assert back.tolist() == ([0, 10, 11] if rank == 0 else [1, 2, 3, 12, 13])
        assert group.all_reduce(x).tolist() == [10, 12, 14, 16]
        assert group.reduce_scatter(x).tolist() == ([10, 12] if rank == 0 else [14, 16])
        assert not torch.is_grad_enabled()
        return rank

    with torch.no_grad():
        assert run_ranks(2, run) == [0, 1]


def test_simulated_ranks_that_go_wrong():
    x = torch.zeros(2)
    cases = (
        (lambda r, g: r or g.all_gather(x), RuntimeError, "equally often, got 1 waiting"),
        (lambda r, g: g.all_reduce(x) if r else g.all_gather(x), RuntimeError, "same collective"),
        (lambda r, g: g.start_exchange(x, [1, 1], [r, 1]), ValueError, "received must be the rows"),
        (lambda r, g: g.start_exchange(x, [1, 2]), ValueError, "sent must sum to the rows"),
        (lambda r, g: g.all_gather(x) if r else int("a"), ValueError, "invalid literal"),
    )
    for run, error, message in cases:
        with pytest.raises(error, match=message):
            run_ranks(2, run)
    with pytest.raises(ValueError, match="size must be at least 1, got 0"):
        run_ranks(0, lambda rank, group: None)
    assert threading.active_count() < 20
