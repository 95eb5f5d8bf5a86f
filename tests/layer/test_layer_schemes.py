"""The layer in every scheme: its output on ranks, compiled, copied, moved."""

import copy
import io
import pickle

import pytest
import torch
from checkpoints import Experts, numbers, per_expert
from pairwise import half_exhaustive

import moe_ops
from moe_ops.scheme import SCHEMES
from moe_ops.testing import (
    Inputs,
    Problem,
    assert_layer_matches,
    assert_matches_reference,
    bounded_oracle,
    reference_experts,
)

E, K, H, I, T = 4, 2, 64, 128, 13  # noqa: E741


def make(scheme, device="cpu", **options):
    experts = Experts.random(E, H, I).quantized(scheme)
    quant, static = moe_ops.get_scheme(scheme).activation, None
    if quant is not None and (quant.static or quant.global_scale):
        static = 3 / quant.element.largest / (448 if quant.global_scale else 1)
    layer = moe_ops.FusedMoE(E, K, H, I, scheme=scheme, device=device, **options)
    source = per_expert(experts, input_scale=static)
    bias = options.get("e_score_correction_bias")
    source |= {} if bias is None else {"gate.e_score_correction_bias": bias}
    moe_ops.load_checkpoint(layer, source, progress=False)
    return layer


def batch(device="cpu", tokens=T):
    g = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, H, generator=g)
    return x.to(device), torch.randn(tokens, E, generator=g).to(device)


def judge(layer, x, logits):
    """The oracle on the stored numbers, and the same with the scheme's roundings."""
    weights, ids, _ = layer.route(x, logits)
    problem = Problem(T, E, K, H, I, scheme=layer.scheme.name)
    bare = (weights, ids, None, None, None)
    config = layer.quant_method.get_fused_moe_quant_config(layer)
    exact = bounded_oracle(problem, Inputs(x, *numbers(layer), *bare), config)
    stored = Inputs(x, layer.w13_weight, layer.w2_weight, *bare)
    return exact, reference_experts(problem, stored, config)


@pytest.mark.kernel
@pytest.mark.parametrize("scheme", SCHEMES)
def test_output(scheme, device):
    layer, (x, logits) = make(scheme, device), batch(device)
    assert_layer_matches(layer(x, logits), *judge(layer, x, logits))


RANKS = {
    "tp2": [{"tp_size": 2, "tp_rank": r} for r in range(2)],
    "tp4": [{"tp_size": 4, "tp_rank": r} for r in range(4)],
    "ep2": [{"ep_size": 2, "ep_rank": r} for r in range(2)],
    "ep4": [{"ep_size": 4, "ep_rank": r} for r in range(4)],
    "round_robin": [
        {"ep_size": 2, "ep_rank": r, "expert_placement_strategy": "round_robin"} for r in range(2)
    ],
}


@pytest.mark.parametrize(("scheme", "ranks"), half_exhaustive(SCHEMES, RANKS))
def test_ranks_sum_to_the_whole(scheme, ranks):
    """Quantized tokens: finer blocks or scales of fewer rows make other roundings, not more."""
    whole, (x, logits) = make(scheme), batch()
    exact, reference = judge(whole, x, logits)
    total = sum(make(scheme, **rank)(x, logits) for rank in RANKS[ranks])
    if SCHEMES[scheme].activation is None:
        assert_matches_reference(total, exact, reference)
    else:
        error, allowed = ((y.double() - exact.value).norm() for y in (total, reference))
        assert error <= 1.1 * allowed


OTHERS = [*moe_ops.SCHEMES][::2]
"""Schemes whose experts `test_modular_compile` compiles."""


@pytest.mark.parametrize(
    "scheme",
    [pytest.param(s, marks=[pytest.mark.exhaustive] * (s in OTHERS)) for s in SCHEMES],
)
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
    assert len(graphs) == 1
    called = [str(n.target) for n in graphs[0].graph.nodes if "moe_ops" in str(n.target)]
    assert 4 <= len(called) <= 7 and all(name.endswith(".default") for name in called)


