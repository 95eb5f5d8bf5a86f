"""The modular kernel: what equals what, and the order of its steps."""

from dataclasses import replace

import pytest
import torch
from conftest import HAS_CUDA, INTERPRETED
from modular import (
    BATCHED,
    EXPERTS,
    SEPARATE,
    Recorder,
    layer_config,
    roundings,
    router_logits,
    setup,
    twice,
)
from pairwise import half_exhaustive

import moe_ops
from moe_ops import FusedMoEKernel
from moe_ops.pipeline import Call, PrepareResult
from moe_ops.pipeline.calls import Pending, chunk_of, num_experts_of
from moe_ops.tensors import Rows
from moe_ops.testing import (
    Problem,
    assert_layer_matches,
    bounded_oracle,
    oracle,
    reference_experts,
)

kernel = pytest.mark.kernel
MODULAR = tuple(e for e in EXPERTS if not e.is_monolithic())
SOME = ("unquantized", "fp8_tensor", "fp8_block128", "int4_w4a16_g32")
SCHEMES = SOME if INTERPRETED else tuple(moe_ops.SCHEMES)
LOCAL = tuple(  # schemes whose result for a row does not depend on the other rows
    name
    for name, s in moe_ops.SCHEMES.items()
    if name in SCHEMES
    and (s.activation is None or s.activation.static or not s.activation.per_tensor)
)
ON_REFERENCES = not (HAS_CUDA or INTERPRETED)
"""Here an expert's product is one `mm` of its rows, in slot order, whatever the format."""


def problem(scheme, **changes):
    sizes = (5, 4, 2, 32, 24) if INTERPRETED else (13, 6, 3, 160, 136)
    return Problem(*sizes, torch.bfloat16, scheme=scheme).with_(has_bias=True, **changes)


@kernel
@pytest.mark.parametrize("on_input", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_fused_experts_is_the_kernel_with_triton_experts(scheme, on_input, device):
    """The same operators with the same arguments."""
    p = problem(scheme, on_input=on_input, num_local_experts=3)
    s = setup(p, moe_ops.pipeline.TritonExperts, device)
    x, w1, w2, weights, ids, expert_map, _, _ = s.inputs
    actual = moe_ops.fused_experts(
        x, w1, w2, weights, ids, activation=p.activation, expert_map=expert_map,
        apply_router_weight_on_input=on_input, quant_config=s.config,
    )  # fmt: skip
    assert torch.equal(actual, s.apply())


@kernel
@pytest.mark.parametrize("sizes", [{"num_tokens": 1}, {}])
@pytest.mark.parametrize("scheme", SOME)
def test_experts_that_write_to_a_given_tensor(scheme, sizes, device):
    """The same bits in ``out``, which is returned; it may be the rows of the input."""
    p = problem(scheme, **sizes)
    s = setup(p, moe_ops.pipeline.TritonExperts, device)
    x, w1, w2, weights, ids, *_ = s.inputs
    experts = s.kernel.fused_experts
    how = (w1, w2, weights, ids, p.activation, p.num_experts, None, None, None, False)
    expected = experts.apply(x, *how)
    out = torch.full_like(x, float("nan"))
    assert experts.apply(x, *how, out=out) is out and torch.equal(out, expected)
    inplace = x.clone()
    experts.apply(inplace, *how, out=inplace)
    assert torch.equal(inplace, expected)


@kernel
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    ("standard", "batched"),
    [
        (moe_ops.pipeline.TritonExperts, moe_ops.pipeline.BatchedTritonExperts),
        (moe_ops.pipeline.GroupedGemmExperts, moe_ops.pipeline.BatchedGroupedGemmExperts),
    ],
)
def test_standard_is_batched(standard, batched, scheme, device):
    """Rows are the same. On references also their products, and so bit by bit where no scale
    spans rows; kernels may cut the two formats into other tiles."""
    p = problem(scheme)
    one, other = setup(p, standard, device), setup(p, batched, device)
    first, second = one.apply(), other.apply()
    if ON_REFERENCES and scheme in LOCAL:
        assert torch.equal(first, second)
    for s, actual in ((one, first), (other, second)):
        where = roundings(type(s.kernel.fused_experts), p)
        expected = reference_experts(p, s.inputs, s.config, where)
        exact = bounded_oracle(p, s.exact, s.config, where)
        assert_layer_matches(actual.cpu(), exact, expected.cpu())


