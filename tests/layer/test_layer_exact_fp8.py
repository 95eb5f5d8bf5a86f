"""Layers that hold MXFP4 weights as fp8: results, state dicts, loading, moving, and which do."""

import copy
import io
import pickle

import pytest
import torch
from checkpoints import Experts, numbers, per_expert

import moe_ops
from moe_ops.dispatch.device import NO_GPU, assumed
from moe_ops.layer.saving import checkpoint_tensors
from moe_ops.pipeline import forms
from moe_ops.scheme import as_fp8, dequantize_weight, exact_fp8_scheme
from moe_ops.testing import Inputs, Problem, assert_layer_matches, bounded_oracle

E, K, H, I, T = 4, 2, 128, 64, 5  # noqa: E741
TOKEN, STATIC = "mxfp4_w4a8_token", "mxfp4_w4a8"
HELD, PLAIN, PACKED = (dict.fromkeys(("w13", "w2"), form) for form in ("fp8", "plain", "packed"))
BF16 = {"params_dtype": torch.bfloat16}
"""The dtype for which kernels decode packed weights."""


def make(scheme=TOKEN, width=I, **options):
    return moe_ops.FusedMoE(E, K, H, width, scheme=scheme, **options)


def experts_of(scheme=TOKEN, width=I, seed=0, inexact=None):
    """Quantized experts; one row of the projection ``inexact`` has scales 20 binades apart."""
    q = Experts.random(E, H, width, seed=seed).quantized(scheme)
    if inexact:
        scale = getattr(q, inexact).scale
        scale[1, 3, 0] = scale[1, 3, 1] + 20
    return q


def source_of(scheme=TOKEN, *given, **how):
    static = 3 / 448 if scheme == STATIC else None
    return per_expert(experts_of(scheme, *given, **how), input_scale=static)


def loaded(scheme=TOKEN, width=I, seed=0, inexact=None, **options):
    layer = make(scheme, width, **options)
    moe_ops.load_checkpoint(layer, source_of(scheme, width, seed, inexact), progress=False)
    return layer


def held(*given, **options):
    layer = loaded(*given, **options)
    layer.as_fp8_()
    return layer


def batch(tokens=T):
    g = torch.Generator().manual_seed(tokens)
    return torch.randn(tokens, H, generator=g), torch.randn(tokens, E, generator=g)


def run(layer):
    return layer(*batch())