@pytest.mark.parametrize("scheme", ["fp8_block128", "int4_w4a16_g128_zp", "fp8_tensor_static"])
def test_exported(scheme):
    layer, arguments = make(scheme), batch()
    tokens = torch.export.Dim("tokens", min=2, max=4096)
    shapes = ({0: tokens}, {0: tokens})
    exported = torch.export.export(layer, arguments, dynamic_shapes=shapes)
    for count in (T, 40):
        arguments = batch(tokens=count)
        assert torch.equal(exported.module()(*arguments), layer(*arguments))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_copies_and_state(scheme):
    layer, arguments = make(scheme), batch()
    expected = layer(*arguments)
    loaded = moe_ops.FusedMoE(E, K, H, I, scheme=scheme)
    loaded.load_state_dict(layer.state_dict())
    assigned = moe_ops.FusedMoE(E, K, H, I, scheme=scheme)
    assigned(*arguments)  # whatever is derived from parameters is derived again
    assigned.load_state_dict(layer.state_dict(), assign=True)
    saved = io.BytesIO()
    torch.save(layer, saved)
    saved.seek(0)
    unsaved = torch.load(saved, weights_only=False)
    pickled = pickle.loads(pickle.dumps(layer))
    for twin in (copy.deepcopy(layer), pickled, loaded, assigned, unsaved):
        assert torch.equal(twin(*arguments), expected)
    twin = copy.deepcopy(layer)
    twin.w13_weight_scale.data.zero_() if scheme != "unquantized" else twin.w13_weight.data.zero_()
    assert torch.equal(layer(*arguments), expected)


def test_an_assigned_dtype_is_the_layers():
    """What is made later (scales, exchanged tokens, tensors of checkpoints) has the new dtype."""
    layer = moe_ops.FusedMoE(E, K, H, I, params_dtype=torch.float32)
    state = copy.deepcopy(layer).bfloat16().state_dict()
    layer.load_state_dict(state, assign=True)
    cast = moe_ops.FusedMoE(E, K, H, I, params_dtype=torch.bfloat16)
    cast.load_state_dict(state)
    assert layer.state.in_dtype == layer.sizes.dtype == torch.bfloat16
    assert layer.initial_seed is None and cast.initial_seed is None
    for each in (layer, cast):
        moe_ops.quantize_(each, "int8_w8a16")
    assigned = layer.state_dict()
    for name, x in cast.state_dict().items():
        assert torch.equal(x, assigned[name]) and x.dtype == assigned[name].dtype


@pytest.mark.parametrize("scheme", SCHEMES)
def test_moving_changes_no_bit_of_what_is_stored(scheme):
    bias = torch.linspace(0, 1, E)
    layer = make(scheme, has_bias=False, e_score_correction_bias=bias, scoring_func="sigmoid")
    before = copy.deepcopy(layer.state_dict())
    del before["_extra_state"]
    layer.to(torch.bfloat16).double().float()
    if scheme == "unquantized":
        assert layer.sizes.dtype == torch.float32
        before = {n: x.bfloat16().float() for n, x in before.items() if "bias" not in n}
    for name, x in before.items():
        now = getattr(layer, name)
        assert now.dtype == x.dtype and torch.equal(now.view(torch.uint8), x.view(torch.uint8))
    meta = copy.deepcopy(layer).to("meta")
    assert all(p.is_meta for p in meta.parameters())
    empty = meta.to_empty(device="cpu")
    empty.load_state_dict(layer.state_dict())
    assert torch.equal(empty(*batch()), layer(*batch()))


def test_parameters_may_be_replaced():
    """The tensors that kernels get are those that the module has now."""
    layer, arguments = make("fp8_channel"), batch()
    layer(*arguments)
    doubled = {"w2_weight_scale": layer.w2_weight_scale * 2}
    swapped = torch.func.functional_call(layer, doubled, arguments)
    exact = layer(*arguments) * 2
    assert torch.equal(swapped, exact)
    layer.w2_weight_scale = torch.nn.Parameter(doubled["w2_weight_scale"], requires_grad=False)
    assert torch.equal(layer(*arguments), exact)


@pytest.mark.parametrize("scheme", ["fp8_channel", "int4_w4a16_g32"])
def test_an_ensemble_by_vmap(scheme):
    """Also before any other call, which is when a layer looks whether anything was loaded."""
    layer, arguments = make(scheme), batch()
    stacked = {name: torch.stack([x, x.view_as(x)]) for name, x in layer.named_parameters()}
    stacked["w2_weight_scale"][1] *= 2

    def member(parameters):
        return torch.func.functional_call(layer, parameters, arguments)

    with torch.no_grad():
        both = torch.vmap(member)(stacked)
    out = layer(*arguments)
    assert torch.equal(both, torch.stack([out, 2 * out]))