@kernel
@pytest.mark.parametrize(
    ("experts", "scheme"),
    half_exhaustive([e for e in MODULAR if e.activation_format() is not BATCHED], LOCAL),
)
def test_chunked_is_whole(experts, scheme, device):
    """Chunks of other sizes are other products on the CPU, so within the budget of the whole."""
    p = problem(scheme)
    whole = setup(p, experts, device)
    where = roundings(experts, p)
    expected, exact = whole.apply().cpu(), bounded_oracle(p, whole.exact, whole.config, where)
    for size in (1, 4, p.num_tokens - 1):
        assert_layer_matches(
            setup(p, experts, device, chunk_size=size).apply().cpu(), exact, expected
        )
    for size in (p.num_tokens, 1000):
        assert torch.equal(setup(p, experts, device, chunk_size=size).apply().cpu(), expected)


@pytest.mark.parametrize("experts", [e for e in MODULAR if e.activation_format() is not BATCHED])
@pytest.mark.parametrize("scheme", ["unquantized", "fp8_channel", "int8_block128"])
def test_chunks_of_rows_that_have_their_weights(experts, scheme):
    """Prepare makes a row, and its scales, of each slot: a chunk has those of its tokens."""
    p = problem(scheme).with_(on_input=True)
    whole = setup(p, experts)
    chunked = setup(p, experts, chunk_size=3)
    expected = reference_experts(p, whole.inputs, whole.config, roundings(experts, p))
    for s in (whole, chunked):
        assert_layer_matches(s.apply(), oracle(p, whole.exact), expected)


def test_parts_of_a_call():
    """Of tokens 2 and 3, of which prepare has made a row for each slot, and counted them."""
    ids = torch.tensor([[0, 1], [1, 1], [2, 0], [1, 9]], dtype=torch.int32)
    call = Call(torch.zeros(4, 3), torch.zeros(3, 2, 3), torch.zeros(3, 3, 1), ids.float(), ids)
    rows, meta = (
        torch.arange(8)[:, None],
        moe_ops.pipeline.ExpertTokensMetadata(torch.tensor([2, 4, 1])),
    )
    part, chunk, counted = chunk_of(call, Rows(rows, -rows), meta, slice(2, 4), 2, True)
    assert torch.equal(part.topk_ids, ids[2:]) and torch.equal(part.topk_weights, ids[2:].float())
    assert chunk.data.flatten().tolist() == [4, 5, 6, 7]
    assert chunk.scale.flatten().tolist() == [-4, -5, -6, -7]
    assert counted.expert_num_tokens.tolist() == [1, 1, 1]
    assert counted.expert_num_tokens_cpu is None
    on_cpu = meta.make_from_list([2, 4, 1], "cpu")
    _, _, counted = chunk_of(call, Rows(rows, -rows), on_cpu, slice(2, 4), 2, True)
    assert counted.expert_num_tokens_cpu.tolist() == [1, 1, 1]
    _, chunk, _ = chunk_of(call, Rows(rows, rows[:1]), meta, slice(0, 1), 2, False)
    assert chunk.scale.tolist() == [[0]], "one scale is that of all rows"
    assert num_experts_of(call) == 3
    assert num_experts_of(call._replace(expert_map=torch.zeros(7))) == 7
    assert num_experts_of(call._replace(expert_map=torch.zeros(7), global_num_experts=9)) == 9


def test_batched_experts_get_no_map():
    """Prepare has used it: rows are those of local experts already."""
    seen = []

    class Batched(moe_ops.pipeline.BatchedTritonExperts):
        def apply(self, *arguments):
            seen.append(arguments[7])
            return super().apply(*arguments)

    setup(
        Problem(num_local_experts=4), Batched, prepare=moe_ops.pipeline.BatchedPrepareAndFinalize
    ).apply()
    assert seen == [None]


def test_a_step_is_hooked_before_it_is_received():
    steps = []
    pending = Pending.of((lambda: steps.append("hook"), lambda: steps.append("receiver")))
    pending.wait()
    assert steps == ["hook", "receiver"]


