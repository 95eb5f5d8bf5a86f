"""Schemes of a caller's own: operators know them by what they mean, not by their names."""

import copy
import io
import itertools
import json
import pickle
import re

import pytest
import torch
from checkpoints import Experts, numbers, per_expert
from conftest import INTERPRETED
from hypothesis import given
from modular import build_experts, build_prepare, layer_config
from plans import planned
from strategies import schemes

import moe_ops
from moe_ops import (
    SCHEMES,
    FusedMoEQuantConfig,
    Quant,
    Scheme,
    dequantize_weight,
    get_scheme,
    ops,
    quantize_weight,
)
from moe_ops.dispatch import tuned
from moe_ops.dispatch.device import plain_name
from moe_ops.dispatch.gemm_plan import plan_gemm
from moe_ops.dispatch.hopper import plans_for
from moe_ops.dispatch.problem import layer_problem
from moe_ops.dispatch.tiles import ROW_TILES, Gemm
from moe_ops.dispatch.tuned_file import SPELLED, file_name, parse
from moe_ops.layer.partition import LayerSizes, aligned_sizes
from moe_ops.pipeline.devices import TARGETS
from moe_ops.scheme import WHOLE, Element, Group, refusal
from moe_ops.scheme.values import ELEMENTS, SCALE_BITS
from moe_ops.testing import (
    Inputs,
    Problem,
    Roundings,
    assert_layer_matches,
    assert_matches_reference,
    bounded_oracle,
    call,
    make_inputs,
    quantize_inputs,
    reference_experts,
)
from moe_ops.tuning import files
from moe_ops.tuning.search import Subject

TENSOR, ROW = Group(WHOLE, WHOLE), Group(1, WHOLE)
MXFP8 = get_scheme("mxfp8").activation


def quant(element, group, *more, **switches):
    return Quant(ELEMENTS[element], Group(*group), *more, **switches)


OWN = {
    scheme.name: scheme
    for scheme in (
        Scheme("int4 in floats", None, quant("int4", (1, 64))),
        Scheme("int8 in groups", quant("int8", (1, 32)), quant("int8", (1, 32))),
        Scheme("small blocks", quant("fp8", (1, 16)), quant("fp8", (64, 16))),
        Scheme("byte scales", quant("fp8", (1, 32)), quant("fp8", (32, 32), "e8m0")),
        Scheme("rows x tensor", quant("fp8", ROW, "pow2"), quant("fp8", TENSOR)),
        Scheme("static", quant("int8", TENSOR, static=True), quant("int8", ROW, "vector")),
        Scheme("zero points of rows", None, quant("int4", ROW, "input", zero_point=True)),
        Scheme("mx w4a8", MXFP8, quant("int4", (1, 64), "e4m3", global_scale=True)),
        Scheme("int8 x fp4", quant("int8", ROW), quant("fp4", (1, 32), "e8m0")),
        Scheme("mxfp6", quant("fp6_e3m2", (1, 64), "e8m0"), quant("fp6_e2m3", (16, 32), "e8m0")),
        Scheme("fp4 rows", quant("fp4", ROW), quant("fp4", ROW)),
        # A registered name with other contents:
        Scheme("fp8_channel", None, quant("fp8", (1, 32), "pow2")),
        Scheme("mxfp4", quant("fp4", (1, 64), "e8m0"), quant("fp4", (1, 64), "e8m0")),
    )
}
E, K, H, I, T = 4, 2, 64, 128, 13  # noqa: E741


def name_of(scheme):
    return scheme.name.replace(" ", "_")


each = pytest.mark.parametrize("scheme", OWN.values(), ids=name_of)


# Keys


@pytest.mark.parametrize("name", SCHEMES)
def test_registered_schemes_are_known_by_their_names(name):
    """Whatever they are called; what has a registered name and means something else is not."""
    scheme = SCHEMES[name]
    assert scheme.key == name and scheme.refusal is None and get_scheme(name) is scheme
    mine = Scheme("mine", scheme.activation, scheme.weight)
    assert mine == scheme and hash(mine) == hash(scheme) and mine.key == name


