"""Bytes over links: formulas against simulated routing, and against what exchanges send."""

import json
import math
from dataclasses import replace

import pytest
import torch
from exchanges import World
from hypothesis import given, settings
from hypothesis import strategies as st
from modular import layer_config, setup
from ranks import mine

import moe_ops
from moe_ops.inspect import traffic
from moe_ops.inspect.traffic import LINKS, gathered_copies, rank_copies, slot_copies
from moe_ops.parallel import determine_expert_ranks
from moe_ops.testing import Problem, run_ranks

MANY = 10**6
"""So many experts that it makes no difference that those of a token differ."""


@pytest.mark.parametrize(
    ("ranks", "top_k", "gathered", "slots", "destinations"),
    [(8, 8, 7, 7, 4.59), (4, 8, 3, 6, 2.70), (2, 8, 1, 4, 0.996), (1, 8, 0, 0, 0)],
)
def test_copies(ranks, top_k, gathered, slots, destinations):
    assert gathered_copies(ranks) == gathered and slot_copies(ranks, top_k) == slots
    assert rank_copies(ranks, top_k, MANY) == pytest.approx(destinations, abs=0.01)
    independent = (ranks - 1) * (1 - (1 - 1 / ranks) ** top_k)
    assert rank_copies(ranks, top_k, MANY) == pytest.approx(independent, rel=1e-4)


@settings(deadline=None)
@given(
    ranks=st.integers(2, 64),
    num_experts=st.sampled_from((64, 100, 257)),
    top_k=st.sampled_from((1, 2, 8, 10, 60)),
    seed=st.integers(0, 2**16),
)
def test_copies_of_simulated_routing(ranks, num_experts, top_k, seed):
    """Within five standard errors of the mean over tokens; rare events may not occur at all."""
    g, tokens = torch.Generator().manual_seed(seed), 20000
    ids = torch.rand(tokens, num_experts, generator=g).topk(top_k, 1).indices
    there = torch.zeros(tokens, ranks)
    there.scatter_(1, determine_expert_ranks(ranks, num_experts)[ids].long(), 1)
    own = torch.randint(ranks, (tokens, 1), generator=g)
    copies = (there.sum(1) - there.gather(1, own)[:, 0]).double()
    error = float((copies.var() + 1 / tokens) / tokens) ** 0.5
    assert abs(float(copies.mean()) - rank_copies(ranks, top_k, num_experts)) < 5 * error


def sent(world, exchange):
    """For each rank the rows and the bytes of a row of each message that leaves it."""

    def run(rank, group):
        log = []

        def note(x, rows):
            log.append((rows, x.shape[1] * x.dtype.itemsize))
            return x

        gather, swap = group.start_all_gather, group.start_exchange

        def start_exchange(x, sent=None, received=None):
            own = x.shape[0] // world.size if sent is None else sent[rank]
            return swap(note(x, x.shape[0] - own), sent, received)

        group.start_exchange = start_exchange
        group.start_all_gather = lambda x: gather(note(x, x.shape[0] * (world.size - 1)))
        kernel, arguments = world.kernel(rank, exchange(group))
        kernel.apply(**world.own(rank, arguments))
        return log

    return run_ranks(world.size, run)


