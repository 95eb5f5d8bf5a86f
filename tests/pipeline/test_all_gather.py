"""`AllGatherPrepareAndFinalize` over two and four processes, against one rank with all tokens."""

import pytest
import torch
import torch.distributed as dist
from compilations import Compilations
from modular import roundings as rounds
from modular import setup, twice
from rank_kernels import COUNTS, PROBLEM, SCHEMES, kernel_of, part_of
from ranks import config_of, experts_of, mine, of_all_ranks, spawn

import moe_ops
from moe_ops.pipeline.calls import Pending
from moe_ops.pipeline.exchange.groups import RankGroup
from moe_ops.pipeline.exchange.records import Outgoing
from moe_ops.testing import assert_layer_matches, bounded_oracle, reference_experts


def in_one_process(s, ranks, kind=moe_ops.pipeline.TritonExperts):
    """What ranks compute: rows quantized from all tokens, float32 sums of ranks in their order."""
    total = None
    for rank in range(ranks):
        part = moe_ops.pipeline.MoEPrepareAndFinalizeNoEP()
        kernel, arguments = kernel_of(s, rank, ranks, part, kind)
        call = moe_ops.pipeline.Call(**arguments)
        experts = kernel.fused_experts
        on_input = s.problem.on_input and not experts.applies_router_weight_on_input
        prepared = part.prepare(
            call.hidden_states, call.topk_weights, call.topk_ids, s.problem.num_experts, None,
            on_input, experts.quant_config, experts.expects_unquantized_inputs,
        )  # fmt: skip
        _, rows = kernel.run_experts(call, Pending(None, lambda p=prepared: p))
        sums = kernel.start_finalize(call, rows).wait().float()
        total = sums if total is None else total + sums
    return total.to(s.problem.dtype)


def reference(s, ranks, where):
    """`reference_experts` with the roundings of several ranks: their sums are rounded too."""
    total = 0.0
    for rank in range(ranks):
        held, expert_map = experts_of(rank, ranks, s.problem.num_experts)
        w1, w2 = s.inputs.w1[held], s.inputs.w2[held]
        own = s.inputs._replace(w1=w1, w2=w2, expert_map=expert_map)
        total = total + reference_experts(s.problem, own, config_of(s.config, held), where).float()
    return total.to(s.problem.dtype)


def check_schemes(rank, ranks):
    tokens = mine(COUNTS[ranks], rank)
    on_input = PROBLEM.with_(on_input=True)
    fused, grouped = moe_ops.pipeline.TritonExperts, moe_ops.pipeline.GroupedGemmExperts
    few = ("unquantized", "fp8_tensor", "fp8_block128")
    cases = [(PROBLEM.with_(scheme=name), fused) for name in (SCHEMES if ranks == 2 else few)]
    for name in few:
        cases.append((on_input.with_(scheme=name), fused if ranks == 4 else grouped))
        if ranks == 2:
            cases.append((on_input.with_(scheme=name, top_k=1, has_bias=True), fused))
    for problem, kind in cases:
        s = setup(problem, kind)
        part = moe_ops.pipeline.AllGatherPrepareAndFinalize()
        kernel, arguments = kernel_of(s, rank, ranks, part, kind)
        assert kernel.output_is_reduced() and part.num_dispatchers() == ranks
        own = part_of(arguments, tokens)
        out = kernel.apply(**own)
        assert out.shape == own["hidden_states"].shape and out.dtype == torch.bfloat16
        whole = of_all_ranks(out, ranks)
        where = f"{problem} {kind.__name__}"
        if rank == 0:
            assert torch.equal(whole, in_one_process(s, ranks, kind)), where
            roundings = rounds(kind, problem)
            exact = bounded_oracle(problem, s.exact, s.config, roundings)
            assert_layer_matches(whole, exact, reference(s, ranks, roundings))
        # more room than tokens, chunks, shared experts, and a stream of its own are the same bits
        padded = moe_ops.pipeline.AllGatherPrepareAndFinalize(dist.group.WORLD, 9)
        assert torch.equal(kernel_of(s, rank, ranks, padded, kind)[0].apply(**own), out), where
        inner = moe_ops.pipeline.AsyncPrepareAndFinalize(part)
        kernel = kernel_of(s, rank, ranks, inner, kind, shared_experts=twice)[0]
        shared, routed = kernel.apply(**own)
        assert torch.equal(routed, out) and torch.equal(shared, 2 * own["hidden_states"])