@pytest.mark.parametrize(
    "name",
    [
        *("fp8_block64", "fp8_block64x32_ue8m0", "int8_w8a16_block32", "int4_w4a16_g64"),
        *("int8_w8a16_g32_zp", "int4_w4a8_g32"),
    ],
)
def test_names_with_group_sizes_are_keys(name):
    scheme = get_scheme(name)
    assert scheme.key == name == Scheme("mine", scheme.activation, scheme.weight).key
    assert get_scheme("fp8_block128x128").key == "fp8_block128"


def test_keys_of_ones_own():
    for scheme in OWN.values():
        assert get_scheme(scheme.key) == scheme and scheme.key not in SCHEMES
        assert as_parts(scheme) == as_parts(get_scheme(scheme.key))
    assert OWN["int4 in floats"].key == "|int4:1x64:float32"
    assert OWN["rows x tensor"].key == "fp8:1x*:pow2|fp8:*x*:float32"
    assert OWN["fp8_channel"] != get_scheme("fp8_channel")
    assert len({s.key for s in (*OWN.values(), *SCHEMES.values())}) == len(OWN) + len(SCHEMES)


def as_parts(scheme):
    return scheme.activation, scheme.weight


@given(schemes(), schemes())
def test_a_key_says_everything(first, second):
    assert as_parts(get_scheme(first.key)) == as_parts(first)
    assert (first.key == second.key) == (as_parts(first) == as_parts(second)) == (first == second)
    assert (hash(first) == hash(second)) or first != second


@pytest.mark.parametrize(
    "key",
    ["int8:1x64:float32", "|int8:1x64", "|int8:01x64:float32", "|int8:1x64:float32:twice",
     "|int5:1x64:float32", "|int8:1xy:float32", "|int8:1x64:float64", "a|b|c",
     "|int4:1x64:input:zero_point:zero_point"],
)  # fmt: skip
def test_what_is_no_key(key):
    with pytest.raises(ValueError, match=f"must be .*got '{re.escape(key.strip('|'))}'"):
        get_scheme(key)


# What cannot be computed


def test_elements_of_ones_own_are_refused():
    fp8 = ELEMENTS["fp8"]
    for element in (fp8._replace(largest=240.0), Element("fp12", 12, 1.0, torch.int16)):
        with pytest.raises(ValueError, match="element must be a value of ELEMENTS, got Element"):
            Quant(element, ROW)
    with pytest.raises(ValueError, match="scale must be in .*got 'float64'"):
        Quant(fp8, ROW, "float64")
    for group in (Group(0, 16), Group(1, -2), Group(1, 16.0)):
        with pytest.raises(ValueError, match="group must have sizes that are positive or WHOLE"):
            Quant(fp8, group)


