"""Packed weights in the operator and in everything that calls it: the plain form's bits."""

from itertools import product

import pytest
import torch
from modular import build_experts, build_prepare
from packed_weights import MORE, PACKABLE, UNDER_FP8, UNDER_GROUPS, UNDER_ONE
from planning import problem_of_call
from plans import planned
from products import scaled_product, stored_product, weight_of

import moe_ops
from moe_ops import FusedMoEQuantConfig, ops, pack_weight, packs, quantize_weight
from moe_ops.dispatch.device import NO_GPU, assumed
from moe_ops.dispatch.gemm_plan import plan_gemm
from moe_ops.inspect.devices import TARGETS
from moe_ops.pipeline.gated_experts import gated_experts
from moe_ops.pipeline.gemms import quantized
from moe_ops.pipeline.row_spaces import SlotRows
from moe_ops.scheme import as_scheme, get_scheme
from moe_ops.tensors import ExpertWeight, Tiles
from moe_ops.testing import Problem, make_inputs

FORMS = [(True, True), (True, False), (False, True)]
"""Which of both weights are packed."""


def layer_of(problem, scheme):
    """Inputs of a problem, and by form (plain or packed) both of its weights."""
    inputs = make_inputs(problem)
    plain = [quantize_weight(w, scheme) for w in (inputs.w1, inputs.w2)]
    packed = [
        pack_weight(q, scheme) if packs(scheme, *w.shape[1:]) else q
        for q, w in zip(plain, (inputs.w1, inputs.w2), strict=True)
    ]
    return inputs, (plain, packed)


def config_of(scheme, w1, w2, **biases):
    """The quantization config of both weights."""
    rows, given = as_scheme(scheme).activation, {}
    if rows is not None and rows.static:
        given = {"a1_scale": torch.tensor([0.01]), "a2_scale": torch.tensor([0.002])}
    elif rows is not None and rows.global_scale:
        given = {"a1_gscale": torch.tensor([0.003]), "a2_gscale": torch.tensor([0.002])}
    return FusedMoEQuantConfig.from_weights(scheme, w1, w2, **given, **biases)


def run(inputs, weights, scheme, problem, function=moe_ops.fused_experts, **options):
    config = config_of(scheme, *weights, w1_bias=inputs.w1_bias, w2_bias=inputs.w2_bias)
    w1, w2 = (q.data for q in weights)
    routed = (inputs.topk_weights, inputs.topk_ids)
    return function(
        inputs.hidden_states, w1, w2, *routed, quant_config=config, expert_map=inputs.expert_map,
        **options,
    )  # fmt: skip


@pytest.mark.parametrize("scheme", [*PACKABLE, *UNDER_FP8, *UNDER_GROUPS, *UNDER_ONE, *MORE])
def test_every_scheme(scheme):
    problem = Problem(9, 4, 2, 128, 192, torch.bfloat16, has_bias=True, scheme=scheme)
    inputs, forms = layer_of(problem, scheme)
    expected = run(inputs, forms[0], scheme, problem, activation="silu")
    for first, second in FORMS:
        weights = (forms[first][0], forms[second][1])
        actual = run(inputs, weights, scheme, problem, activation="silu")
        assert torch.equal(actual, expected)


@pytest.mark.parametrize(
    ("scheme", "hidden", "width", "activation"),
    [
        ("mxfp4_w4a16", 2880, 64, "swigluoai"),
        ("int4_w4a16_g128_zp", 128, 1408, "silu"),
        ("nvfp4_w4a16", 192, 704, "relu2_no_mul"),
        ("int8_w8a16_g128", 64, 640, "gelu"),
        ("int4_w4a8_g128", 2880, 704, "silu"),
        ("fp8_w8a16", 128, 96, "silu"),  # only w1, of 192 rows, is packed
    ],
)
@pytest.mark.parametrize("local", [None, 2])
def test_sizes(scheme, hidden, width, activation, local):
    problem = Problem(5, 3, 2, hidden, width, torch.float16, activation, has_bias=True,
                      num_local_experts=local, scheme=scheme)  # fmt: skip
    inputs, (plain, packed) = layer_of(problem, scheme)
    assert packed[0].data.dtype == torch.int32
    assert (packed[1].data.dtype == torch.int32) == (width != 96)
    for options in ({}, {"apply_router_weight_on_input": True}, {"batch_invariant": True}):
        both = (
            run(inputs, w, scheme, problem, activation=activation, **options)
            for w in (packed, plain)
        )
        assert torch.equal(*both)


