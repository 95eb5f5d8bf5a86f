"""`FusedMoEQuantConfig` with the layer: what it takes, what means the same, what does not fit."""

import pickle
from dataclasses import FrozenInstanceError

import pytest
import torch
from conftest import INTERPRETED
from modular import setup
from table_items import every_row

import moe_ops
from moe_ops import FusedMoEQuantConfig
from moe_ops.testing import Problem, assert_layer_matches, bounded_oracle, reference_experts

BF16 = torch.bfloat16
SCHEMES = tuple(moe_ops.SCHEMES)
STORED = tuple(n for n, s in moe_ops.SCHEMES.items() if s.weight is not None)


def problem(scheme, **changes):
    sizes = (5, 4, 2, 32, 24) if INTERPRETED else (7, 4, 2, 160, 136)
    return Problem(*sizes, BF16, scheme=scheme).with_(**changes)


def run(s, **tensors):
    """The layer with some of its configuration's tensors replaced."""
    given = dict(zip(moe_ops.scheme.TENSORS, s.config.tensors, strict=True)) | tensors
    config = FusedMoEQuantConfig(s.problem.scheme, **given)
    _, w1, w2, weights, ids, *_ = s.inputs
    x = s.inputs.hidden_states
    routing, activation = (weights, ids), s.problem.activation
    return moe_ops.fused_experts(x, w1, w2, *routing, activation=activation, quant_config=config)


@pytest.mark.kernel
@pytest.mark.parametrize(
    "scheme", [n for n in STORED if moe_ops.get_scheme(n).weight.group.cols == -1]
)
def test_scales_of_whole_rows_have_several_shapes(scheme, device):
    """One a tensor also as one for each half of w1; one a row with and without the last axis."""
    s = setup(problem(scheme), moe_ops.pipeline.TritonExperts, device)
    w1, w2 = s.config.w1_scale, s.config.w2_scale
    if s.config.scheme.weight.per_tensor:
        other = {"w1_scale": w1[:, None].expand(-1, 2).contiguous()}
    elif w1.dim() == 3:
        other = {"w1_scale": w1.flatten(1), "w2_scale": w2.flatten(1)}
    else:
        other = {"w1_scale": w1, "w2_scale": w2}
    assert torch.equal(run(s, **other), s.apply())


@pytest.mark.kernel
@pytest.mark.parametrize("scheme", ["fp8_tensor", "fp8_tensor_static", "int8_tensor"])
def test_halves_of_w1_keep_their_own_scales(scheme, device):
    """Gate and up quantized apart: nothing is merged."""
    p = problem(scheme)
    s = setup(p, moe_ops.pipeline.TritonExperts, device)
    scale = torch.stack([s.config.w1_scale, 3 * s.config.w1_scale], 1)
    given = dict(zip(moe_ops.scheme.TENSORS, s.config.tensors, strict=True))
    config = FusedMoEQuantConfig(scheme, **{**given, "w1_scale": scale})
    w1 = moe_ops.dequantize_weight(moe_ops.QTensor(s.inputs.w1, scale), scheme)
    rows = w1.shape[1] // 2
    assert torch.equal(w1[:, :rows], s.exact.w1[:, :rows])
    actual = run(s, w1_scale=scale)
    exact = bounded_oracle(p, s.exact._replace(w1=w1), config)
    assert_layer_matches(actual.cpu(), exact, reference_experts(p, s.inputs, config).cpu())


@pytest.mark.kernel
@pytest.mark.parametrize("scheme", ["nvfp4_w4a16", "nvfp4"])
def test_global_scales_of_halves(scheme, device):
    s = setup(problem(scheme), moe_ops.pipeline.TritonExperts, device)
    scale = s.config.w1_gscale
    both = run(s, w1_gscale=torch.stack([scale, scale], 1))
    assert torch.equal(both, s.apply())
    assert not torch.equal(run(s, w1_gscale=torch.stack([scale, 2 * scale], 1)), both)