FP8_ROW, INT8_ROW, MXFP4 = quant("fp8", ROW), quant("int8", ROW), quant("fp4", (1, 32), "e8m0")
REFUSED = {
    "quantized rows alone": (FP8_ROW, None, "weight must be quantized if"),
    "a group of 24": (None, quant("int4", (1, 24)), "weight.group must have sizes"),
    "a group of 8": (None, quant("int4", (1, 8)), "weight.group must have sizes"),
    "one column": (None, quant("int4", (16, 1)), "weight.group must have sizes"),
    "24 rows": (None, quant("int8", (24, 16)), "weight.group must have sizes"),
    "rows that share a scale": (None, quant("int8", (16, WHOLE)), "weight.group must have one row"),
    "columns of all rows": (None, quant("int8", (WHOLE, 16)), "weight.group must have one row"),
    "static weights": (None, quant("fp8", TENSOR, static=True), "weight.static must be False"),
    "a vector of blocks": (None, quant("int8", (1, 32), "vector"), "weight.group must be .1, W"),
    "e4m3 under int8": (None, quant("int8", (1, 32), "e4m3"), "weight.element must be in"),
    "pow2 of int4": (None, quant("int4", (1, 32), "pow2"), "weight.element must not be int4"),
    "two float scales": (
        None,
        quant("fp8", (1, 32), global_scale=True),
        "weight.scale must be e4m3",
    ),
    "zero points of floats": (
        None,
        quant("fp4", (1, 32), zero_point=True),
        "weight.element must be st",
    ),
    "zero points of int8": (
        None,
        quant("int8", (1, 32), zero_point=True),
        "weight.element must be st",
    ),
    "zero points of blocks": (
        None,
        quant("int4", (16, 32), zero_point=True),
        "weight.group must have one",
    ),
    "zero points of bytes": (
        None,
        quant("int4", (1, 32), "e8m0", zero_point=True),
        "weight.scale must be fl",
    ),
    "zero points under int8": (
        INT8_ROW,
        quant("int4", ROW, zero_point=True),
        "weight.zero_point must be False",
    ),
    "int4 rows": (quant("int4", ROW), quant("int4", ROW), "activation.element must be in"),
    "uint8 rows": (quant("uint8", ROW), quant("uint8", ROW), "activation.element must be in"),
    "blocks of tokens": (
        quant("fp8", (16, 16)),
        quant("fp8", (16, 16)),
        "activation.group must have one",
    ),
    "rows in their dtype": (quant("fp8", ROW, "input"), FP8_ROW, "activation.scale must be"),
    "rows in a vector": (quant("fp8", ROW, "vector"), FP8_ROW, "activation.scale must be"),
    "zero points of rows": (
        quant("int8", ROW, zero_point=True),
        INT8_ROW,
        "activation.zero_point must",
    ),
    "bytes of rows": (quant("fp8", ROW, "e8m0"), FP8_ROW, "activation.group must have columns"),
    "e4m3 of fp8 rows": (
        quant("fp8", (1, 16), "e4m3"),
        MXFP4,
        "activation.element must be a float",
    ),
    "static rows": (quant("fp8", ROW, static=True), FP8_ROW, "activation.group must be .WHOLE, W"),
    "static powers": (
        quant("fp8", TENSOR, "pow2", static=True),
        FP8_ROW,
        "activation.scale must be float32",
    ),
    "a factor of rows": (
        quant("fp8", ROW, global_scale=True),
        FP8_ROW,
        "activation.scale must be e4m3",
    ),
    "a lost factor": (
        quant("fp4", (1, 16), "e4m3", global_scale=True),
        MXFP4,
        "weight.global_scale must be True",
    ),
    "rounded rows": (quant("fp8", (1, 32)), MXFP4, "activation.scale must be in"),
    "rounded weights": (FP8_ROW, quant("int4", (1, 32)), "weight.scale must be in"),
    "groups apart": (
        quant("fp8", (1, 32)),
        quant("fp8", (32, 64)),
        "weight.group must have 32 col",
    ),
    "groups under rows": (FP8_ROW, quant("fp8", (32, 64)), "weight.group must have all col"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_computed(case):
    """It raises before any operator: with the field, the rule and the value."""
    activation, weight, text = REFUSED[case]
    scheme = Scheme("fp8_channel", activation, weight)
    error, _ = scheme.refusal
    assert refusal(activation, weight) == scheme.refusal
    for function in (
        lambda: get_scheme(scheme.key),
        lambda: quantize_weight(torch.zeros(1, 32, 32), scheme),
        lambda: FusedMoEQuantConfig(scheme),
        lambda: moe_ops.FusedMoE(E, K, H, I, quant_config=scheme),
        lambda: moe_ops.explain(layer_config(Problem()), scheme),
        lambda: moe_ops.workspace_nbytes(1, H, I, E, K, torch.bfloat16, scheme=scheme),
    ):
        with pytest.raises(error, match=f"scheme.{text}.*, got "):
            function()
    row = moe_ops.TritonExperts.is_supported_config(
        moe_ops.TritonExperts, layer_config(Problem()), weight, activation,
        moe_ops.TritonExperts.activation_format(),
    )  # fmt: skip
    assert not row[0] and "quantization scheme" in row[1]


def test_every_combination_of_one_operand():
    """What is not refused quantizes weights and comes back; the rest has a reason."""
    g = torch.Generator().manual_seed(0)
    w = torch.randn(2, 48, 80, generator=g) / 9
    groups = (TENSOR, ROW, Group(1, 16), Group(1, 64), Group(32, 32))
    switches = [dict.fromkeys(names, True) for names in ((), ("zero_point",), ("global_scale",))]
    computed = 0
    for element, group, scale, more in itertools.product(ELEMENTS, groups, SCALE_BITS, switches):
        scheme = Scheme("own", None, Quant(ELEMENTS[element], group, scale, **more))
        if scheme.refusal is None:
            computed += 1
            error = dequantize_weight(quantize_weight(w, scheme), scheme) - w
            assert error.norm() < 0.3 * w.norm(), scheme.key
    assert computed > 150


# Weights and layers


def judged(problem, q, roundings=Roundings()):  # noqa: B008 (immutable)
    reference = reference_experts(problem, q.inputs, q.config, roundings)
    return bounded_oracle(problem, q.exact, q.config, roundings), reference


@pytest.mark.kernel
@each
def test_fused_experts(scheme, device):
    """One token, and more; an odd number of columns in the last groups."""
    for tokens in (1, 5 if INTERPRETED else 40):
        problem = Problem(tokens, 3, 2, 80, 48, torch.bfloat16, has_bias=True, scheme=scheme)
        q = quantize_inputs(problem, make_inputs(problem, device))
        out = call(moe_ops.fused_experts, problem, q.inputs, quant_config=q.config)
        assert_layer_matches(out, *judged(problem, q))


@pytest.mark.kernel
@given(schemes())
def test_any_scheme_runs(device, scheme):
    problem = Problem(4, 3, 2, 80, 48, torch.float16, scheme=scheme)
    q = quantize_inputs(problem, make_inputs(problem, device))
    out = call(moe_ops.fused_experts, problem, q.inputs, quant_config=q.config)
    assert_layer_matches(out, *judged(problem, q))


PARTS = {
    "standard": (moe_ops.TritonExperts, moe_ops.MoEPrepareAndFinalizeNoEP),
    "batched": (moe_ops.BatchedTritonExperts, moe_ops.BatchedPrepareAndFinalize),
}


@pytest.mark.kernel
@pytest.mark.parametrize("layout", PARTS)
@each
def test_modular_kernel(scheme, layout, device):
    problem = Problem(4 if INTERPRETED else 21, 3, 2, 64, 32, scheme=scheme)
    q = quantize_inputs(problem, make_inputs(problem, device))
    experts, prepare = PARTS[layout]
    kernel = moe_ops.FusedMoEKernel(
        build_prepare(prepare, problem), build_experts(experts, problem, q.config, device)
    )
    x, w1, w2, weights, ids, *_ = q.inputs
    out = kernel.apply(x, w1, w2, weights, ids, problem.activation)
    assert_layer_matches(out, *judged(problem, q, Roundings(per_expert=layout == "batched")))
    chosen = moe_ops.select_kernel(layer_config(problem, device), q.config).fused_experts
    assert type(chosen) is moe_ops.BatchedTritonExperts


def make(scheme, device="cpu", **options):
    """A layer that has loaded a checkpoint in the scheme."""
    static = None
    quantized = scheme.activation
    if quantized is not None and (quantized.static or quantized.global_scale):
        static = 3 / quantized.element.largest
    layer = moe_ops.FusedMoE(E, K, H, I, quant_config=scheme, device=device, **options)
    source = per_expert(Experts.random(E, H, I).quantized(scheme), input_scale=static)
    moe_ops.load_checkpoint(layer, source, progress=False)
    return layer


def batch(device="cpu", tokens=T):
    g = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, H, generator=g)
    return x.to(device), torch.randn(tokens, E, generator=g).to(device)


def judged_layer(layer, x, logits):
    weights, ids, _ = layer.route(x, logits)
    problem = Problem(T, E, K, H, I, scheme=layer.scheme)
    bare, config = (
        (weights, ids, None, None, None),
        layer.quant_method.get_fused_moe_quant_config(layer),
    )
    exact = bounded_oracle(problem, Inputs(x, *numbers(layer), *bare), config)
    stored = Inputs(x, layer.w13_weight, layer.w2_weight, *bare)
    return exact, reference_experts(problem, stored, config)


@pytest.mark.kernel
@each
def test_layer(scheme, device):
    layer, (x, logits) = make(scheme, device), batch(device)
    assert_layer_matches(layer(x, logits), *judged_layer(layer, x, logits))


@each
def test_ranks_sum_to_the_whole(scheme):
    whole, (x, logits) = make(scheme), batch()
    exact, reference = judged_layer(whole, x, logits)
    for size in (2, 4, 16):
        ranks = [make(scheme, tp_size=size, tp_rank=rank) for rank in range(size)]
        assert all(rank.scheme.refusal is None for rank in ranks)
        total = sum(rank(x, logits) for rank in ranks)
        if scheme.activation is None:
            assert_matches_reference(total, exact, reference)
        else:
            error, allowed = ((y.double() - exact.value).norm() for y in (total, reference))
            assert error <= 1.1 * allowed


def refined(scheme, width, ranks):
    sizes = LayerSizes(E, H, width, scheme, True, False, False, torch.float32)
    found = aligned_sizes(sizes, width, ranks)
    return found.scheme.key, found.intermediate_size


def test_ranks_have_finer_groups():
    """By value: names are not taken apart."""
    groups = Scheme("own", quant("int8", (1, 128)), quant("int8", (1, 128)))
    assert refined(groups, 128, 2) == ("int8_block1x64", 64)
    blocks = Scheme("fp8_channel", quant("fp8", (1, 256)), quant("fp8", (128, 256), "e8m0"))
    assert refined(blocks, 384, 4) == ("fp8:1x32:float32|fp8:32x32:e8m0", 96)
    mixed = Scheme("fp8_block128", MXFP8, quant("int4", (1, 128), "e8m0"))
    assert refined(mixed, 128, 2) == ("fp8:1x32:e8m0|int4:1x64:e8m0", 64)
    assert refined(mixed, 48, 2) == (mixed.key, 128)
    assert refined(get_scheme("fp8_block128"), 192, 2) == ("fp8_block32", 96)
    assert refined(get_scheme("fp8_block64x128"), 192, 1) == ("fp8_block64x128", 192)


@each
def test_states_are_told_apart(scheme):
    """Copies compute the same; a registered scheme of the same name does not load its weights."""
    layer, arguments = make(scheme), batch()
    expected = layer(*arguments)
    loaded = moe_ops.FusedMoE(E, K, H, I, quant_config=scheme.key)
    loaded.load_state_dict(layer.state_dict())
    for twin in (loaded, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin(*arguments), expected) and twin.scheme == scheme
    if scheme.name in SCHEMES:
        other = moe_ops.FusedMoE(E, K, H, I, quant_config=scheme.name)
        with pytest.raises(RuntimeError, match="weights must be stored as"):
            other.load_state_dict(layer.state_dict())


# Compilers


@each
def test_compiled_once_for_every_token_count(scheme):
    torch._dynamo.reset()
    layer, graphs = make(scheme), []

    def keep(graph, _):
        graphs.append(graph)
        return graph

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=keep)
    for tokens in (T, 5, 64):
        arguments = batch(tokens=tokens)
        assert torch.equal(compiled(*arguments), layer(*arguments))
    assert len(graphs) == 1 and scheme.key in str(graphs[0].graph)