def check_prepared(rank, ranks):
    """Rows and scales are those of one rank that has all tokens, in the order of ranks."""
    tokens = mine(COUNTS[ranks], rank)
    room = 8
    for name in SCHEMES:
        for on_input, top_k in ((False, 3), (True, 1), (True, 3)):
            s = setup(PROBLEM.with_(scheme=name, top_k=top_k), moe_ops.pipeline.TritonExperts)
            x, _, _, weights, ids, *_ = s.inputs
            ids = ids.masked_fill(torch.arange(11)[:, None] == 2, -1)  # no rank reads this row,
            x = x.masked_fill(torch.arange(11)[:, None] == 2, float("nan"))  # whatever it holds
            rest = (6, None, on_input, s.config, False)
            local = moe_ops.pipeline.MoEPrepareAndFinalizeNoEP().prepare(x, weights, ids, *rest)
            part = moe_ops.pipeline.AllGatherPrepareAndFinalize(max_num_tokens=room)
            own = (x[tokens], weights[tokens], ids[tokens])
            rows, scale, meta, all_ids, all_weights = part.prepare(*own, *rest)
            assert meta is None and all_ids.shape == (ranks * room, top_k)
            there = torch.cat([room * r + torch.arange(COUNTS[ranks][r]) for r in range(ranks)])
            padding = torch.ones(ranks * room, dtype=torch.bool)
            padding[there] = False
            assert torch.equal(all_ids[there], ids) and (all_ids[padding] == -1).all()
            assert torch.equal(all_weights[there], weights) and not all_weights[padding].any()
            used = (ids >= 0).any(1)
            k = len(rows) // (ranks * room)
            for actual, expected in ((rows, local.a1q), (scale, local.a1q_scale)):
                assert (actual is None) is (expected is None)
                if actual is None:
                    continue
                assert actual.dtype == expected.dtype
                if actual.shape != expected.shape:
                    actual = actual.view(ranks * room, k, -1)[there][used]
                    expected = expected.view(11, k, -1)[used]
                assert torch.equal(actual.float(), expected.float()), (name, on_input, top_k)
    x = torch.full((COUNTS[ranks][rank], 64), float("nan") if rank == 0 else 1.0)
    weights, ids = torch.ones(len(x), 1), torch.zeros(len(x), 1, dtype=torch.int32)
    part = moe_ops.pipeline.AllGatherPrepareAndFinalize()
    config = moe_ops.FusedMoEQuantConfig("fp8_tensor")
    alone = moe_ops.pipeline.MoEPrepareAndFinalizeNoEP()
    everything = [of_all_ranks(t, ranks) for t in (x, weights, ids)]
    expected = alone.prepare(*everything, 6, None, False, config).a1q_scale
    actual = part.prepare(x, weights, ids, 6, None, False, config).a1q_scale
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def check_compiled(rank, ranks):
    """One compilation for all token counts, which differ between ranks where there is room."""
    for name, room, counts, kind in (
        ("fp8_block128", 9, ((7, 5), (2, 9), (9, 1), (0, 3)), "aot_eager"),
        # AOTAutograd takes as long again as Dynamo.
        ("fp8_tensor", None, ((7, 7), (2, 2), (9, 9), (1, 1), (0, 0)), "eager"),
    ):
        torch._dynamo.reset()
        s = setup(PROBLEM.with_(scheme=name), moe_ops.pipeline.TritonExperts)
        part = moe_ops.pipeline.AllGatherPrepareAndFinalize(max_num_tokens=room)
        kernel, arguments = kernel_of(s, rank, ranks, part, shared_experts=twice)

        def layer(x, weights, ids, kernel=kernel, arguments=arguments):
            given = {**arguments, "hidden_states": x, "topk_weights": weights, "topk_ids": ids}
            return kernel.apply(**given)

        backend = Compilations(kind)
        with torch.fx.experimental._config.patch(backed_size_oblivious=True):
            compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
            for pair in counts:
                own = part_of(arguments, slice(pair[rank]))
                own = [own[n].clone() for n in ("hidden_states", "topk_weights", "topk_ids")]
                for actual, expected in zip(compiled(*own), layer(*own), strict=True):
                    assert torch.equal(actual, expected)
        assert backend.count == 1, (name, backend.count)
        own = part_of(arguments, slice(4 + rank if room is None else 10))
        own = [own[n].clone() for n in ("hidden_states", "topk_weights", "topk_ids")]
        message = "the same number of tokens" if room is None else "most max_num_tokens tokens"
        with pytest.raises(Exception, match=message):
            compiled(*own)