@pytest.mark.parametrize("scheme", ["fp8_tensor", "fp8_channel", "nvfp4_w4a16"])
@pytest.mark.parametrize("activation", ["swigluoai", "relu2_no_mul"])
def test_only_halves_of_w1_have_two_scales(scheme, activation):
    """Gate and up rows that alternate share a scale, and rows without a gate have no second one."""
    s = setup(problem(scheme, activation=activation), moe_ops.pipeline.TritonExperts)
    name = "w1_gscale" if scheme == "nvfp4_w4a16" else "w1_scale"
    shape = (4, 2, 1) if scheme == "fp8_channel" else (4, 2)
    with pytest.raises(ValueError, match=f"{name} must have a shape of"):
        run(s, **{name: torch.ones(shape)})


@pytest.mark.parametrize("scheme", SCHEMES)
def test_biases_may_come_either_way(scheme, device):
    s = setup(problem(scheme, has_bias=True), moe_ops.pipeline.TritonExperts, device)
    x, w1, w2, weights, ids, *_ = s.inputs
    b1, b2 = s.config.w1_bias, s.config.w2_bias
    given = dict(zip(moe_ops.scheme.TENSORS, s.config.tensors, strict=True))
    bare = FusedMoEQuantConfig(scheme, **{**given, "w1_bias": None, "w2_bias": None})
    arguments = {"w1_bias": b1, "w2_bias": b2}
    expected = s.apply()
    call = (x, w1, w2, weights, ids)
    assert torch.equal(moe_ops.fused_experts(*call, **arguments, quant_config=bare), expected)
    wrong = FusedMoEQuantConfig(scheme, **{**given, "w1_bias": 2 * b1})
    assert torch.equal(moe_ops.fused_experts(*call, **arguments, quant_config=wrong), expected)
    assert not torch.equal(moe_ops.fused_experts(*call, quant_config=wrong), expected)


def bad_tensors(s):
    """``(name, wrong tensor, error, message)`` for every tensor that a scheme takes."""
    for name in moe_ops.scheme.TENSORS:
        good = getattr(s.config, name)
        if good is None:
            continue
        rule = f"quant_config.{name}"
        yield name, torch.cat([good, good]), ValueError, rule
        yield (
            name,
            torch.zeros_like(good, dtype=torch.int64),
            TypeError,
            f"{rule} must have a dtype",
        )
        yield name, good.to("meta"), ValueError, f"{rule} must be on the device of hidden_states"
        if not name.startswith("a"):  # those are one number, in whatever shape
            yield name, good[..., None, None], ValueError, f"{rule} must have a shape of"


@every_row("scheme", STORED)
def test_tensors_that_do_not_fit(scheme):
    s = setup(problem(scheme), moe_ops.pipeline.TritonExperts)
    for name, wrong, error, message in bad_tensors(s):
        with pytest.raises(error, match=message):
            run(s, **{name: wrong})


@every_row("scheme", ["fp8_channel", "int4_w4a16_g32_zp", "nvfp4"])
def test_weights_that_do_not_fit(scheme):
    """The rules of plain weights hold of stored ones, whose columns may be packed."""
    s = setup(problem(scheme), moe_ops.pipeline.TritonExperts)
    x, w1, w2, weights, ids, *_ = s.inputs
    for name, wrong, error, rule in (
        ("x", x.int(), TypeError, "hidden_states must have a dtype"),
        ("w1", w1.float(), TypeError, "w1 must have a dtype"),
        ("w1", w1[0], ValueError, "w1 must have 3 axes"),
        ("w2", w2.to("meta"), ValueError, "w2 must be on the device of hidden_states"),
        ("w1", w1.repeat(1, 2, 2)[:, ::2, ::2], ValueError, "w1 must have stride 1"),
        ("w2", w2[:3], ValueError, r"w2.shape\[0\] must be w1.shape\[0\] = 4, got 3"),
        ("w1", w1[:, :-2], ValueError, r"w1.shape\[1\] must be the rows that the sizes ask for"),
        ("w2", w2[:, :-2], ValueError, r"w2.shape\[1\] must be the rows that the sizes ask for"),
        ("w1", w1[..., :-8], ValueError, r"w1.shape\[2\] must be the columns"),
    ):
        given = {"x": x, "w1": w1, "w2": w2, name: wrong}
        with pytest.raises(error, match=rule):
            moe_ops.fused_experts(*given.values(), weights, ids, quant_config=s.config)