def test_a_configuration_made_while_compiling():
    scheme, torch_call = OWN["int8 in groups"], moe_ops.fused_experts
    problem = Problem(9, 3, 2, 64, 32, scheme=scheme)
    q = quantize_inputs(problem, make_inputs(problem))
    x, w1, w2, weights, ids, *_ = q.inputs
    s1, s2 = q.config.w1_scale, q.config.w2_scale

    def run(x, s1, s2):
        config = FusedMoEQuantConfig(scheme, w1_scale=s1, w2_scale=s2)
        return torch_call(x, w1, w2, weights, ids, quant_config=config)

    def given(x, config):
        return torch_call(x, w1, w2, weights, ids, quant_config=config)

    torch._dynamo.reset()
    expected = run(x, s1, s2)
    for function, arguments in ((run, (x, s1, s2)), (given, (x, q.config))):
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(*arguments), expected)


def test_a_scheme_that_cannot_be_computed_raises_while_compiling():
    odd = Scheme("fp8_channel", FP8_ROW, quant("fp8", (32, 32)))

    def run(w):
        return quantize_weight(w, odd).data

    torch._dynamo.reset()
    with pytest.raises(Exception, match="weight.group must have all columns"):
        torch.compile(run, backend="eager", fullgraph=True)(torch.zeros(1, 32, 32))