def test_gates_of_the_caller():
    scheme = "int4_w4a16_g32"
    problem = Problem(5, 3, 2, 64, 128, torch.bfloat16, scheme=scheme)
    inputs, forms = layer_of(problem, scheme)

    def gate(rows):
        return rows[:, ::2].sigmoid() * rows[:, 1::2]

    both = (run(inputs, w, scheme, problem, gated_experts, gate=gate, is_gated=True) for w in forms)
    assert torch.equal(*both)


@pytest.mark.parametrize(
    ("experts", "prepare"),
    [
        (moe_ops.pipeline.TritonExperts, moe_ops.pipeline.MoEPrepareAndFinalizeNoEP),
        (moe_ops.pipeline.GroupedGemmExperts, moe_ops.pipeline.MoEPrepareAndFinalizeNoEP),
        (moe_ops.pipeline.BatchedTritonExperts, moe_ops.pipeline.BatchedPrepareAndFinalize),
        (moe_ops.pipeline.BatchedGroupedGemmExperts, moe_ops.pipeline.BatchedPrepareAndFinalize),
        (moe_ops.pipeline.NaiveBatchedExperts, moe_ops.pipeline.BatchedPrepareAndFinalize),
        (moe_ops.pipeline.MonolithicExperts, moe_ops.pipeline.MoEPrepareAndFinalizeNoEPMonolithic),
    ],
)
@pytest.mark.parametrize("scheme", ["int8_w8a16_g32_zp", "int4_w4a8_g128", "nvfp4"])
def test_modular_kernels(experts, prepare, scheme):
    problem = Problem(6, 4, 2, 128, 64, torch.bfloat16, has_bias=True, scheme=scheme)
    inputs, forms = layer_of(problem, scheme)
    results = []
    for w1, w2 in forms:
        config = config_of(scheme, w1, w2, w1_bias=inputs.w1_bias, w2_bias=inputs.w2_bias)
        part = build_experts(experts, problem, config)
        kernel = moe_ops.FusedMoEKernel(build_prepare(prepare, problem), part)
        if experts is moe_ops.pipeline.MonolithicExperts:
            logits = torch.randn(6, 4, generator=torch.Generator().manual_seed(2))
            out = kernel.apply_monolithic(
                inputs.hidden_states, w1.data, w2.data, logits, "silu", 4, None, False
            )
        else:
            routed = (inputs.topk_weights, inputs.topk_ids)
            out = kernel.apply(inputs.hidden_states, w1.data, w2.data, *routed, "silu", 4, None)
        results.append(out)
    assert torch.equal(*results) and results[0].any()


@pytest.mark.parametrize("name", ["mxfp4_w4a16", "mxfp4_w4a8_token", "mxfp4_mxfp8"])
def test_compiled_without_a_break(name):
    scheme = get_scheme(name)
    problem = Problem(6, 4, 2, 64, 128, torch.bfloat16, scheme=scheme.key)
    inputs, (plain, (w1, w2)) = layer_of(problem, scheme)
    config = FusedMoEQuantConfig.from_weights(scheme, w1, w2)
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def layer(x, weights, ids):
        return moe_ops.fused_experts(x, w1.data, w2.data, weights, ids, quant_config=config)

    actual = layer(inputs.hidden_states, inputs.topk_weights, inputs.topk_ids)
    assert torch.equal(actual, run(inputs, plain, scheme, problem))


