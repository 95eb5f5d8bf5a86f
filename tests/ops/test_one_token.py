"""Layers of one token on the GPU, which on Hopper have kernels of their own."""

from dataclasses import replace

import pytest
import torch
from conftest import HAS_CUDA
from dependent_launches import check_eager, check_graph
from modular import layer_config
from sanitize import copied, launches
from strategies import ACTIVATIONS
from sum_calls import with_nan

import moe_ops
from moe_ops.testing import (
    Problem,
    assert_layer_matches,
    bounded_oracle,
    call,
    make_inputs,
    quantize_inputs,
    reference_experts,
)

pytestmark = pytest.mark.gpu
DEVICE = "cuda" if HAS_CUDA else "cpu"
HOPPER = HAS_CUDA and torch.cuda.get_device_capability() == (9, 0)
BF16, F16 = torch.bfloat16, torch.float16
ROWS, SUM = "hopper_token_kernel", "hopper_token_sum_kernel"
BOTH = {ROWS, SUM}
SCHEMES = (
    "unquantized", "fp8_channel", "fp8_block128", "fp8_block128_ue8m0",
    "int8_channel", "int8_block128",
)  # fmt: skip
SMALL = Problem(1, 32, 4, 272, 144, BF16)
SIZES = {
    (1408, 704): (32, 4), (2880, 144): (32, 4), (272, 2880): (32, 4), (2880, 2880): (8, 1),
    (272, 272): (80, 10), (2048, 384): (64, 8), (144, 96): (48, 6),
}  # fmt: skip
"""Hidden and intermediate sizes, with experts and how many of them a token has."""
ROUTES = {
    "distinct": [3, 17, 0, 31],
    "holes": [-1, 5, 32, 9],
    "last": [-1, -5, 2**31 - 1, 31],
    "none": [-1, 32, 2**31 - 1, -(2**31)],
    "duplicates": [7, 7, 2, 7],
    "same": [6, 6, 6, 6],
}


def layer_of(problem, ids=None, seed=0):
    """A layer whose weights are stored, on the CPU; with ids of its one token."""
    inputs = make_inputs(problem, seed=seed)
    if ids is not None:
        inputs = inputs._replace(topk_ids=torch.tensor([ids], dtype=torch.int32))
    return quantize_inputs(problem, inputs)


def run(problem, stored):
    """The layer where operators run."""
    return call(moe_ops.fused_experts, problem, stored.inputs, quant_config=stored.config)


def check(problem, stored, kernels=BOTH):
    """Against the oracle; on Hopper these kernels of one token have been launched, and no other."""
    with launches() as names:
        actual = run(problem, copied(stored, DEVICE))
    assert not HOPPER or names & BOTH == kernels, names
    expected = reference_experts(problem, stored.inputs, stored.config)
    exact = bounded_oracle(problem, stored.exact, stored.config)
    assert_layer_matches(actual.cpu(), exact, expected)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_activations(scheme, activation, has_bias):
    problem = SMALL.with_(scheme=scheme, activation=activation, has_bias=has_bias)
    check(problem, layer_of(problem))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("top_k", [1, 2, 3, 4, 6, 8, 10, 16])
def test_numbers_of_experts(top_k, scheme):
    problem = SMALL.with_(num_experts=max(16, 8 * top_k), top_k=top_k, scheme=scheme)
    check(problem, layer_of(problem))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_sizes(sizes, scheme):
    (hidden, width), (experts, top_k) = sizes, SIZES[sizes]
    problem = Problem(1, experts, top_k, hidden, width, BF16, "silu", True, scheme=scheme)
    check(problem, layer_of(problem))


@pytest.mark.parametrize("scheme", SCHEMES[:3])
@pytest.mark.parametrize("activation", ["silu", "swigluoai", "relu2_no_mul"])
def test_float16(activation, scheme):
    problem = SMALL.with_(dtype=F16, scheme=scheme, activation=activation, has_bias=True)
    check(problem, layer_of(problem))


