"""Exchanges that send one copy to each rank of a token's experts, over processes and gloo."""

import pytest
import torch
from compilations import Compilations
from exchanges import World
from modular import setup, twice
from ranks import mine, spawn

import moe_ops
from moe_ops.parallel import determine_expert_ranks
from moe_ops.testing import Problem

ALL = moe_ops.pipeline.AllGatherPrepareAndFinalize
EXACT = moe_ops.pipeline.ExactAllToAllPrepareAndFinalize
FIXED = moe_ops.pipeline.FixedCapacityPrepareAndFinalize
COUNTS = {2: (7, 4), 4: (5, 0, 1, 5)}
PROBLEM = Problem(11, 6, 3, 64, 48, torch.bfloat16)


def world_of(ranks, **changes):
    s = setup(PROBLEM.with_(**changes), moe_ops.pipeline.TritonExperts)
    return World(s, determine_expert_ranks(ranks, 6), COUNTS[ranks])


def check_schemes(rank, ranks):
    names = ("unquantized", "fp8_tensor", "fp8_tensor_static", "fp8_block128", "nvfp4")
    for name in names if ranks == 2 else names[:2]:
        world = world_of(ranks, scheme=name, on_input=name == "fp8_tensor")
        kernel, arguments = world.kernel(rank, ALL())
        own = world.own(rank, arguments)
        expected = kernel.apply(**own)
        for kind in (FIXED, EXACT):
            for room, known in ((None, None), (9, world.expert_ranks)):
                part = kind(None, room, known)
                assert torch.equal(world.kernel(rank, part)[0].apply(**own), expected)
            inner = moe_ops.pipeline.AsyncPrepareAndFinalize(part)
            shared, routed = world.kernel(rank, inner, shared_experts=twice)[0].apply(**own)
            assert torch.equal(routed, expected)
            assert torch.equal(shared, 2 * own["hidden_states"])


def check_micro_batches(rank, ranks):
    """Batches under way at once do not disturb each other."""
    world = world_of(ranks, scheme="fp8_channel")
    for kind in (FIXED, EXACT):
        kernel, arguments = world.kernel(rank, kind())
        calls = []
        for counts in ((3, 1), (0, 5), (0, 0), (6, 6)):
            world.counts = counts
            calls.append(moe_ops.pipeline.Call(**world.own(rank, arguments)))
        for call, out in zip(calls, moe_ops.pipeline.run_micro_batches(kernel, calls), strict=True):
            assert torch.equal(out, kernel.apply(*call))


def check_compiled(rank, ranks):
    """One compilation for all token counts, which differ between ranks where there is room."""
    unequal, equal = ((7, 5), (2, 9), (9, 1), (0, 3)), ((5, 5), (2, 2), (1, 1), (0, 0))
    for name, room, factor, counts, kind in (
        ("fp8_block128", 9, 0.5, unequal, "aot_eager"),
        ("fp8_tensor", None, 0.7, equal, "eager"),  # AOTAutograd takes as long again as Dynamo
    ):
        torch._dynamo.reset()
        world = world_of(ranks, scheme=name)
        known = world.expert_ranks if room is None else None
        part = FIXED(None, room, known, capacity_factor=factor)
        kernel, arguments = world.kernel(rank, part, shared_experts=twice)

        def layer(x, weights, ids, kernel=kernel, arguments=arguments):
            given = {**arguments, "hidden_states": x, "topk_weights": weights, "topk_ids": ids}
            return kernel.apply(**given)

        backend = Compilations(kind)
        with torch.fx.experimental._config.patch(backed_size_oblivious=True):
            compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
            for world.counts in counts:
                own = world.own(rank, arguments)
                own = [own[n].clone() for n in ("hidden_states", "topk_weights", "topk_ids")]
                for actual, expected in zip(compiled(*own), layer(*own), strict=True):
                    assert torch.equal(actual, expected)
        assert backend.count == 1, (name, backend.count)
        if part.max_num_tokens is not None:
            count = torch.compile(part.num_dropped, fullgraph=True, backend="aot_eager")
            expert_map = arguments["expert_map"]
            given = (own[2], 6, expert_map)
            assert torch.equal(count(*given), part.num_dropped(*given))
    kernel, arguments = world.kernel(rank, EXACT())
    with pytest.raises(Exception, match="must be called eagerly, .* got a call that is compiled"):
        torch.compile(kernel.apply, fullgraph=True, backend="eager")(**arguments)


def check_gradients_of_dropped(rank, ranks):
    """Copies that do not fit are missing in gradients as they are in results."""
    world = world_of(ranks, dtype=torch.float32)
    part = FIXED(None, 8, world.expert_ranks, capacity_factor=0.45)
    x, w1, w2, weights, ids, *_ = world.s.inputs
    sent = ids.clone()
    for other in range(ranks):
        own = sent[mine(world.counts, other)]
        assert bool(part.num_dropped(own, 6)) == (other == 0)
        homes = world.expert_ranks[own.long()]
        for home in range(ranks):
            late = (homes == home).any(1).nonzero().flatten()[part.capacity(8) :]
            own[late] = own[late].masked_fill(homes[late] == home, -1)
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(2))
    given = [t.clone().requires_grad_() for t in (x, w1, w2, weights)]
    out = moe_ops.fused_experts(*given, sent)
    expected = torch.autograd.grad(out, given, grad)
    kernel, arguments = world.kernel(rank, part)
    names = ("hidden_states", "w1", "w2", "topk_weights")
    arguments = world.own(rank, arguments)
    arguments |= {n: arguments[n].clone().requires_grad_() for n in names}
    own, held = mine(world.counts, rank), world.held(rank)
    found = kernel.apply(**arguments)
    torch.testing.assert_close(found, out[own])
    found = torch.autograd.grad(found, [arguments[n] for n in names], grad[own])
    for actual, near, rows in zip(found, expected, (own, held, held, own), strict=True):
        torch.testing.assert_close(actual, near[rows])


def check_two(rank, ranks):
    check_schemes(rank, ranks)
    check_gradients_of_dropped(rank, ranks)
    check_micro_batches(rank, ranks)
    check_compiled(rank, ranks)


@pytest.mark.parametrize(("ranks", "check"), [(2, check_two), (4, check_schemes)])
def test_ranks_are_one_rank(ranks, check):
    spawn(check, ranks)