def test_dtypes_that_only_look_alike():
    """Zero points are bytes without a sign, and no scale is a byte where it is a factor."""
    for scheme, name, dtype in (
        ("int4_w4a16_g32_zp", "w1_zp", torch.int8),
        ("nvfp4", "w2_gscale", torch.uint8),
        ("fp8_tensor_static", "a1_scale", torch.uint8),
    ):
        s = setup(problem(scheme), moe_ops.pipeline.TritonExperts)
        with pytest.raises(TypeError, match=f"quant_config.{name} must have a dtype"):
            run(s, **{name: getattr(s.config, name).to(dtype)})


@every_row("scheme", STORED)
def test_every_tensor_is_needed(scheme):
    s = setup(problem(scheme), moe_ops.pipeline.TritonExperts)
    for name, value in zip(moe_ops.scheme.TENSORS, s.config.tensors, strict=True):
        if value is not None:
            with pytest.raises(
                ValueError, match=f"{name} must be a Tensor for scheme {scheme}, got"
            ):
                run(s, **{name: None})


@every_row("scheme", SCHEMES)
def test_no_other_tensor_is_taken(scheme):
    s = setup(problem(scheme, has_bias=True), moe_ops.pipeline.TritonExperts)
    for name, value in zip(moe_ops.scheme.TENSORS, s.config.tensors, strict=True):
        if value is None:
            with pytest.raises(
                ValueError, match=f"{name} must be None for scheme {scheme}, got a T"
            ):
                run(s, **{name: torch.ones(1)})


def test_a_configuration_is_a_frozen_value():
    config = FusedMoEQuantConfig("fp8_channel")
    with pytest.raises(FrozenInstanceError):
        config.w1_scale = torch.ones(1)
    with pytest.raises(TypeError, match=r"takes \['w1_scale', .* got \['w3_scale'\]"):
        FusedMoEQuantConfig("fp8_channel", w3_scale=None)
    with pytest.raises(ValueError, match="scheme must be one of"):
        FusedMoEQuantConfig("fp3")


def test_a_configuration_travels():
    s = setup(problem("int4_w4a16_g128_zp", has_bias=True), moe_ops.pipeline.TritonExperts)
    leaves, tree = torch.utils._pytree.tree_flatten(s.config)
    assert len(leaves) == 6 and all(isinstance(t, torch.Tensor) for t in leaves)
    for copy in (
        torch.utils._pytree.tree_unflatten(leaves, tree),
        torch.utils._pytree.treespec_loads(torch.utils._pytree.treespec_dumps(tree)).unflatten(
            leaves
        ),
        pickle.loads(pickle.dumps(s.config)),
    ):
        assert copy.scheme == s.config.scheme
        pairs = zip(copy.tensors, s.config.tensors, strict=True)
        assert all(a is b or torch.equal(a, b) for a, b in pairs)


def test_what_a_configuration_says():
    def facts(scheme):
        c = FusedMoEQuantConfig(scheme)
        return (
            c.quant_dtype, c.weight_quant_dtype, c.block_shape, c.per_act_token_quant,
            c.per_out_ch_quant,
        )  # fmt: skip

    fp8, i8, u8 = torch.float8_e4m3fn, torch.int8, torch.uint8
    assert facts("unquantized") == (None, None, None, False, False)
    assert facts("fp8_tensor") == (fp8, fp8, None, False, False)
    assert facts("fp8_channel") == (fp8, fp8, None, True, True)
    assert facts("fp8_block128") == (fp8, fp8, [128, 128], False, False)
    assert facts("int8_channel") == (i8, i8, None, True, True)
    assert facts("int8_w8a16") == (None, i8, None, False, True)
    assert facts("int4_w4a16_g128") == (None, u8, None, False, False)