@pytest.mark.parametrize("compiling", [False, True])
def test_who_quantizes_on_a_gpu(compiling, monkeypatch):
    """The operator quantizes rows itself under a packed weight, and only there.

    Not those of tokens that several slots read, if there are many.
    """
    scheme, n, k = get_scheme("int4_w4a8_g128"), 128, 256
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    q = quantize_weight(torch.empty(32, n, k, device="meta"), scheme)
    for tokens, top_k in product((2, 8192), (1, 2)):
        x = torch.empty(2 * tokens // top_k, k, dtype=torch.bfloat16, device="meta")
        ids = torch.empty(tokens, 2, dtype=torch.int32, device="meta")
        space = SlotRows(Tiles(None, ids), 32)
        for weight, given in ((q, False), (pack_weight(q, scheme), tokens == 2 or top_k == 1)):
            weight = ExpertWeight(weight.data, None, weight.scale, None, weight.global_scale)
            with assumed(NO_GPU):
                rows = quantized(x, None, weight, space, scheme, top_k, "silu" * (top_k == 2))
            assert (rows.data is x) == given and (rows.scale is None) == given


def test_rows_with_scales_along_k_are_quantized_before(monkeypatch):
    """Also under a compiler, which has no plan to ask."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    scheme = get_scheme("mxfp8")
    q = pack_weight(quantize_weight(torch.empty(32, 128, 256, device="meta"), scheme), scheme)
    x = torch.empty(2, 256, dtype=torch.bfloat16, device="meta")
    space = SlotRows(Tiles(None, torch.empty(2, 2, dtype=torch.int32, device="meta")), 32)
    with assumed(NO_GPU):
        rows = quantized(x, None, ExpertWeight(q.data, None, q.scale), space, scheme)
    assert rows.data.dtype == torch.float8_e4m3fn and rows.scale.shape == (2, 8)


def operator_call(scheme="int4_w4a16_g32_zp", n=128, k=192):
    """Arguments of the operator with a packed weight."""
    problem = Problem(5, 3, 2, k, n, torch.bfloat16, "silu_no_mul", scheme=scheme)
    inputs, (_, (w, _)) = layer_of(problem, scheme)
    plan = planned(inputs.topk_ids, None, 3, scheme)
    return [inputs.hidden_states, *w, None, None, [*plan], 2, scheme]


def as_arguments(x, *given):
    """The arguments of `ops.expert_product` for those of `stored_product`."""
    *q, bias, weights, tiles, top_k, scheme = given
    return x, None, weight_of(q, bias), weights, tiles, top_k, scheme, x.dtype


@pytest.mark.parametrize("scheme", ["int4_w4a16_g32_zp", "fp8_w8a16"])
def test_opcheck(scheme):
    torch.library.opcheck(ops.expert_product, as_arguments(*operator_call(scheme)))


@pytest.mark.parametrize("scheme", UNDER_FP8)
def test_operators_that_quantize_rows(scheme):
    """Under a packed weight rows may be stored, or not be quantized yet: then without scales."""
    x, *w, _, _, tiles, top_k, _ = operator_call(scheme)
    w = (w[0], w[1], w[3])  # without zero points
    rows = ops.moe_quantize(x, None, None, None, None, 3, get_scheme(scheme).activation.key)
    tail = (None, tiles, top_k, scheme, torch.bfloat16)
    expected = scaled_product(ops, *rows, *w, *tail)
    assert torch.equal(scaled_product(ops, x, None, *w, *tail), expected)
    with pytest.raises(ValueError, match="a must be rows as scheme .* got rows of dtype"):
        scaled_product(ops, x, rows[1], *w, *tail)
    with pytest.raises(ValueError, match="a_scale must be given with rows of dtype"):
        scaled_product(ops, rows[0], None, *w, *tail)
    ids = torch.tensor([[0, 2]], dtype=torch.int32)
    tiles = [ops.plan_slots(ids, None, 3, scheme, torch.bfloat16), ids, None]
    weight = ExpertWeight(w[0], None, w[1], None, w[2])
    call = (x[:2], None, weight, None, tiles, scheme, torch.bfloat16)
    assert ops.expert_product_sum(*call).any()
    if w[1].dtype == torch.uint8:  # opcheck does not take fp8
        given = (x, None, weight, None, tail[1], top_k, scheme, torch.bfloat16)
        torch.library.opcheck(ops.expert_product, given)
        torch.library.opcheck(ops.expert_product_sum, call)


@pytest.mark.parametrize("scheme", ["mxfp8", "mxfp4_mxfp8"])
def test_rows_with_scales_along_k_are_stored(scheme):
    x, *w, _, _, tiles, top_k, _ = operator_call(scheme)
    with pytest.raises(ValueError, match="a must be rows as scheme .* stores them, .* got None"):
        scaled_product(ops, x, None, w[0], w[1], w[3], None, tiles, top_k, scheme, torch.bfloat16)


@pytest.mark.parametrize(
    ("which", "change", "error", "message"),
    [
        (1, lambda w: w.mT.contiguous().mT, ValueError, "w must be contiguous in the packed form"),
        (1, lambda w: w[:, :72], ValueError, "multiples of 64 if w is packed .*N = 72"),
        (2, lambda s: s.mT, ValueError, r"w_scale.shape\[1\] must be 6, got 128"),
        (3, lambda z: z.mT, ValueError, r"w_zero_point.shape\[1\] must be 6, got 64"),
    ],
)
def test_operator_refuses(which, change, error, message):
    call = operator_call()
    call[which] = change(call[which])
    if which == 1 and call[1].shape[1] == 72:
        call[2], call[3] = call[2][:, :, :72], call[3][:, :, :36]
    with pytest.raises(error, match=message):
        stored_product(ops, *call)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("target", [name for name, t in TARGETS.items() if t.facts is not None])
def test_plans(target, batch_invariant):
    """No portable kernel takes the packed form."""
    facts = TARGETS[target].facts._replace(portable_only=True)
    a, w, w_scale, *_, tiles, top_k, scheme = operator_call()
    call = {"a": a, "w_scale": w_scale, "tiles": tiles, "top_k": top_k, "scheme": scheme}
    call["batch_invariant"] = batch_invariant
    problem = problem_of_call("expert_product", w=w, **call)
    assert problem.fragments and problem.weight == (3, 128, 192)
    plain = problem_of_call("expert_product", w=w.view(torch.uint8), **call)
    assert not plain.fragments and plain.weight == problem.weight
    message = f"w must be in the plain form .*sm_{facts.arch}, got {scheme} in the packed form"
    with pytest.raises(NotImplementedError, match=message):
        plan_gemm(problem, facts)
    plan_gemm(problem._replace(fragments=False), facts)


def test_layer_checks():
    """Weights and scales of different forms, and sizes and schemes without a packed form."""
    scheme = "int4_w4a16_g32_zp"
    problem = Problem(5, 3, 2, 128, 192, torch.bfloat16, scheme=scheme)
    inputs, (plain, packed) = layer_of(problem, scheme)
    for mixed, name in (
        (packed[0]._replace(scale=plain[0].scale), "quant_config.w1_scale"),
        (packed[0]._replace(zero_point=plain[0].zero_point), "quant_config.w1_zp"),
        (plain[0]._replace(scale=packed[0].scale), "quant_config.w1_scale"),
    ):
        with pytest.raises(ValueError, match=f"{name} must have a shape of"):
            run(inputs, (mixed, packed[1]), scheme, problem)
    strided = packed[1]._replace(data=packed[1].data.mT.contiguous().mT)
    with pytest.raises(ValueError, match="w2 must be contiguous in the packed form"):
        run(inputs, (packed[0], strided), scheme, problem)
    quantized = "fp4:1x*:float32|fp4:1x32:e8m0"
    other = [quantize_weight(w, quantized) for w in (inputs.w1, inputs.w2)]
    other[0] = other[0]._replace(data=packed[0].data)
    with pytest.raises(NotImplementedError, match="dequantize weights.*if w1 is packed .*fp4:"):
        run(inputs, other, quantized, problem)


def test_warmup():
    scheme = "mxfp4_w4a16"
    problem = Problem(5, 3, 2, 128, 64, torch.bfloat16, scheme=scheme)
    _, (_, (w1, w2)) = layer_of(problem, scheme)
    config = FusedMoEQuantConfig.from_weights(scheme, w1, w2)
    assert moe_ops.warmup(w1.data, w2.data, 2, [1, 3], quant_config=config)
