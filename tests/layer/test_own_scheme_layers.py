"""Layers in schemes of a caller's own: in both formats, on ranks, compiled, exported, copied."""

import copy
import io
import pickle

import pytest
import torch
from checkpoints import Experts, numbers, per_expert
from conftest import INTERPRETED
from hypothesis import given
from modular import build_experts, build_prepare, layer_config
from own_schemes import MXFP8, OWN, ROW, E, H, I, K, each, quant
from strategies import schemes

import moe_ops
from moe_ops import SCHEMES, FusedMoEQuantConfig, Scheme, get_scheme, quantize_weight
from moe_ops.layer.partition import LayerSizes, aligned_sizes
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

T = 13


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
    "standard": (moe_ops.pipeline.TritonExperts, moe_ops.pipeline.MoEPrepareAndFinalizeNoEP),
    "batched": (moe_ops.pipeline.BatchedTritonExperts, moe_ops.pipeline.BatchedPrepareAndFinalize),
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
    assert type(chosen) is moe_ops.pipeline.BatchedTritonExperts


def make(scheme, device="cpu", **options):
    """A layer that has loaded a checkpoint in the scheme."""
    static = None
    quantized = scheme.activation
    if quantized is not None and (quantized.static or quantized.global_scale):
        static = 3 / quantized.element.largest
    layer = moe_ops.FusedMoE(E, K, H, I, scheme=scheme, device=device, **options)
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


def refined(scheme, width, ranks, *, gated=True, interleaved=False):
    sizes = LayerSizes(E, H, width, scheme, gated, interleaved, False, torch.float32)
    found = aligned_sizes(sizes, width, ranks)
    return found.scheme.key, found.intermediate_size


def test_ranks_have_finer_groups():
    """Groups are refined by their values; names are not taken apart."""
    groups = Scheme("own", quant("int8", (1, 128)), quant("int8", (1, 128)))
    assert refined(groups, 128, 2) == ("int8_block1x64", 64)
    blocks = Scheme("fp8_channel", quant("fp8", (1, 256)), quant("fp8", (128, 256), "e8m0"))
    assert refined(blocks, 384, 4) == ("fp8:1x32:float32|fp8:32x32:e8m0", 96)
    mixed = Scheme("fp8_block128", MXFP8, quant("int4", (1, 128), "e8m0"))
    assert refined(mixed, 128, 2) == ("fp8:1x32:e8m0|int4:1x64:e8m0", 64)
    assert refined(mixed, 48, 2) == (mixed.key, 128)
    assert refined(get_scheme("fp8_block128"), 192, 2) == ("fp8_block32", 96)
    assert refined(get_scheme("fp8_block64x128"), 192, 1) == ("fp8_block64x128", 192)


def test_only_axes_that_are_cut_have_finer_groups():
    """Gate and up have rows of their own; ranks cut columns too; a byte holds two 4-bit values."""
    block, small, packed = map(
        get_scheme, ("fp8_block128", "|int8:64x16:float32", "int4_w4a16_g32")
    )
    assert refined(block, 96, 1) == ("fp8_block32x128", 96)
    assert refined(block, 96, 1, gated=False) == ("fp8_block128", 96)
    assert refined(small, 192, 2) == ("int8_w8a16_block32x16", 96)
    for how in ({}, {"gated": False}, {"interleaved": True}):
        assert refined(packed, 33, 1, **how) == ("int4_w4a16_g32", 34)
    assert refined(get_scheme("nvfp4"), 48, 2) == ("nvfp4", 32)
    assert refined(get_scheme("unquantized"), 65, 2) == ("unquantized", 33)


@each
def test_states_are_told_apart(scheme):
    """Copies compute the same; a registered scheme of the same name does not load its weights."""
    layer, arguments = make(scheme), batch()
    expected = layer(*arguments)
    loaded = moe_ops.FusedMoE(E, K, H, I, scheme=scheme.key)
    loaded.load_state_dict(layer.state_dict())
    for twin in (loaded, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin(*arguments), expected) and twin.scheme == scheme
    if scheme.name in SCHEMES:
        other = moe_ops.FusedMoE(E, K, H, I, scheme=scheme.name)
        with pytest.raises(RuntimeError, match="weights must be stored as"):
            other.load_state_dict(layer.state_dict())


# Compilers


@pytest.mark.parametrize(
    "scheme",
    [
        pytest.param(scheme, id=name, marks=[pytest.mark.exhaustive] * (i % 2))
        for i, (name, scheme) in enumerate(OWN.items())
    ],
)
def test_compiled_once_for_every_token_count(scheme):
    """Every other scheme: what is traced depends on the kinds of its parts, which others share."""
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
    odd = Scheme("fp8_channel", quant("fp8", ROW), quant("fp8", (32, 32)))

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
