"""Batch-invariant mode: a token's result, bit by bit, whatever else is in the batch."""

from dataclasses import replace

import pytest
import torch
from conftest import HAS_CUDA, INTERPRETED
from hypothesis import given
from hypothesis import strategies as st
from modular import EXPERTS, PREPARES, build_prepare, capacity, fit, layer_config, router_logits
from strategies import layers
from table_items import every_row
from torch._dynamo.testing import CompileCounterWithBackend

import moe_ops
from moe_ops.dispatch.row_tiles import INVARIANT, PORTABLE
from moe_ops.dispatch.tiles import MANY_TOKENS, plan_sizes
from moe_ops.inspect.workspace import PeakMemory
from moe_ops.pipeline.gated_experts import gated_experts
from moe_ops.pipeline.row_spaces import depends_on_batch
from moe_ops.scheme import min_capability
from moe_ops.support import ARCHITECTURES
from moe_ops.testing import Problem, make_inputs, quantize_inputs

BY_ALL = tuple(n for n, s in moe_ops.SCHEMES.items() if depends_on_batch(s.activation))
SCHEMES = tuple(n for n in moe_ops.SCHEMES if n not in BY_ALL)
CLASSES = tuple(e for e in EXPERTS if e.SUPPORTS.batch_invariant)
GIVEN_OR_FP8 = ("nvfp4", "mxfp4_w4a8", "mxfp4_w4a8_token")
"""Schemes with scales of activations that are given, or which layers hold as fp8."""
PACKED = [n for n in SCHEMES if moe_ops.packs(n, 64, 64) and n not in GIVEN_OR_FP8]
"""Other schemes that layers pack."""
EACH_PRODUCT = ("unquantized", "fp8_block128", "int8_channel", "int4_w4a16_g32", "mxfp4")
"""Schemes with every operator of products, and with rows that are not quantized."""
BATCHED = moe_ops.pipeline.FusedMoEActivationFormat.BatchedExperts
SIZES = (4, 3, 2, 32, 24) if INTERPRETED else (40, 6, 2, 160, 136)


class Layer:
    """A kernel in batch-invariant mode, and tokens to run in any selection."""

    def __init__(self, experts, problem, device):
        self.problem = problem
        self.inputs, config, _ = quantize_inputs(problem, make_inputs(problem, device))
        self.logits = router_logits(problem, device)
        moe_config = replace(layer_config(problem, device), batch_invariant=True)
        numbers = (capacity(problem), 1) if experts.activation_format() is BATCHED else ()
        part = build_prepare(next(p for p in PREPARES if fit(experts, p)), problem)
        self.kernel = moe_ops.FusedMoEKernel(part, experts(moe_config, config, *numbers))

    def __call__(self, rows):
        x, w1, w2, weights, ids, expert_map, *_ = self.inputs
        p = self.problem
        rest = (p.activation, p.num_experts, expert_map, p.on_input)
        if self.kernel.is_monolithic:
            return self.kernel.apply_monolithic(x[rows], w1, w2, self.logits[rows], *rest)
        return self.kernel.apply(x[rows], w1, w2, weights[rows], ids[rows], *rest)


