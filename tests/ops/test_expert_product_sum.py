"""The second expert GEMM with the weighted sum: what both give one after the other."""

import pytest
import torch
from conftest import HAS_CUDA, INTERPRETED
from hypothesis import given
from hypothesis import strategies as st
from pairwise import half_exhaustive
from strategies import DTYPES
from sum_calls import SumCall, SumProblem, apart, exact, sum_call, with_nan
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import moe_ops
from moe_ops import ops
from moe_ops.dispatch.early import EARLY
from moe_ops.reference import expert_product as reference
from moe_ops.scheme import get_scheme
from moe_ops.tensors import ExpertWeight
from moe_ops.testing import Problem, assert_matches_reference, call, make_inputs, quantize_inputs

HOPPER = HAS_CUDA and torch.cuda.get_device_capability() == (9, 0)
SCHEMES = ("unquantized", "fp8_channel", "fp8_block128", "int8_channel")


@st.composite
def problems(draw):
    """Few tokens, odd sizes, slots that repeat an expert or have none."""
    scheme = draw(st.sampled_from(SCHEMES))
    return SumProblem(
        tokens=draw(st.integers(0, 5)),
        top_k=draw(st.integers(1, 5)),
        experts=draw(st.sampled_from((1, 3, 16, 40))),
        hidden=draw(st.sampled_from((1, 24, 72, 130))),
        width=draw(st.sampled_from((8, 44, 48, 144, 272))),
        scheme=scheme,
        dtype=draw(st.sampled_from(DTYPES)),
        has_bias=draw(st.booleans()),
        weighted=draw(st.booleans()),
        routing=draw(st.sampled_from(("plain", "holes", "map"))),
        stored=draw(st.booleans()),
        expert_order=scheme == "unquantized" and draw(st.booleans()),
        invariant=draw(st.booleans()),
    )


def judged(problem):
    """What a budget in the dtype of the result can judge.

    Hopper's tensor cores keep about 14 bits of sums of 8-bit floats: float32 would show it.
    """
    shown = HOPPER and problem.scheme.startswith("fp8") and problem.dtype == torch.float32
    return problem._replace(dtype=torch.float16) if shown else problem


@pytest.mark.kernel
@given(problem=problems(), seed=st.integers(0, 3))
def test_equals_the_gemm_then_the_sum(problem, seed, device):
    """Bit by bit; on Hopper one token has another kernel, with another order of sums."""
    one_token = HOPPER and problem.tokens == 1 and not problem.invariant
    problem = judged(problem) if one_token else problem
    given = sum_call(problem, device, seed)
    actual = ops.expert_product_sum(*given)
    assert actual.shape == (problem.tokens, problem.hidden) and actual.dtype == problem.dtype
    if one_token:
        expected = reference.expert_product_sum(*sum_call(problem, "cpu", seed))
        assert_matches_reference(actual.cpu(), exact(given), expected)
    else:
        assert torch.equal(actual, apart(given))


@pytest.mark.kernel
@given(problem=problems())
def test_matches_the_oracle(problem, device):
    problem = judged(problem)
    given = sum_call(problem, device)
    expected = reference.expert_product_sum(*sum_call(problem))
    assert_matches_reference(ops.expert_product_sum(*given).cpu(), exact(given), expected)


@pytest.mark.kernel
@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_one_token(scheme, stored, device):
    """Each slot's row has scales of its own, whoever quantizes it."""
    problem = judged(SumProblem(1, 4, 40, 72, 144, scheme, has_bias=True, stored=stored))
    given, expected = sum_call(problem, device), reference.expert_product_sum(*sum_call(problem))
    assert_matches_reference(ops.expert_product_sum(*given).cpu(), exact(given), expected)


def poisoned(given):
    """NaN in all that belongs to no slot, or to a slot without an expert."""
    unused = ~given.used.flatten().to(given.a.device)
    chosen = set(given.topk_ids.flatten().tolist())
    expert_map = given.tiles[2]
    if expert_map is not None:
        places = dict(enumerate(expert_map.tolist()))
        chosen = {places.get(expert, -1) for expert in chosen}
    others = [e for e in range(len(given.weight.data)) if e not in chosen]

    def fill(x, rows):
        return None if x is None else with_nan(x, rows)

    weights = given.topk_weights.masked_fill(unused.view(given.topk_ids.shape), torch.nan)
    return given._replace(
        a=fill(given.a, unused),
        a_scale=fill(given.a_scale, unused),
        weight=ExpertWeight(*(fill(x, others) for x in given.weight)),
        topk_weights=weights,
    )


def some_skipped(problem, device):
    """A call in which some slots have an expert, and some have none."""
    calls = (sum_call(problem, device, seed) for seed in range(99))
    return next(c for c in calls if c.used.any() and not c.used.all())


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("scheme", "tokens", "routing", "stored"),
    half_exhaustive(SCHEMES, [1, 3], ["holes", "map"], [False, True], where=INTERPRETED),
)
def test_what_is_skipped_changes_nothing(scheme, tokens, routing, stored, device):
    sizes = (tokens, 4, 3 if routing == "map" else 40, 72, 144, scheme)  # a map leaves out 2 of 5
    problem = SumProblem(*sizes, has_bias=True, routing=routing, stored=stored)
    given = some_skipped(problem, device)
    actual = ops.expert_product_sum(*poisoned(given))
    assert actual.isfinite().all() and torch.equal(actual, ops.expert_product_sum(*given))


@pytest.mark.kernel
@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_slot_has_an_expert(scheme, device):
    """Zeros, whatever rows and weights hold."""
    given = sum_call(SumProblem(1, 3, 40, 72, 144, scheme, has_bias=True), device)
    given = given.routed_to(torch.full_like(given.topk_ids, -1))
    assert (ops.expert_product_sum(*poisoned(given)) == 0).all()