def assert_same(layer, other):
    """Two layers have the same parameters, bit for bit."""
    for (name, x), (_, y) in zip(layer.named_parameters(), other.named_parameters(), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape, name
        assert torch.equal(x.data.view(torch.uint8), y.data.view(torch.uint8)), name


@pytest.mark.parametrize("options", [{}, {"has_bias": True}, {"activation": "swigluoai"}])
@pytest.mark.parametrize("scheme", [TOKEN, STATIC])
def test_results(scheme, options):
    """Results are those of fp8 kernels on the converted weights, within the plain form's budget."""
    layer = make(scheme, **options)
    source = source_of(scheme)
    if "has_bias" in options:
        g = torch.Generator().manual_seed(3)
        for name in [name for name in source if name.endswith(".weight")]:
            rows = torch.randn(source[name].shape[0], generator=g)
            source[name.replace(".weight", ".bias")] = rows
    moe_ops.load_checkpoint(layer, source, progress=False)
    plain, (x, logits) = copy.deepcopy(layer), batch(13)
    expected = layer(x, logits)
    layer.as_fp8_()
    target = exact_fp8_scheme(moe_ops.get_scheme(scheme))
    assert layer.state.forms == HELD and layer.scheme == target
    assert layer.checkpoint_scheme.name == scheme and f"scheme={scheme}, held_as" in repr(layer)
    actual = layer(x, logits)
    weights, ids, _ = layer.route(x, logits)
    problem = Problem(13, E, K, H, I, activation=layer.activation, scheme=layer.scheme.key)
    config = layer.quant_method.get_fused_moe_quant_config(layer)
    inputs = Inputs(x, *numbers(layer), weights, ids, None, layer.w13_bias, layer.w2_bias)
    assert_layer_matches(actual, bounded_oracle(problem, inputs, config), expected)
    for which in ("w13", "w2"):
        q = [getattr(plain, f"{which}_weight{end}") for end in ("", "_scale")]
        converted = as_fp8(moe_ops.QTensor(*q), scheme)
        assert torch.equal(converted.scale, getattr(layer, f"{which}_weight_scale"))
        back = dequantize_weight(converted, target)
        assert torch.equal(back, dequantize_weight(moe_ops.QTensor(*q), scheme))
    layer.as_fp8_()  # again
    assert torch.equal(layer(x, logits), actual)
    layer.unpack_()
    assert_same(layer, plain)
    assert layer.sizes == plain.sizes and torch.equal(layer(x, logits), expected)


@pytest.mark.parametrize("projection", ["gate", "up", "down"])
def test_one_row_that_is_not_exact(projection):
    layer = loaded(inexact=projection)
    plain = copy.deepcopy(layer)
    which, row = ("w2", 3) if projection == "down" else ("w13", 3 + I * (projection == "up"))
    message = f"{which}_weight must have rows .* got 1 of .* row {row} of local expert 1"
    with pytest.raises(ValueError, match=message):
        layer.as_fp8_()
    assert_same(layer, plain)
    exact = layer.exact_fp8_rows()
    assert (exact.rows, exact.exact) == (E * (2 * I + H), E * (2 * I + H) - 1)


def test_schemes_without_the_form():
    for scheme in ("fp8_channel", "mxfp4_w4a16", "mxfp4_mxfp8", None):
        layer = make(scheme)
        assert layer.exact_fp8_rows() is None
        with pytest.raises(NotImplementedError, match="scheme must have fp8 activations"):
            layer.as_fp8_()


def test_kernel_that_holds_scales():
    layer = loaded()
    config = layer.quant_method.get_fused_moe_quant_config(layer)
    experts = moe_ops.pipeline.TritonExperts(layer.moe_config, config)
    layer.kernel = moe_ops.FusedMoEKernel(moe_ops.pipeline.MoEPrepareAndFinalizeNoEP(), experts)
    with pytest.raises(ValueError, match="layer.kernel must be None while weights change"):
        layer.as_fp8_()
    assert layer.state.forms == PLAIN


@pytest.mark.parametrize("scheme", [TOKEN, STATIC])
def test_state_dicts(scheme):
    """Any form loads into any other; tensors of the state dict stay as they are."""
    forms = (loaded(scheme), held(scheme))
    for source in forms:
        file = io.BytesIO()
        torch.save(source.state_dict(), file)
        file.seek(0)
        state = torch.load(file)
        before = {name: x.clone() for name, x in state.items()}
        for target in forms:
            other = copy.deepcopy(target)
            for x in other.parameters():
                x.data.zero_()
            other.load_state_dict(state)
            assert_same(other, target)
        assert all(torch.equal(x, before[name]) for name, x in state.items())


def test_states_that_do_not_fit():
    layer = held()
    with pytest.raises(RuntimeError, match="q.scale must have exponents that span"):
        layer.load_state_dict(loaded(inexact="down").state_dict())
    assert_same(layer, held())
    with pytest.raises(RuntimeError, match="must be stored as fp8"):
        make("fp8_channel").load_state_dict(layer.state_dict())
    with pytest.raises(RuntimeError, match="must be stored as fp4"):
        layer.load_state_dict(make("fp8_channel").state_dict())
    with pytest.raises(ValueError, match="weights must be in the plain form .* 'fp8'"):
        moe_ops.load_checkpoint(make(), layer.state_dict(), progress=False)


def test_copies():
    layer = held()
    expected = run(layer)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), layer.to("cpu")):
        assert other.state.forms == HELD and torch.equal(run(other), expected)
        other = copy.deepcopy(other)
        other.unpack_()
        assert_same(other, loaded())
    cast = copy.deepcopy(layer).to(torch.bfloat16)
    assert_same(cast, layer)


def test_compiled():
    layer = held()
    expected = run(layer)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(run(compiled), expected)


def test_reset_parameters():
    layer = held()
    layer.to_empty(device="cpu")
    layer.reset_parameters()
    with pytest.warns(UserWarning, match="before anything was loaded"):
        assert layer.state.forms == HELD and not run(layer).any()
    layer.unpack_()
    assert_same(layer, make())


@pytest.mark.parametrize("strict", [True, False])
def test_loading_again_keeps_the_form_and_the_memory(strict):
    layer = held()
    before = {name: x.data_ptr() for name, x in layer.named_parameters()}
    moe_ops.load_checkpoint(layer, source_of(seed=1), progress=False, strict=strict)
    assert {name: x.data_ptr() for name, x in layer.named_parameters()} == before
    assert_same(layer, held(seed=1))


def test_loading_what_is_not_exact():
    """The layer has plain weights then, and fp8 again when they are exact again."""
    layer = held()
    moe_ops.load_checkpoint(layer, source_of(inexact="gate"), progress=False)
    assert_same(layer, loaded(inexact="gate"))
    assert layer.state.forms == PLAIN and layer.scheme.name == TOKEN