def check(layer, alone=range(0), seed=0):
    """All tokens, some alone, a part, all in another order, and in chunks."""
    tokens = layer.problem.num_tokens
    g = torch.Generator().manual_seed(seed)
    whole = layer(slice(None))
    order = torch.randperm(tokens, generator=g).to(whole.device)
    assert torch.equal(layer(order), whole[order])
    part = order[: (tokens + 1) // 2]
    assert torch.equal(layer(part), whole[part])
    for t in alone:
        assert torch.equal(layer(slice(t, t + 1)), whole[t : t + 1]), t
    kernel = layer.kernel
    if not kernel.is_monolithic and kernel.fused_experts.supports_chunking():
        kernel.chunk_size = 3
        assert torch.equal(layer(slice(None)), whole)


@every_row("scheme", EACH_PRODUCT)
def test_under_autocast(scheme, device):
    """Bits are those without it if it casts nothing."""
    problem = Problem(num_tokens=5, scheme=scheme, dtype=torch.bfloat16)
    layer = Layer(moe_ops.pipeline.TritonExperts, problem, device)
    expected = layer(slice(None))
    with torch.autocast(device, torch.bfloat16):
        assert torch.equal(layer(slice(None)), expected)


def classes_and_schemes():
    """Everything; in the interpreter each operator with each class, unless all are asked for."""
    for i, experts in enumerate(CLASSES):
        for scheme in SCHEMES:
            marks = []
            if INTERPRETED and experts is not moe_ops.pipeline.TritonExperts:
                if scheme not in EACH_PRODUCT:  # the same operators as in the schemes that run
                    continue
                marks = [pytest.mark.exhaustive] * ((i + EACH_PRODUCT.index(scheme)) % 2)
            yield pytest.param(experts, scheme, marks=marks)


@pytest.mark.kernel
@pytest.mark.parametrize(("experts", "scheme"), [*classes_and_schemes()])
def test_every_class_and_scheme(experts, scheme, device):
    dtype = (torch.bfloat16, torch.float16, torch.float32)[SCHEMES.index(scheme) % 3]
    layer = Layer(experts, Problem(*SIZES, dtype, scheme=scheme), device)
    check(layer, alone=(0, 2) if INTERPRETED else range(0, 40, 3 if HAS_CUDA else 13))


OTHERS = [] if INTERPRETED else ["int8_w8a16"]


@pytest.mark.kernel
@pytest.mark.parametrize("scheme", ["unquantized", "int4_w4a16_g128", *OTHERS])
def test_a_load_that_has_other_tiles_by_default(scheme, device):
    """Few enough rows for the interpreter: with all of them the default takes another step in K."""
    problem = Problem(24, 1, 1, 1024, 256, torch.float16, scheme=scheme)
    layer = Layer(moe_ops.pipeline.TritonExperts, problem, device)
    check(layer, alone=(0, 23))


@pytest.mark.kernel
@given(problem=layers(SCHEMES), experts=st.sampled_from(CLASSES), seed=st.integers(0, 2**16))
def test_any_problem(problem, experts, seed, device):
    check(Layer(experts, problem, device), range(0, problem.num_tokens, 4), seed)


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("experts", CLASSES)
def test_loads_that_differ_a_lot(experts, scheme):
    """In the default mode these have different tiles."""
    layer = Layer(experts, Problem(1500, 16, 4, 1024, 768, torch.bfloat16, scheme=scheme), "cuda")
    check(layer, alone=(0, 1, 700, 1499))
    whole = layer(slice(None))
    for tokens in (8, 64, 500):
        assert torch.equal(layer(slice(tokens, 2 * tokens)), whole[tokens : 2 * tokens])


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", PACKED)
def test_packed_weights_at_such_loads(scheme):
    """On Hopper layers pack these; one token alone has a tile of its own for each slot."""
    layer = moe_ops.FusedMoE(
        16, 4, 1024, 768, params_dtype=torch.bfloat16, device="cuda", batch_invariant=True
    )
    moe_ops.quantize_(layer, scheme, progress=False)
    packed = torch.cuda.get_device_capability() == (9, 0) and scheme != "int4_w4a8_g128"
    assert layer.state.fragments == (("w13", "w2") if packed else ())
    x = torch.randn(1500, 1024, device="cuda", dtype=torch.bfloat16)
    logits = logits_of(1500, 16, "cuda")
    with torch.no_grad():
        whole = layer(x, logits)
        for first, last in ((0, 1), (700, 702), (8, 16), (64, 128), (300, 700), (1, 1500)):
            assert torch.equal(layer(x[first:last], logits[first:last]), whole[first:last])


def logits_of(tokens, experts, device):
    return 3 * torch.randn(tokens, experts, generator=torch.Generator().manual_seed(0)).to(device)


@pytest.mark.kernel
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_routing_is_invariant_without_asking(scoring, renormalize, device):
    """Programs of one token and of many."""
    experts, tokens = (4, 5) if INTERPRETED else (100, 8)
    logits = logits_of(MANY_TOKENS, experts, device)

    def route(some):
        return moe_ops.fused_topk(some, some, 3, renormalize, scoring_func=scoring)

    whole = route(logits)
    for rows in (slice(7, 8), slice(0, tokens), slice(0, None, 131)):
        for actual, expected in zip(route(logits[rows].contiguous()), whole, strict=True):
            assert torch.equal(actual, expected[rows])


@pytest.mark.kernel
@pytest.mark.parametrize("scheme", ["unquantized", "fp8_channel"])
@torch.no_grad()
def test_fused_moe_and_the_module(scheme, device):
    problem = Problem(*SIZES, torch.bfloat16, scheme=scheme)
    (x, w1, w2, *_), config, _ = quantize_inputs(problem, make_inputs(problem, device))
    logits = logits_of(*SIZES[:2], device)
    layer = moe_ops.FusedMoE(
        *SIZES[1:], params_dtype=torch.bfloat16, scheme=scheme, device=device,
        batch_invariant=True,
    )  # fmt: skip
    named = {"w13_weight": w1, "w2_weight": w2, "w13_weight_scale": config.w1_scale}
    for name, value in {**named, "w2_weight_scale": config.w2_scale}.items():
        if value is not None:
            getattr(layer, name).data.copy_(value)

    def moe(some, of):
        return moe_ops.fused_moe(
            some, w1, w2, of, SIZES[2], quant_config=config, batch_invariant=True
        )

    whole = moe(x, logits)
    assert torch.equal(layer(x, logits), whole)
    layer.chunk_size = 2
    assert torch.equal(layer(x, logits), whole)
    for t in (0, 3):
        token = x[t : t + 1], logits[t : t + 1]
        assert torch.equal(moe(*token), whole[t : t + 1])
        assert torch.equal(layer(*token), whole[t : t + 1])


@pytest.mark.kernel
def test_gated_experts(device):
    x, w1, w2, weights, ids, *_ = make_inputs(Problem(*SIZES), device)

    def gate(rows):
        g, u = rows.chunk(2, -1)
        return g.relu() * u

    def layer(rows):
        routing = weights[rows], ids[rows]
        return gated_experts(x[rows], w1, w2, *routing, gate, batch_invariant=True)

    whole = layer(slice(None))
    for rows in (slice(0, 1), slice(2, 4)):
        assert torch.equal(layer(rows), whole[rows])


def test_one_graph_for_every_token_count(device):
    torch._dynamo.reset()
    _, w1, w2, *_ = make_inputs(Problem(4, 8, 2, 32, 48, torch.bfloat16), device)

    def layer(x, logits):
        return moe_ops.fused_moe(x, w1, w2, logits, 2, batch_invariant=True)

    counter = CompileCounterWithBackend("aot_eager")
    with torch.fx.experimental._config.patch(backed_size_oblivious=True):
        compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
        for tokens in (7, 64, 1, 0, 300):
            x = torch.randn(tokens, 32, device=device).to(torch.bfloat16)
            arguments = x, logits_of(tokens, 8, device)
            assert torch.equal(compiled(*arguments), layer(*arguments))
    assert counter.frame_count == 1


@every_row("scheme", BY_ALL)
def test_a_scale_of_all_tokens_is_refused(scheme):
    problem = Problem(scheme=scheme)
    (x, w1, w2, weights, ids, *_), config, _ = quantize_inputs(problem, make_inputs(problem))
    rule = f"batch_invariant must be False for scheme {scheme}, .* got True; .*fp8_tensor_static"
    given = {"quant_config": config, "batch_invariant": True}
    logits, config = (
        router_logits(problem, "cpu"),
        replace(layer_config(problem), batch_invariant=True, max_num_tokens=None),
    )
    with pytest.raises(NotImplementedError, match=rule):
        moe_ops.fused_experts(x, w1, w2, weights, ids, **given)
    with pytest.raises(NotImplementedError, match=rule):
        moe_ops.fused_moe(x, w1, w2, logits, 2, **given)
    with pytest.raises(NotImplementedError, match=rule):
        moe_ops.FusedMoE(8, 2, 64, 48, scheme=scheme, batch_invariant=True)
    with pytest.raises(NotImplementedError, match=rule):
        moe_ops.pipeline.TritonExperts(config, given["quant_config"])
    with pytest.raises(NotImplementedError, match=rule):
        moe_ops.workspace_nbytes(4, 16, 8, 4, 2, x.dtype, scheme=scheme, batch_invariant=True)
    with pytest.raises(NotImplementedError, match="one scale for all tokens"):
        moe_ops.select_kernel(config, scheme)


def test_what_else_is_refused():
    config = replace(layer_config(Problem()), batch_invariant=True)
    plain = moe_ops.FusedMoEQuantConfig("unquantized")
    with pytest.raises(NotImplementedError, match="must be False for NaiveBatchedExperts, got"):
        moe_ops.pipeline.NaiveBatchedExperts(config, plain, 4, 1)
    with pytest.raises(ValueError, match="NaiveBatchedExperts: kernel does not support batch inv"):
        moe_ops.select_kernel(config, plain, experts=moe_ops.pipeline.NaiveBatchedExperts)
    sizes = (8, 2, 64, 48)
    with pytest.raises(NotImplementedError, match="enable_eplb over several ranks"):
        moe_ops.FusedMoE(*sizes, ep_size=2, enable_eplb=True, batch_invariant=True)
    with pytest.raises(NotImplementedError, match="more than two ranks are summed.* with 4 ranks"):
        moe_ops.FusedMoE(*sizes, tp_size=4, reduce_results=True, batch_invariant=True)
    moe_ops.FusedMoE(*sizes, tp_size=2, reduce_results=True, batch_invariant=True)
    moe_ops.FusedMoE(*sizes, tp_size=4, batch_invariant=True)


ONE_TILE = [
    (scheme, arch, format)
    for scheme in SCHEMES
    for arch in ARCHITECTURES
    for format in ("standard", "batched")
    if arch >= min_capability(moe_ops.get_scheme(scheme).activation)
    if (arch, format) != (90, "standard")
]
"""Where one row tile serves every load; Hopper has several, see `dispatch.row_tiles`."""


@every_row(("scheme", "arch", "format"), ONE_TILE)
def test_explained_tiles_are_the_same_at_any_load(scheme, arch, format):
    rows = 64 if format == "batched" else None
    config = replace(layer_config(Problem()), batch_invariant=True, max_num_tokens=rows)
    told = moe_ops.explain(config, scheme, num_tokens=(1, 7, 64, 4096), device=f"sm_{arch}")
    assert {c.gemm1.block_m for c in told.costs} == {64}
    assert len({c.gemm1 for c in told.costs}) == len({c.gemm2 for c in told.costs}) == 1


def test_memory_and_warmup_know_the_mode():
    tokens, experts, k = 16, 8, 2
    problem = Problem(tokens, experts, k, 64, 48, torch.bfloat16)
    layer = Layer(moe_ops.pipeline.TritonExperts, problem, "cpu")
    with PeakMemory() as memory:
        layer(slice(None))

    def plan(rule):
        return -(-4 * plan_sizes(tokens * k, experts, rule).entries // 512) * 512

    sizes = (tokens, 64, 48, experts, k, torch.bfloat16)
    assert moe_ops.workspace_nbytes(*sizes, device="cpu", batch_invariant=True) == memory.peak
    more = moe_ops.workspace_nbytes(*sizes, device="cpu") - memory.peak
    assert more == plan(PORTABLE) - plan(INVARIANT)
    x, w1, w2, *_ = layer.inputs
    ran = moe_ops.warmup(w1, w2, k, 4000, batch_invariant=True)
    assert len(ran) < len(moe_ops.warmup(w1, w2, k, 4000))