@pytest.mark.kernel
@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
@pytest.mark.parametrize("scheme", ["unquantized", "fp8_channel"])
def test_strided_arguments(scheme, ids, device):
    """Rows, weights and ids that do not lie one after the other."""
    given = some_skipped(SumProblem(1, 3, 40, 72, 144, scheme, routing="holes"), device)
    given = given.routed_to(given.topk_ids.to(ids))

    def spaced(x):
        return torch.stack([x] * 2, -1)[..., 0]

    strided = given.routed_to(spaced(given.topk_ids))
    strided = strided._replace(a=spaced(given.a), topk_weights=spaced(given.topk_weights))
    assert not strided.a.is_contiguous() and not strided.topk_weights.is_contiguous()
    assert torch.equal(ops.expert_product_sum(*strided), ops.expert_product_sum(*given))


def test_errors():
    given = sum_call(SumProblem(scheme="int8_channel"))
    with pytest.raises(ValueError, match="scheme"):
        ops.expert_product_sum(*given._replace(scheme="int9"))
    with pytest.raises(TypeError, match="out_dtype must be the dtype of a, torch.bfloat16, got"):
        ops.expert_product_sum(*sum_call(SumProblem())._replace(out_dtype=torch.float64))
    with pytest.raises(RuntimeError, match="out_dtype"):
        ops.expert_product_sum(*given._replace(out_dtype=None))
    plain = sum_call(SumProblem())
    with pytest.raises(ValueError, match="w_global_scale must be None for scheme unquantized"):
        weight = plain.weight._replace(global_scale=torch.ones(4))
        ops.expert_product_sum(*plain._replace(weight=weight))
    with pytest.raises(ValueError, match="plan must be a tensor for 6 slots of 4 experts"):
        given = sum_call(SumProblem(3))
        ops.expert_product_sum(*given._replace(tiles=[None, *given.tiles[1:]]))


class Calls(TorchDispatchMode):
    """The names of the library's operators that are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "moe_ops":
            self.names.append(func.name().split("::")[1])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("scheme", "tokens", "once"),
    [
        *((scheme, 1, True) for scheme in SCHEMES[:3]),
        *((scheme, 2, False) for scheme in SCHEMES[:3]),
        ("int8_channel", 1, True),
        ("int4_w4a16_g16", 1, True),
        ("int4_w4a16_g16", 2, False),
        ("mxfp4", 1, False),
    ],
)
def test_which_layers_call_it(scheme, tokens, once, device):
    """Layers of one token do, where Hopper multiplies what is stored or decodes it."""
    problem = Problem(tokens, 32, 2, 128, 128, torch.bfloat16, scheme=scheme)
    quantized = quantize_inputs(problem, make_inputs(problem, device))
    with Calls() as calls:
        call(moe_ops.fused_experts, problem, quantized.inputs, quant_config=quantized.config)
    assert ("expert_product_sum" in calls.names) == once
    assert ("moe_fused_mul_sum" in calls.names) != once
    assert get_scheme(scheme).weight is None or calls.names


def test_programs_for_any_number_of_tokens_call_it():
    """Where a compiler may not assume that there are several."""
    problem = Problem(4, 32, 2, 32, 16, torch.bfloat16)
    inputs, seen = make_inputs(problem), []

    def backend(graph, _):
        seen.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    def layer(x, weights, ids):
        return moe_ops.fused_experts(x, inputs.w1, inputs.w2, weights, ids)

    torch._dynamo.reset()
    compiled = torch.compile(layer, backend=backend, fullgraph=True, dynamic=True)
    with torch.fx.experimental._config.patch(backed_size_oblivious=True):
        for tokens in (4, 1, 3):
            rows = (inputs.hidden_states, inputs.topk_weights, inputs.topk_ids)
            given = [x[:tokens].clone() for x in rows]
            assert torch.equal(compiled(*given), layer(*given))
    (targets,) = seen
    assert any("expert_product_sum" in target for target in targets)
    assert not any("moe_fused_mul_sum" in target for target in targets)


@pytest.mark.parametrize("scheme", ["unquantized", "fp8_block128", "int4_w4a16_g16"])
def test_who_lets_it_read_early(scheme, monkeypatch):
    """The eager pipeline, which knows what is written between both GEMMs; no graph, no default."""
    operator, told = ops.expert_product_sum, []
    problem = Problem(1, 32, 2, 128, 128, torch.bfloat16, scheme=scheme)
    (x, w1, w2, weights, ids, *_), config, _ = quantize_inputs(problem, make_inputs(problem))

    def layer(x, weights, ids):
        return moe_ops.fused_experts(x, w1, w2, weights, ids, quant_config=config)

    def record(*given):
        told.append(EARLY.get())
        return operator(*given)

    class Recorded(torch.fx.Interpreter):
        def call_function(self, target, args, kwargs):
            if target is operator:
                told.append(EARLY.get())
            return super().call_function(target, args, kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(ops, "expert_product_sum", record)
        layer(x, weights, ids)
        with moe_ops.pipeline.gemms.apart():
            layer(x, weights, ids)
    assert told == [True, False] and not EARLY.get()
    told.clear()
    torch._dynamo.reset()
    Recorded(make_fx(layer)(x, weights, ids)).run(x, weights, ids)
    torch.compile(layer, backend=lambda graph, _: Recorded(graph).run, fullgraph=True)(
        x, weights, ids
    )
    assert told == [False, False]


def test_calls_name_their_arguments_as_the_schema_does():
    schema = torch.ops.moe_ops.expert_product_sum.default._schema
    assert [argument.name for argument in schema.arguments] == list(SumCall._fields)