@pytest.mark.parametrize(
    "scheme", ["unquantized", "fp8_block128", "fp8_channel", "mxfp8", "nvfp4", "int4_w4a16_g32"]
)
def test_what_exchanges_send(scheme):
    """To the byte where blocks are equal; each row to the byte where their number is random."""
    ranks, tokens, top_k = 4, 36, 2
    problem = Problem(ranks * tokens, 16, top_k, 128, 32, torch.bfloat16, scheme=scheme)
    s = setup(problem, moe_ops.pipeline.TritonExperts)
    world = World(s, determine_expert_ranks(ranks, 16), (tokens,) * ranks)
    parallel = moe_ops.FusedMoEParallelConfig(ep_size=ranks, dp_size=ranks, use_ep=True)
    config = replace(layer_config(problem), max_num_tokens=None, moe_parallel_config=parallel)
    experts = s.kernel.fused_experts
    quant = None if experts.expects_unquantized_inputs else s.config.scheme.activation
    rows = traffic.traffic_of(config, quant, ranks * tokens, LINKS["nvlink4"])
    gathered, fixed, exact, symmetric = rows
    assert symmetric.dispatch_bytes == exact.dispatch_bytes
    room, known = tokens, world.expert_ranks
    logs = sent(world, lambda group: moe_ops.pipeline.AllGatherPrepareAndFinalize(group, room))
    assert len(logs[0]) == traffic.WAYS["allgather_reducescatter"].collectives
    for first, facts, back in logs:
        assert first[0] * first[1] + facts[0] * facts[1] == gathered.dispatch_bytes
        assert back[0] * back[1] == gathered.combine_bytes
    assert 0.5 < fixed.capacity_factor < 1
    factor = {"capacity_factor": fixed.capacity_factor}
    logs = sent(
        world, lambda g: moe_ops.pipeline.FixedCapacityPrepareAndFinalize(g, room, known, **factor)
    )
    assert len(logs[0]) == traffic.WAYS["fixed_capacity"].collectives
    for first, facts, back in logs:
        assert first[0] * first[1] + facts[0] * facts[1] == fixed.dispatch_bytes
        assert back[0] * back[1] == fixed.combine_bytes
    logs = sent(world, lambda g: moe_ops.pipeline.ExactAllToAllPrepareAndFinalize(g, None, known))
    there, on_way_back = traffic.row_bytes(config, quant)
    wanted = known[s.inputs.topk_ids.long()]
    for rank, (counts, first, facts, back) in enumerate(logs):
        of_rank = wanted[mine(world.counts, rank)]
        copies = sum(len(set(row) - {rank}) for row in of_rank.tolist())
        assert counts[0] == ranks - 1 and first[0] == facts[0] == copies
        assert first[1] + facts[1] == there and back[1] == on_way_back
    assert len(logs[0]) == traffic.WAYS["alltoall"].collectives


def config_of(ranks, backend="allgather_reducescatter", **changes):
    parallel = moe_ops.FusedMoEParallelConfig(
        ep_size=ranks, dp_size=ranks, use_ep=ranks > 1, all2all_backend=backend
    )
    method = moe_ops.RoutingMethodType.Renormalize
    sizes = {"num_experts": 256, "experts_per_token": 8, "hidden_dim": 7168} | changes
    return moe_ops.FusedMoEConfig(
        **sizes, intermediate_size=2048, num_local_experts=sizes["num_experts"] // ranks,
        activation="silu", device="cuda", routing_method=method, moe_parallel_config=parallel,
    )  # fmt: skip


def test_explanation():
    found = moe_ops.explain(
        config_of(8, "naive"), "fp8_block128", device="sm_90", num_tokens=(4, 32768)
    )
    few, many = found.exchanges
    assert [row.backend for row in many] == list(traffic.WAYS)
    assert few[0].copies == 7 * 8 / 4, "a row of each rank, for half a token"
    # 4096 rows for each of 7 ranks: 7168 bytes, 56 scales, 8 ids and weights; back in bf16.
    assert many[0].dispatch_bytes == 7 * 4096 * (7168 + 56 * 4 + 8 * 8)
    assert many[0].combine_bytes == 7 * 4096 * 7168 * 2
    nbytes = many[0].dispatch_bytes + many[0].combine_bytes
    assert many[0].time_us == pytest.approx(3 * 8.7 + nbytes / 235e3)
    assert traffic.fastest(few) == traffic.fastest(many) == "symmetric"
    text = str(found)
    assert "us on nvlink4" in text and "one to each rank of its experts" in text
    lines = [line.split() for line in text.splitlines()]
    assert ["32768", "allgather_reducescatter", "chosen", "7.00"] in [line[:4] for line in lines]
    assert ["32768", "symmetric", "fastest", "4.63"] in [line[:4] for line in lines]
    record = json.loads(found.to_json())
    assert record["link"]["name"] == "nvlink4" and len(record["exchanges"]) == 2
    assert record["exchanges"][1]["fastest"] == "symmetric"
    assert record["exchanges"][1]["ways"][0]["dispatch_bytes"] == many[0].dispatch_bytes