@each
def test_exported(scheme):
    layer, arguments = make(scheme), batch()
    tokens = torch.export.Dim("tokens", min=2, max=4096)
    program = torch.export.export(layer, arguments, dynamic_shapes=({0: tokens}, {0: tokens}))
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for count in (T, 40):
        arguments = batch(tokens=count)
        assert torch.equal(loaded(*arguments), layer(*arguments))


def test_a_configuration_is_an_input_of_an_exported_program():
    problem = Problem(9, 3, 2, 64, 32, scheme=OWN["mx w4a8"])
    q = quantize_inputs(problem, make_inputs(problem))

    class Layer(torch.nn.Module):
        def forward(self, x, config):
            _, w1, w2, weights, ids, *_ = q.inputs
            return moe_ops.fused_experts(x, w1, w2, weights, ids, quant_config=config)

    arguments = (q.inputs.hidden_states, q.config)
    program = torch.export.export(Layer(), arguments)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    assert torch.equal(torch.export.load(file).module()(*arguments), Layer()(*arguments))


@pytest.mark.kernel
@pytest.mark.parametrize("scheme", [s for s in OWN.values() if "fp8" not in s.key], ids=name_of)
def test_opcheck(scheme, device):
    """(opcheck cannot compare fp8 with what it was.)"""
    problem = Problem(5, 3, 2, 64, 32, scheme=scheme)
    x, w, _, _, ids, *_ = make_inputs(problem, device)
    q, tiles = quantize_weight(w, scheme), (*planned(ids, None, ROW_TILES, 3), ROW_TILES, K)
    if scheme.activation is None:
        operator = torch.ops.moe_ops.weight_only_matmul.default
        arguments = (x, *q, None, None, *tiles, scheme.key, "silu")
    else:
        operator, one = torch.ops.moe_ops.scaled_matmul.default, torch.ones(1, device=x.device)
        given_scale = one if scheme.activation.static else None
        rows = ops.moe_quantize(x, given_scale, None, None, None, 0, scheme.activation.key)
        weight = (q.data, q.scale, q.global_scale, None)
        arguments = (*rows, *weight, *tiles, scheme.key, x.dtype, "silu")
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(operator, arguments, test_utils=tests)