def check_errors(rank, ranks):
    """Errors come before any collective, on the rank that made them."""
    s = setup(PROBLEM, moe_ops.pipeline.TritonExperts)
    part = moe_ops.pipeline.AllGatherPrepareAndFinalize(max_num_tokens=4)
    kernel, arguments = kernel_of(s, rank, ranks, part)
    if rank == 0:  # the other rank is not asked
        with pytest.raises(ValueError, match="at most max_num_tokens = 4 tokens, .* got 5"):
            kernel.apply(**part_of(arguments, slice(5)))
        x, weights, ids = s.inputs.hidden_states, s.inputs.topk_weights, s.inputs.topk_ids
        with pytest.raises(ValueError, match="a1 must have at most max_num_tokens = 4 .*got 11"):
            part.prepare(x, weights, ids, 6, None, False, s.config)
        with pytest.raises(TypeError, match="topk_ids"):
            kernel.apply(**part_of(arguments, slice(4)) | {"topk_ids": s.inputs.topk_weights[:4]})
        for wrong, error, message in (
            (3, TypeError, "group must be a ProcessGroup, its name, .* got int"),
            ("nobody", ValueError, "group must be the name of a process group, got 'nobody'"),
        ):
            with pytest.raises(error, match=message):
                moe_ops.pipeline.AllGatherPrepareAndFinalize(wrong)
        with pytest.raises(ValueError, match="max_num_tokens must be at least 1, got 0"):
            moe_ops.pipeline.AllGatherPrepareAndFinalize(max_num_tokens=0)
    first = dist.new_group([0])
    if rank == 0:
        alone = moe_ops.pipeline.AllGatherPrepareAndFinalize(first)
        assert alone.num_dispatchers() == 1
        for room in (None, 4, 20):  # 4: in parts, as nobody else waits
            alone = moe_ops.pipeline.AllGatherPrepareAndFinalize(first, room)
            kernel = moe_ops.FusedMoEKernel(alone, s.kernel.fused_experts)
            torch.testing.assert_close(kernel.apply(**s.arguments()), s.apply())
    else:
        with pytest.raises(ValueError, match="group must be one that this process is in"):
            moe_ops.pipeline.AllGatherPrepareAndFinalize(first)
    name = dist.group.WORLD.group_name
    mesh = dist.device_mesh.init_device_mesh("cpu", (ranks,))
    for group in (name, mesh, dist.group.WORLD, RankGroup(ranks), None):
        assert moe_ops.pipeline.AllGatherPrepareAndFinalize(group).num_dispatchers() == ranks
    with pytest.raises(ValueError, match="DeviceMesh of 1 dimension, got 2"):
        moe_ops.pipeline.AllGatherPrepareAndFinalize(
            dist.device_mesh.init_device_mesh("cpu", (1, ranks))
        )
    kernel, arguments = kernel_of(s, rank, ranks, moe_ops.pipeline.AllGatherPrepareAndFinalize())
    config = moe_ops.FusedMoEQuantConfig(
        "fp8_tensor_static", a1_scale=torch.tensor([1.0 + rank]), a2_scale=torch.ones(1)
    )
    x, weights, ids = s.inputs.hidden_states, s.inputs.topk_weights, s.inputs.topk_ids
    part = moe_ops.pipeline.AllGatherPrepareAndFinalize()
    with pytest.raises(ValueError, match=r"a1_scale .* the same .* got \[1.0, 2.0\]"):
        part.prepare(x, weights, ids, 6, None, False, config)
    equal = moe_ops.pipeline.AllGatherPrepareAndFinalize(equal_num_tokens=True)
    four = Outgoing(x[:4], weights, ids, 6, None, False, config, None, False)
    for other in range(ranks):  # the rank with one token more raises, and so do the others
        with pytest.raises(RuntimeError, match="same number of tokens on every rank"):
            equal.rows_per_rank(four._replace(a1=x[: 4 + (rank == other)]))
    assert equal.rows_per_rank(four) == 4


def check_micro_batches(rank, ranks):
    """Batches under way at once do not disturb each other."""
    s = setup(PROBLEM.with_(scheme="fp8_channel"), moe_ops.pipeline.TritonExperts)
    kernel, arguments = kernel_of(s, rank, ranks, moe_ops.pipeline.AllGatherPrepareAndFinalize())
    sizes = ((3, 1), (0, 5), (0, 0), (6, 6))
    calls = [moe_ops.pipeline.Call(**part_of(arguments, slice(pair[rank]))) for pair in sizes]
    for call, out in zip(calls, moe_ops.pipeline.run_micro_batches(kernel, calls), strict=True):
        assert torch.equal(out, kernel.apply(*call))


def check_two(rank, ranks):
    check_schemes(rank, ranks)
    check_micro_batches(rank, ranks)
    check_prepared(rank, ranks)
    check_errors(rank, ranks)
    check_compiled(rank, ranks)


@pytest.mark.parametrize(("ranks", "check"), [(2, check_two), (4, check_schemes)])
def test_ranks_are_one_rank(ranks, check):
    spawn(check, ranks)


def test_no_group():
    with pytest.raises(ValueError, match="group must be given, or torch.distributed initialized"):
        moe_ops.pipeline.AllGatherPrepareAndFinalize()