def test_experts_that_route_themselves_are_told_how(device):
    """By a sigmoid and a bias, within groups, scaled: as the router of that name."""
    p = Problem(num_experts=8, top_k=2)
    s = setup(p, moe_ops.pipeline.MonolithicExperts, device)
    method = moe_ops.RoutingMethodType.DeepSeekV3
    config = replace(layer_config(p, device), routing_method=method, scoring_func="sigmoid")
    experts = moe_ops.pipeline.MonolithicExperts(config, s.config)
    kernel = moe_ops.FusedMoEKernel(s.kernel.prepare_finalize, experts)
    x, w1, w2, *_ = s.inputs
    logits, bias = router_logits(p, device), torch.linspace(-1, 1, 8, device=device)
    actual = kernel.apply_monolithic(
        x, w1, w2, logits, p.activation, 8, None, False, num_expert_group=4,
        e_score_correction_bias=bias, routed_scaling_factor=2.5, topk_group=1,
    )  # fmt: skip
    weights, ids = moe_ops.grouped_topk(x, logits, 2, True, 4, 1, "sigmoid", 2.5, bias)
    expected = moe_ops.fused_experts(x, w1, w2, weights, ids, activation=p.activation)
    assert torch.equal(actual, expected)
    how = {"scoring_func": "sigmoid", "e_score_correction_bias": bias}
    ungrouped = moe_ops.fused_topk(x, logits, 2, True, **how)[1]
    assert not torch.equal(ungrouped, ids), "groups must decide something here"
    unbiased = moe_ops.grouped_topk(x, logits, 2, True, 4, 1, "sigmoid")[1]
    assert not torch.equal(unbiased, ids), "the bias must decide something here"


@kernel
@pytest.mark.parametrize(("experts", "scheme"), half_exhaustive(MODULAR, SOME, where=INTERPRETED))
def test_inplace_and_async_are_plain(experts, scheme, device):
    p = problem(scheme)
    expected = setup(p, experts, device).apply()
    again = setup(p, experts, device, asynchronous=True)
    assert torch.equal(again.apply(), expected)
    tokens = again.inputs.hidden_states.clone()
    inplace = setup(p, experts, device, asynchronous=True, inplace=True)
    result = inplace.apply(hidden_states=tokens)
    assert result is tokens and torch.equal(tokens, expected)


@kernel
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("number", [0, 1, 3])
@pytest.mark.parametrize("experts", MODULAR[:2])
def test_micro_batches_are_separate_calls(experts, number, asynchronous, device):
    """Of different token counts, one of them 0, with shared experts."""
    base = setup(
        problem("fp8_channel"), experts, device, asynchronous=asynchronous, shared_experts=twice
    )
    calls = []
    for tokens in (13, 0, 5)[:number]:
        x, w1, w2, weights, ids, *_ = base.inputs
        calls.append(Call(x[:tokens], w1, w2, weights[:tokens], ids[:tokens]))
    results = moe_ops.pipeline.run_micro_batches(base.kernel, calls)
    assert len(results) == number
    for call, (shared, routed) in zip(calls, results, strict=True):
        expected = base.kernel.apply(*call)
        assert torch.equal(shared, expected[0]) and torch.equal(routed, expected[1])


@kernel
@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_tokens(experts, scheme, device):
    p = problem(scheme, num_tokens=0)
    s = setup(p, experts, device)
    if experts.is_monolithic():
        logits = torch.zeros(0, p.num_experts, device=device)
        out = s.kernel.apply_monolithic(
            *s.inputs[:3], logits, p.activation, -1, s.inputs.expert_map, False
        )
    else:
        out = s.apply()
    assert out.shape == (0, p.hidden_size) and out.dtype == p.dtype


@kernel
@pytest.mark.parametrize(
    ("experts", "scheme", "on_input"),
    half_exhaustive(
        MODULAR,
        ("unquantized", "fp8_tensor", "int8_block128", "mxfp4_w4a16"),
        [False, True],
        where=INTERPRETED,
    ),
)
def test_what_is_skipped_is_not_read(experts, scheme, on_input, device):
    """Tokens and router weights without an expert may be NaN; scales do not see them."""
    p = problem(scheme, routing="holes", num_experts=6, num_local_experts=3, on_input=on_input)
    s = setup(p, experts, device)
    ids, expert_map = s.inputs.topk_ids, s.inputs.expert_map
    known = (ids >= 0) & (ids < p.num_experts)
    used = known & (expert_map[torch.where(known, ids, 0).long()] >= 0)
    assert (~used).all(1).any() and used.any()
    x = torch.where(used.any(1, keepdim=True), s.inputs.hidden_states, torch.nan)
    weights = torch.where(used, s.inputs.topk_weights, torch.nan)
    expected = s.apply()
    actual = s.apply(hidden_states=x.to(p.dtype), topk_weights=weights)
    assert torch.equal(actual, expected)
    assert (actual[~used.any(1)] == 0).all() and actual.isfinite().all()


def recorded(**options):
    s = setup(problem("unquantized"), moe_ops.pipeline.TritonExperts)
    events = []
    part = Recorder(moe_ops.pipeline.MoEPrepareAndFinalizeNoEP(), events)

    def shared(x):
        events.append("shared")
        return x

    experts = s.kernel.fused_experts
    compute = experts.apply

    def noted(*arguments):
        events.append("experts")
        return compute(*arguments)

    experts.apply = noted
    return s, FusedMoEKernel(part, experts, shared_experts=shared, **options), events