def test_room_for_copies_of_uniform_routing():
    """Six standard deviations above the mean copies for the largest rank, at most all tokens."""
    for ranks, experts, top_k, tokens in (
        (8, 256, 8, 4096), (4, 18, 2, 512), (2, 64, 1, 2000), (8, 64, 8, 1), (4, 4, 4, 100),
    ):  # fmt: skip
        config = config_of(ranks, num_experts=experts, experts_per_token=top_k)
        rows = traffic.traffic_of(config, None, ranks * tokens, LINKS["nvlink4"])
        (factor,) = [row.capacity_factor for row in rows if row.capacity_factor is not None]
        largest = -(-experts // ranks)
        probability = 1 - math.comb(experts - largest, top_k) / math.comb(experts, top_k)
        deviation = (tokens * probability * (1 - probability)) ** 0.5
        least = min(tokens, tokens * probability + 6 * deviation)
        assert least <= factor * tokens < least + 0.01 * tokens + 1e-9 and factor <= 1


def test_times_of_every_way():
    """The least times of all collectives in sequence, and the bytes at the rate of the way."""
    (rows,) = moe_ops.explain(config_of(8), "fp8_tensor", num_tokens=(4096,)).exchanges
    least = {
        "allgather_reducescatter": (3 * 8.7, 235e3), "fixed_capacity": (3 * 8.7, 235e3),
        "alltoall": (4 * 8.7, 235e3), "symmetric": (2 * 6.6, 348e3),
    }  # fmt: skip
    for row in rows:
        time, rate = least[row.backend]
        nbytes = row.dispatch_bytes + row.combine_bytes
        assert row.time_us == pytest.approx(time + nbytes / rate, rel=1e-6), row.backend
        # A row of bytes without a scale there, a row of bfloat16 back, ids and weights.
        assert row.dispatch_bytes == pytest.approx(row.combine_bytes * (7168 + 64) / (2 * 7168))


def test_links():
    found = moe_ops.explain(
        config_of(8, "alltoall"), "unquantized", num_tokens=(32768,), link="ndr400"
    )
    (rows,) = found.exchanges
    assert rows[-1].time_us is None and traffic.fastest(rows) == "alltoall"
    assert "chosen, fastest" in str(found)
    slow = LINKS["ndr400"]._replace(collective_bytes_per_s=25e9)
    (half,) = moe_ops.explain(found.config, "unquantized", num_tokens=(32768,), link=slow).exchanges
    assert half[0].time_us == pytest.approx(2 * rows[0].time_us)
    assert traffic.fastest(rows[-1:]) is None
    with pytest.raises(ValueError, match="link must be one of .*'nvlink4'.*, got 'nvlink'"):
        moe_ops.explain(found.config, "unquantized", link="nvlink")
    with pytest.raises(TypeError, match="link must be one of .*, got int"):
        moe_ops.explain(found.config, "unquantized", link=5)


def test_no_exchange():
    found = moe_ops.explain(config_of(1), "unquantized", device="sm_90")
    assert found.exchanges == () and "exchanges" not in json.loads(found.to_json())
    assert "nvlink4" not in str(found)


def test_parts_of_experts_need_every_token():
    """Every rank has a part of each expert, so every token travels to every rank."""
    parallel = moe_ops.FusedMoEParallelConfig.make(2, 1, 2, 1)
    config = replace(layer_config(Problem()), max_num_tokens=None, moe_parallel_config=parallel)
    found = traffic.traffic_of(config, None, 64, LINKS["nvlink4"])
    assert {row.backend: row.copies for row in found} == {
        "allgather_reducescatter": 3, "symmetric": 3,
    }  # fmt: skip
    text = str(moe_ops.explain(config, "unquantized", num_tokens=[64]))
    assert "Batched format: never chosen" in text
    assert "least rows over 4 ranks: 3.00 if all" in text and "3.00 for one to each" in text