def test_missing_parts_stay():
    layer, old, new = (held(seed=seed) for seed in (0, 0, 1))
    part = {name: x for name, x in source_of(seed=1).items() if ".2." in name}
    report = moe_ops.load_checkpoint(layer, part, progress=False, strict=False)
    assert report.missing and layer.state.forms == HELD
    for expert in range(E):
        expected = new if expert == 2 else old
        for name, x in layer.named_parameters():
            assert torch.equal(x[expert], getattr(expected, name)[expert])


def test_weight_loaders():
    """A parameter of the form is refused, `load_weights` converts, other parameters load."""
    layer, source = held(STATIC), source_of(STATIC, seed=1)
    for name in ("w13_weight", "w13_weight_scale", "w13_weight_exponents"):
        param = getattr(layer, name)
        with pytest.raises(ValueError, match=rf"param must be in the plain form .*{name}"):
            param.weight_loader(param, source["experts.0.up_proj.weight"], "up.weight", "w3", 0)
    assert set(layer.load_weights(source.items())) == {*source}
    layer.quant_method.process_weights_after_loading(layer)
    assert_same(layer, loaded(STATIC, seed=1))


@pytest.mark.parametrize("width", [I, 96])
def test_checkpoints_hold_the_plain_form(width):
    plain = {x[:3]: x[3] for x in checkpoint_tensors(loaded(TOKEN, width))}
    stored = {x[:3]: x[3] for x in checkpoint_tensors(held(TOKEN, width))}
    assert plain.keys() == stored.keys()
    for name, x in plain.items():
        assert x.dtype == stored[name].dtype and torch.equal(x, stored[name]), name


def test_moving_experts():
    layers = [make(enable_eplb=True, num_redundant_experts=2) for _ in "ab"]
    for layer, converts in zip(layers, (False, True), strict=True):
        state = moe_ops.EplbState.make(1, E, 2)
        layer.set_eplb_state(0, *state[1:])
        moe_ops.load_checkpoint(layer, source_of(), progress=False)
        if converts:
            layer.as_fp8_()
            assert len(layer.expert_tensors()) == 6
        saved = copy.deepcopy(layer.state_dict())
        state.expert_load.copy_(torch.tensor([[900, 1, 1, 500, 0, 0]]))
        placement = state.physical_to_logical_map.clone()
        state.rebalance_([layer.expert_tensors()], 1, 1, 2)
        assert not torch.equal(placement, state.physical_to_logical_map)
        moved = copy.deepcopy(layer.state_dict())
        layer.load_state_dict(saved)  # rows go to where their experts are now
        assert all(torch.equal(x, moved[name]) for name, x in layer.state_dict().items())
        layer.unpack_()
        plain = copy.deepcopy(layer)
        layer.load_state_dict(saved)  # likewise, from the other form
        assert_same(layer, plain)
    assert_same(*layers)


@pytest.mark.parametrize("ranks", [{"tp_size": 2, "tp_rank": 1}, {"ep_size": 2, "ep_rank": 1}])
def test_ranks(ranks):
    """Each rank holds its part of the weights."""
    layer = loaded(width=128, reduce_results=False, **ranks)
    plain = copy.deepcopy(layer)
    layer.as_fp8_()
    assert layer.state.forms == HELD
    layer.unpack_()
    assert_same(layer, plain)


@pytest.fixture
def on_gpu(monkeypatch):
    """Weights count as those of a GPU, whose architecture is given."""

    def arch(number):
        monkeypatch.setattr(forms, "known_arch", lambda device: number)

    return arch


@pytest.mark.parametrize(
    ("arch", "form"), [(80, PLAIN), (89, HELD), (90, HELD), (100, PLAIN), (120, HELD)]
)
@pytest.mark.parametrize("scheme", [TOKEN, STATIC])
def test_gpus(scheme, arch, form, on_gpu):
    """Datacenter Blackwell multiplies fp8 by fp4; nothing before sm_89 multiplies fp8."""
    on_gpu(arch)
    with assumed(NO_GPU._replace(arch=arch)):
        layer = loaded(scheme)
    assert layer.state.forms == form
    assert all(param.weight_loader.layer is layer for param in layer.parameters())
    layer.unpack_()
    on_gpu(None)
    assert_same(layer, loaded(scheme))