def test_shared_experts_run_while_rows_come_back():
    s, kernel, events = recorded()
    kernel.apply(**s.arguments())
    assert events == [
        "start prepare 0", "hook prepare 0", "receive prepare 0", "experts",
        "start finalize 0", "shared", "hook finalize 0", "receive finalize 0",
    ]  # fmt: skip


def test_micro_batches_overlap():
    """Call 1 is on its way before call 0 computes; rows of 0 come back while 1 computes."""
    s, kernel, events = recorded()
    call = Call(*s.inputs[:5])
    moe_ops.pipeline.run_micro_batches(kernel, [call, call])
    steps = [e for e in events if not e.startswith("hook") and e != "shared"]
    assert steps == [
        "start prepare 0", "start prepare 1", "receive prepare 0", "experts", "start finalize 0",
        "receive prepare 1", "experts", "receive finalize 0", "start finalize 1",
        "receive finalize 1",
    ]  # fmt: skip


def test_shared_experts_get_their_own_input():
    s = setup(problem("unquantized"), moe_ops.pipeline.TritonExperts, shared_experts=twice)
    latent = torch.ones(3, 4)
    shared, routed = s.apply(shared_experts_input=latent)
    assert torch.equal(shared, 2 * latent) and routed.shape == s.inputs.hidden_states.shape
    alone = setup(problem("unquantized"), moe_ops.pipeline.TritonExperts)
    with pytest.raises(ValueError, match="shared_experts_input must be None without shared"):
        alone.apply(shared_experts_input=latent)


class Rerouting(moe_ops.pipeline.MoEPrepareAndFinalizeNoEP):
    """Sends every token to other experts, with other weights."""

    def prepare(self, a1, topk_weights, topk_ids, *rest):
        result = super().prepare(a1, topk_weights, topk_ids, *rest)
        return PrepareResult(*result[:3], topk_ids.flip(0), topk_weights + 1)


@pytest.mark.parametrize("chunk_size", [None, 4])
@pytest.mark.parametrize("experts", [e for e in MODULAR if e.activation_format() is not BATCHED])
def test_prepare_may_replace_the_routing(experts, chunk_size):
    """And finalize is told of it: it sees what the experts saw."""
    p = problem("int8_channel")
    s = setup(p, experts, chunk_size=chunk_size)
    kernel = FusedMoEKernel(Rerouting(), s.kernel.fused_experts, chunk_size=chunk_size)
    changes = {
        "topk_ids": s.inputs.topk_ids.flip(0), "topk_weights": s.inputs.topk_weights + 1
    }  # fmt: skip
    assert torch.equal(kernel.apply(**s.arguments()), s.apply(**changes))


def test_rows_of_experts_that_quantize_have_their_weights(device):
    """With ``defer_input_quant`` prepare still scales rows, if the weights belong on the input."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(5, 16, generator=g).bfloat16().to(device)
    weights, ids = torch.rand(5, 2, generator=g).to(device), torch.zeros(5, 2, dtype=torch.int32)
    one = torch.ones(1, 1, 1, device=device)
    config = moe_ops.FusedMoEQuantConfig("fp8_channel", w1_scale=one, w2_scale=one)
    part = moe_ops.pipeline.MoEPrepareAndFinalizeNoEP()
    result = part.prepare(x, weights, ids.to(device), 1, None, True, config, True)
    slots = (x[:, None].float() * weights[:, :, None]).bfloat16().flatten(0, 1)
    assert torch.equal(result.a1q, slots) and result.a1q_scale is None
    assert part.prepare(x, weights, ids.to(device), 1, None, False, config, True).a1q is x


def test_delegation():
    s = setup(problem("unquantized"), moe_ops.pipeline.BatchedTritonExperts, shared_experts=None)
    k = s.kernel
    assert not k.is_monolithic and not k.supports_expert_map() and not k.output_is_reduced()
    assert setup(
        problem("unquantized"), moe_ops.pipeline.TritonExperts
    ).kernel.supports_expert_map()
    assert k.moe_parallel_config is None
    assert k.prepare_finalize.num_dispatchers() == 1
    assert k.fused_experts.w1_bias is s.config.w1_bias  # the pass-through of the interface
    assert k.fused_experts.quant_dtype is None and k.fused_experts.block_shape is None
    assert SEPARATE[0] in MODULAR
