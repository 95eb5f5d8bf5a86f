"""The modular kernel in CUDA graphs: replayed with changed routing it computes what eager does."""

import pytest
import torch
from modular import BATCHED, EXPERTS, router_logits, setup, twice

import moe_ops
from moe_ops.testing import Problem

pytestmark = pytest.mark.gpu
SCHEMES = tuple(moe_ops.SCHEMES)
MODULAR = tuple(e for e in EXPERTS if not e.is_monolithic())
TOKENS, E, K, H, I = 24, 8, 2, 256, 128  # noqa: E741
ROUTINGS = ("skewed", "holes", "one_expert", "duplicates", "uniform")


def of(experts, scheme, routing="uniform", seed=0, **options):
    problem = Problem(TOKENS, E, K, H, I, torch.bfloat16, has_bias=True, scheme=scheme)
    return setup(problem.with_(routing=routing), experts, "cuda", seed=seed, **options)


def check_replay(s, others):
    """Captured once; ``others`` are the calls that it is replayed with."""
    names = ("hidden_states", "topk_weights", "topk_ids")
    held = {n: s.arguments()[n].clone() for n in names}
    for _ in range(2):  # compiles what is not compiled yet
        s.apply(**held)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = s.apply(**held)
    for other in others:
        new = {n: other.arguments()[n] for n in names}
        for n in names:
            held[n].copy_(new[n])
        graph.replay()
        expected = s.apply(**new)
        pairs = zip(out, expected, strict=True) if isinstance(out, tuple) else [(out, expected)]
        assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("experts", MODULAR)
def test_replay_with_changed_routing(experts, scheme):
    others = [of(experts, scheme, r, seed) for seed, r in enumerate(ROUTINGS, 1)]
    check_replay(of(experts, scheme), others)


@pytest.mark.parametrize("experts", MODULAR)
@pytest.mark.parametrize(
    "options",
    [
        {"asynchronous": True, "shared_experts": twice},
        {"asynchronous": True},
    ],
    ids=lambda o: "-".join(o),
)
def test_options_replay(experts, options):
    """The side stream of an asynchronous prepare is captured with the rest."""
    others = [of(experts, "fp8_channel", r, 3) for r in ROUTINGS[:2]]
    check_replay(of(experts, "fp8_channel", **options), others)


@pytest.mark.parametrize("experts", [e for e in MODULAR if e.activation_format() is not BATCHED])
def test_chunks_replay(experts):
    others = [of(experts, "fp8_channel", r, 3) for r in ROUTINGS[:2]]
    check_replay(of(experts, "fp8_channel", chunk_size=7), others)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_monolithic_replays(scheme):
    s = of(moe_ops.pipeline.MonolithicExperts, scheme)
    x, w1, w2, *_ = s.inputs
    held, logits = x.clone(), router_logits(s.problem, "cuda")

    def layer(x, logits):
        return s.kernel.apply_monolithic(x, w1, w2, logits, "silu", -1, None, False)

    layer(held, logits)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(held, logits)
    for factor in (-1.0, 0.5, 3.0):
        new_x, new_logits = factor * x, (factor * logits).roll(1, 1)
        held.copy_(new_x), logits.copy_(new_logits)
        graph.replay()
        assert torch.equal(out, layer(new_x, new_logits))


@pytest.mark.parametrize("scheme", ("unquantized", "fp8_tensor", "fp8_block128", "int4_w4a16_g128"))
@pytest.mark.parametrize("experts", MODULAR)
def test_nothing_waits_for_the_device(experts, scheme):
    s = of(experts, scheme)
    arguments = s.arguments()
    s.kernel.apply(**arguments)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        s.kernel.apply(**arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("experts", MODULAR)
def test_asynchronous_steps_do_not_race(experts):
    """Many micro-batches in flight, their memory reused: as separate calls, bit by bit."""
    s = of(experts, "fp8_block128", asynchronous=True)
    calls = []
    for seed in range(8):
        x, _, _, weights, ids, *_ = of(experts, "fp8_block128", ROUTINGS[seed % 5], seed).inputs
        x = x * (1 + seed)
        calls.append(moe_ops.pipeline.Call(x, s.inputs.w1, s.inputs.w2, weights, ids))
    expected = [s.kernel.apply(*call).clone() for call in calls]
    for _ in range(5):
        results = moe_ops.pipeline.run_micro_batches(s.kernel, calls)
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