def test_loading_on_gpus(on_gpu):
    assert loaded().state.forms == PLAIN  # on a CPU
    on_gpu(90)
    layer = loaded()
    assert layer.state.forms == HELD
    layer.quant_method.process_weights_after_loading(layer)
    assert layer.state.forms == HELD
    before = layer.w13_weight.data_ptr()
    moe_ops.load_checkpoint(layer, source_of(seed=1), progress=False)
    assert layer.w13_weight.data_ptr() == before
    assert set(layer.load_weights(source_of().items())) and layer.state.forms == PLAIN
    assert loaded(inexact="down").state.forms == PLAIN
    assert loaded("mxfp4_mxfp8").state.forms == PLAIN
    ranks = {"ep_size": 2, "ep_rank": 1, "reduce_results": False}
    assert loaded(**ranks).state.forms == HELD
    exchanging = {"dp_size": 2, "dp_rank": 1, **ranks}  # which has a kernel of its own
    assert loaded(**exchanging).state.forms == HELD
    assert loaded(**ranks, enable_eplb=True).state.forms == PLAIN  # experts move to other ranks
    assert loaded(enable_eplb=True).state.forms == HELD


def test_packed_where_rows_are_not_exact(on_gpu):
    on_gpu(90)
    assert loaded(**BF16).state.forms == HELD
    layer = loaded(inexact="down", **BF16)
    assert layer.state.forms == PACKED
    layer.quant_method.process_weights_after_loading(layer)
    assert layer.state.forms == PACKED
    rows = E * (2 * I + H)
    share = f"{rows - 1} of {rows} rows (99.90%) are exact as fp8"
    assert f"weights: {TOKEN}, packed; {share}" in str(moe_ops.explain(layer, device="sm_90"))
    with pytest.raises(ValueError, match="w2_weight must have rows that are exact as fp8"):
        layer.as_fp8_()
    assert layer.state.forms == PACKED
    layer = loaded(**BF16)
    layer.pack_()
    assert layer.state.forms == PACKED
    layer.quant_method.process_weights_after_loading(layer)
    assert layer.state.forms == HELD
    on_gpu(None)
    layer.unpack_()
    assert_same(layer, loaded(**BF16))


def test_quantizing(on_gpu):
    """`quantize_` and ``load_checkpoint(quantize=True)`` convert too."""
    on_gpu(90)
    plain, experts = make(None), Experts.random(E, H, I)
    moe_ops.load_checkpoint(plain, per_expert(experts), progress=False)
    layer = make()
    moe_ops.load_checkpoint(layer, per_expert(experts), progress=False, quantize=True)
    moe_ops.quantize_(plain, TOKEN, progress=False)
    assert plain.state.forms == layer.state.forms == HELD
    assert_same(plain, layer)
    assert torch.equal(run(plain), run(layer))


def test_explanations():
    layer = loaded()
    rows = E * (2 * I + H)
    share = f"{rows} of {rows} rows (100.00%) are exact as fp8"
    assert f"weights: {TOKEN}, plain; {share}" in str(moe_ops.explain(layer))
    there = moe_ops.explain(layer, device="sm_90")
    assert there.scheme.name == "fp8_channel" and there.exact_rows.exact == rows
    assert f"weights: {TOKEN}, held as fp8 (fp8_channel); {share}" in str(there)
    assert moe_ops.explain(layer, device="sm_100").scheme.name == TOKEN
    layer.as_fp8_()
    assert f"held as fp8 (fp8_channel); {share}" in str(moe_ops.explain(layer))
    assert f'"exact": {rows}' in moe_ops.explain(layer).to_json()
    assert moe_ops.explain(layer, device="sm_100").scheme.name == TOKEN
    other = moe_ops.explain(loaded(inexact="up"), device="sm_90")
    assert f"{TOKEN}, plain; {rows - 1} of {rows} rows (99.90%)" in str(other)


def test_explanations_without_weights():
    config = make().moe_config
    runs_as = "a layer whose rows are all exact as fp8 runs as fp8_channel"
    assert runs_as in str(moe_ops.explain(config, TOKEN, device="sm_90"))
    for scheme, device in ((TOKEN, "sm_100"), (TOKEN, None), ("mxfp4_w4a16", "sm_90")):
        assert "exact as fp8" not in str(moe_ops.explain(config, scheme, device=device))
    assert "exact as fp8" not in str(moe_ops.explain(make("fp8_channel")))
    with pytest.raises(TypeError, match="scheme must be given for a FusedMoEConfig"):
        moe_ops.explain(config)
    with pytest.raises(ValueError, match="scheme must be None for a layer"):
        moe_ops.explain(make(), TOKEN)