# Plans, costs and files


GPUS = [name for name, target in TARGETS.items() if target.facts is not None]


@pytest.mark.parametrize("device", GPUS)
@each
def test_plans_follow_the_meaning(scheme, device):
    """A kernel that takes the formats; registered schemes' own kernels only by meaning."""
    facts = TARGETS[device].facts
    for tokens in (1, 64, 4096):
        sizes = Gemm(K * tokens, E, 128, 256, 2, 2, ROW_TILES)
        problem = layer_problem(sizes, scheme, "silu", tokens, K)
        assert problem.scheme == scheme.key
        kernel = plan_gemm(problem, facts).kernel
        dequantizes = scheme.activation is None or scheme.decoded
        assert ("dequantize" in kernel) == dequantizes, kernel


def test_a_registered_meaning_has_a_registered_plan():
    """Block-scaled instructions, Hopper's kernels and tuned files serve it under any name."""
    for name, device in (("mxfp8", "sm_100"), ("fp8_block128", "sm_90"), ("fp8_channel", "sm_90")):
        known, facts = get_scheme(name), TARGETS[device].facts
        mine = Scheme("mine", known.activation, known.weight)
        for tokens in (1, 4096):
            sizes = Gemm(8 * tokens, 128, 768, 2048, 2, 2, ROW_TILES)
            plans = [
                plan_gemm(layer_problem(sizes, s, "silu", tokens, 8), facts) for s in (mine, known)
            ]
            assert plans[0] == plans[1]