@pytest.mark.parametrize("ids", ROUTES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_routings(scheme, ids):
    problem = SMALL.with_(scheme=scheme, has_bias=True)
    check(problem, layer_of(problem, ROUTES[ids]))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_experts_on_other_ranks(scheme):
    problem = SMALL.with_(num_experts=48, num_local_experts=32, scheme=scheme)
    expert_map = make_inputs(problem).expert_map
    here, there = ((expert_map >= 0) == which for which in (True, False))
    here, there = here.nonzero().flatten().tolist(), there.nonzero().flatten().tolist()
    some, none = [here[3], there[0], -1, here[30]], [*there[:3], 48]
    for ids in (some, none, [there[1], there[2], here[-1], there[1]]):
        check(problem, layer_of(problem, ids))


@pytest.mark.parametrize(
    ("scheme", "top_k", "kernels"),
    [("unquantized", 4, BOTH), ("fp8_channel", 4, {SUM}), ("fp8_channel", 1, BOTH)],
)
def test_router_weights_on_the_input(scheme, top_k, kernels):
    """Rows that are quantized with them are as many as slots: no longer one token for GEMM 1."""
    problem = SMALL.with_(scheme=scheme, top_k=top_k, on_input=True, has_bias=True)
    check(problem, layer_of(problem), kernels)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_ids_of_64_bits_and_strides(scheme):
    """What kernels are given is then a copy."""
    stored = copied(layer_of(SMALL.with_(scheme=scheme), ROUTES["holes"]), DEVICE)
    x, _, _, weights, ids, *_ = stored.inputs
    want = run(SMALL, stored)
    wide = {
        name: torch.stack([value, torch.zeros_like(value)], -1)[..., 0]
        for name, value in (("topk_weights", weights), ("topk_ids", ids), ("hidden_states", x))
    }
    assert not any(value.is_contiguous() for value in wide.values())
    for changes in ({"topk_ids": ids.long()}, {"topk_ids": wide["topk_ids"]}, wide):
        again = stored._replace(inputs=stored.inputs._replace(**changes))
        assert torch.equal(run(SMALL, again), want)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_rows_that_begin_anywhere(scheme):
    """One of many rows, at any address; what lies around it is NaN."""
    stored = copied(layer_of(SMALL.with_(scheme=scheme)), DEVICE)
    want, x = run(SMALL, stored), stored.inputs.hidden_states
    for offset in (0, 1, 4, 8):
        around = torch.full((3 * x.numel() + 8,), torch.nan, dtype=x.dtype, device=x.device)
        row = around[x.numel() + offset :][: x.numel()].view_as(x).copy_(x)
        again = stored._replace(inputs=stored.inputs._replace(hidden_states=row))
        assert torch.equal(run(SMALL, again), want), offset


def poisoned(stored):
    """NaN in all weights, scales and biases of experts that are not chosen."""
    chosen = set(stored.inputs.topk_ids.flatten().tolist())
    others = [e for e in range(SMALL.num_experts) if e not in chosen]

    def fill(x):
        of_experts = isinstance(x, torch.Tensor) and len(x) == SMALL.num_experts
        return with_nan(x, others) if of_experts else x

    names = ("w1_scale", "w2_scale", "w1_bias", "w2_bias")
    config = {name: fill(getattr(stored.config, name)) for name in names}
    inputs = stored.inputs._replace(w1=fill(stored.inputs.w1), w2=fill(stored.inputs.w2))
    new = moe_ops.FusedMoEQuantConfig(stored.config.scheme, **config)
    return stored._replace(inputs=inputs, config=new)


@pytest.mark.parametrize("ids", ["distinct", "holes", "none"])
@pytest.mark.parametrize("scheme", SCHEMES[:3])
def test_what_is_not_chosen_changes_nothing(scheme, ids):
    problem = SMALL.with_(scheme=scheme, has_bias=True)
    stored = layer_of(problem, ROUTES[ids])
    bad = poisoned(stored)
    assert bad.inputs.w1.float().isnan().any() and not stored.inputs.w1.float().isnan().any()
    skipped = (stored.inputs.topk_ids < 0) | (stored.inputs.topk_ids >= problem.num_experts)
    weights = stored.inputs.topk_weights.masked_fill(skipped, torch.nan)
    bad = bad._replace(inputs=bad.inputs._replace(topk_weights=weights))
    actual = run(problem, copied(bad, DEVICE))
    assert actual.isfinite().all()
    assert torch.equal(actual, run(problem, copied(stored, DEVICE)))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_same_every_time(scheme):
    problem = SMALL.with_(scheme=scheme, hidden_size=1408, intermediate_size=704)
    stored = copied(layer_of(problem), DEVICE)
    want = run(problem, stored)
    assert all(torch.equal(run(problem, stored), want) for _ in range(20))


def routed(problem, seed=0, larger=1):
    """A layer that routes; its second weight is so much larger than others'."""
    inputs = make_inputs(problem, seed=seed)
    inputs = inputs._replace(w2=inputs.w2 * larger)
    stored = copied(quantize_inputs(problem, inputs), DEVICE)

    def layer(x, logits):
        weights, ids = moe_ops.fused_topk(x, logits, problem.top_k, True)
        inputs = stored.inputs._replace(hidden_states=x, topk_weights=weights, topk_ids=ids)
        return run(problem, stored._replace(inputs=inputs))

    return layer


def tokens(problem, count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, problem.hidden_size, generator=generator).to(problem.dtype)
    return x.to(DEVICE), torch.randn(count, problem.num_experts, generator=generator).to(DEVICE)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_graphs_replay(scheme):
    """Bit by bit what eager calls give, whatever token and routing."""
    problem = SMALL.with_(scheme=scheme)
    layer, (x, logits) = routed(problem), tokens(problem, 1)
    layer(x, logits)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(x, logits)
    for seed in range(1, 12):
        new = tokens(problem, 1, seed)
        x.copy_(new[0]), logits.copy_(new[1])
        graph.replay()
        got = out.clone()
        assert torch.equal(got, layer(*new))


@pytest.mark.slow
@pytest.mark.parametrize("oblivious", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_compiled_programs(scheme, oblivious):
    """Of one token, and of any number of them: bit by bit what eager calls give."""
    torch._dynamo.reset()
    problem = SMALL.with_(scheme=scheme)
    layer = routed(problem)
    with torch.fx.experimental._config.patch(backed_size_oblivious=oblivious):
        compiled = torch.compile(layer, fullgraph=True, dynamic=True)
        for seed, count in enumerate((4, 1, 1, 3) if oblivious else (1, 1, 4, 1)):
            given = tokens(problem, count, seed)
            assert torch.equal(compiled(*given), layer(*given)), count


@pytest.mark.parametrize("scheme", SCHEMES)
def test_modular_kernel(scheme):
    problem = SMALL.with_(scheme=scheme, has_bias=True)
    stored = copied(layer_of(problem, ROUTES["holes"]), DEVICE)
    config = replace(layer_config(problem, DEVICE), max_num_tokens=None)
    kernel = moe_ops.select_kernel(config, stored.config, experts=moe_ops.pipeline.TritonExperts)
    x, w1, w2, weights, ids, *_ = stored.inputs
    with launches() as names:
        actual = kernel.apply(x, w1, w2, weights, ids, problem.activation, problem.num_experts)
    assert not HOPPER or names >= BOTH, names
    assert torch.equal(actual, run(problem, stored))


@pytest.fixture
def back_to_back():
    """No kernel between two of the library: fresh memory is not filled."""
    torch.utils.deterministic.fill_uninitialized_memory = False
    yield
    torch.utils.deterministic.fill_uninitialized_memory = True


def chain_of(problem):
    """20 layers of four weights, with routing between them; rows stay about as large as they are.

    Nothing but kernels of the library.
    """
    layers = [routed(problem, seed, larger=2) for seed in range(4)]

    def chain(x):
        seen = []
        for n in range(20):
            x = layers[n % 4](x, x[:, : problem.num_experts])
            seen.append(x)
        return torch.cat(seen)

    return chain


@pytest.mark.parametrize("sizes", [(512, 256), (2048, 768)], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES[:3])
def test_a_chain_of_layers(scheme, sizes, back_to_back):
    """Kernels that begin before the ones before them end give what they give one by one."""
    hidden, width = sizes
    problem = SMALL.with_(
        scheme=scheme, hidden_size=hidden, intermediate_size=width, activation="swigluoai"
    )
    chain = chain_of(problem)
    inputs = [tokens(problem, 1, seed)[0] for seed in range(4)]
    check_eager(chain, inputs)
    check_graph(chain, inputs)