@each
def test_explain_and_workspace(scheme):
    config = layer_config(Problem())
    told = moe_ops.explain(config, scheme, num_tokens=(1, 64), device="sm_90")
    assert told.choice and scheme.name in str(told)
    assert json.loads(told.to_json())["scheme"] == scheme.key
    sizes = (64, H, I, E, K, torch.bfloat16)
    nbytes = [
        moe_ops.workspace_nbytes(*sizes, scheme=s, device="sm_90") for s in (scheme, scheme.key)
    ]
    assert nbytes[0] == nbytes[1] > 0


class Clock:
    """Tiles of 32 columns win."""

    def __call__(self, trial):
        return 100.0 + abs(trial.tiles.block_n - 32)


@each
def test_tuned_under_its_key(scheme, tmp_path, monkeypatch):
    """Written by `tune`, read back, and chosen by `plan_gemm` and for the plan's row tiles."""
    facts, sizes = TARGETS["sm_90"].facts, (E, I, H)
    subject = Subject(sizes, K, scheme, facts)
    assert files.tune(subject, [64], tmp_path, Clock()) == [64]
    (layer,) = tuned.read_folder(tmp_path)
    assert layer.scheme == scheme.key and layer.file == subject.file
    assert re.fullmatch(r"[\w=,.+@-]+", layer.file, re.ASCII)
    monkeypatch.setattr(tuned, "TABLES", tuned.tables([layer]))
    hopper = plans_for(scheme, facts.arch, 2, I)
    row_tiles = tuned.row_tiles(scheme, sizes, plain_name(facts.name), hopper=hopper)
    gemm = Gemm(64 * K, E, I, H, 2, 2, row_tiles)
    plan = plan_gemm(layer_problem(gemm, scheme, "silu", 64, K), facts)
    assert plan.source == f"tuned ({layer.file})" and plan.config.block_n == 32
    if scheme.name in SCHEMES:
        other = layer_problem(gemm, get_scheme(scheme.name), "silu", 64, K)
        assert "tuned" not in plan_gemm(other, facts).source


@given(schemes())
def test_names_of_files_have_one_key(scheme):
    name = file_name((1, 2, 3), "NVIDIA H200", scheme.key)
    assert parse(name, '{"top_k": 1}').scheme == scheme.key
    assert not set(scheme.key) & set(SPELLED.values()) and not set(name) & set('<>:"/\\|?* ')
