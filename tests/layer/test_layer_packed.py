"""Layers whose weights are packed: results, state dicts, loading, moving, and who packs."""

import copy
import io

import pytest
import torch
from checkpoints import Experts, per_expert

import moe_ops
from moe_ops import QTensor, pack_weight
from moe_ops.dispatch.device import NO_GPU, assumed
from moe_ops.layer.saving import checkpoint_tensors
from moe_ops.pipeline import forms

E, K, H, I, T = 4, 2, 128, 64, 5  # noqa: E741
SCHEMES = ["int4_w4a16_g32_zp", "nvfp4_w4a16", "int8_w8a16", "mxfp8", "int4_w4a8_g128"]
WIDTHS = [(s, width) for s in SCHEMES for width in (I, 96) if (s, width) != ("nvfp4_w4a16", 96)]
"""Schemes and I; nvfp4's gate and up rows, which alternate with 96, must share a global scale."""


def make(scheme, width=I, **options):
    """A layer, whose gate and up rows alternate if I is no multiple of 64: w13 is packed then."""
    options = {"activation": "swigluoai" if width % 64 else "silu", **options}
    return moe_ops.FusedMoE(E, K, H, width, scheme=scheme, **options)


def source_of(scheme, width=I, seed=0):
    return per_expert(Experts.random(E, H, width, seed=seed).quantized(scheme))


def loaded(scheme, width=I, seed=0, **options):
    layer = make(scheme, width, **options)
    moe_ops.load_checkpoint(layer, source_of(scheme, width, seed), progress=False)
    return layer


def packed(*arguments, **options):
    layer = loaded(*arguments, **options)
    layer.pack_()
    return layer


def run(layer, dtype=torch.float32):
    g = torch.Generator().manual_seed(1)
    return layer(*(torch.randn(T, n, generator=g).to(dtype) for n in (H, E)))


def kernel_of(layer):
    """A kernel that holds the layer's current scales."""
    config = layer.quant_method.get_fused_moe_quant_config(layer)
    experts = moe_ops.pipeline.TritonExperts(layer.moe_config, config)
    return moe_ops.FusedMoEKernel(moe_ops.pipeline.MoEPrepareAndFinalizeNoEP(), experts)


def same_parameters(layer, other):
    """Whether two layers have the same parameters, bit for bit."""
    for (name, x), (_, y) in zip(layer.named_parameters(), other.named_parameters(), strict=True):
        same = x.dtype == y.dtype and x.shape == y.shape
        if not same or not torch.equal(x.data.view(torch.uint8), y.data.view(torch.uint8)):
            return name
    return True


@pytest.mark.parametrize("options", [{}, {"activation": "gelu_no_mul"}, {"has_bias": True}])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_results(scheme, options):
    layer = make(scheme, **options)
    experts = Experts.random(E, H, I)
    if options:
        g = torch.Generator().manual_seed(3)
        for name, p in layer.named_parameters():
            if "bias" in name:
                p.data.copy_(torch.randn(p.shape, generator=g))
        q = experts.quantized(scheme)
        source = per_expert(q._replace(gate=q.up) if "activation" in options else q)
        moe_ops.load_checkpoint(layer, source, progress=False, strict=False)
    else:
        moe_ops.load_checkpoint(layer, per_expert(experts.quantized(scheme)), progress=False)
    plain = copy.deepcopy(layer)
    expected = run(layer)
    layer.pack_()
    assert layer.state.fragments == ("w13", "w2") and layer.w13_weight.dtype == torch.int32
    assert expected.any() and torch.equal(run(layer), expected)
    layer.pack_()  # again
    assert torch.equal(run(copy.deepcopy(layer)), expected)
    layer.unpack_()
    assert same_parameters(layer, plain) is True and torch.equal(run(layer), expected)


def test_one_of_two():
    """W13 of 192 rows has a packed form, and w2 of 96 columns has none."""
    layer = loaded("mxfp4_w4a16", 96)
    expected = run(layer)
    layer.pack_()
    assert layer.state.fragments == ("w13",) and torch.equal(run(layer), expected)
    apart = loaded("mxfp4_w4a16", 96, activation="silu")
    with pytest.raises(ValueError, match=r"multiples of 64 if w2_weight is packed .* K = 96"):
        apart.pack_()
    assert not apart.state.fragments


@pytest.mark.parametrize(
    ("scheme", "hidden", "error", "message"),
    [
        (
            "fp8_channel",
            64,
            NotImplementedError,
            "dequantize weights.*if w13_weight is packed",
        ),
        (
            None,
            64,
            NotImplementedError,
            "dequantize weights.*if w13_weight is .*unquantized",
        ),
        ("int8_w8a16", 96, ValueError, "N and K must be multiples of 64 .* N = 128 and K = 96"),
    ],
)
def test_nothing_to_pack(scheme, hidden, error, message):
    layer = moe_ops.FusedMoE(E, K, hidden, 64, scheme=scheme)
    with pytest.raises(error, match=message):
        layer.pack_()
    layer.unpack_()


def test_kernel_that_holds_scales():
    layer = loaded("mxfp4_w4a16")
    layer.kernel = kernel_of(layer)
    expected = run(layer)
    with pytest.raises(ValueError, match="layer.kernel must be None while weights change"):
        layer.pack_()
    layer.unpack_()  # nothing changes
    layer.kernel = None
    layer.pack_()
    layer.kernel = kernel_of(layer)
    assert torch.equal(run(layer), expected)
    with pytest.raises(ValueError, match="layer.kernel must be None while weights change"):
        layer.unpack_()


@pytest.mark.parametrize(("scheme", "width"), WIDTHS)
def test_state_dicts(scheme, width):
    """Any form loads into any other; tensors of the state dict stay as they are."""
    forms = (loaded(scheme, width), packed(scheme, width))
    for source in forms:
        state = source.state_dict()
        before = {name: x.clone() for name, x in state.items()}
        for target in forms:
            other = copy.deepcopy(target)
            for x in other.parameters():
                x.data.zero_()
            other.load_state_dict(state)
            assert same_parameters(other, target) is True
        assert all(torch.equal(x, before[name]) for name, x in state.items())


def test_saved_files():
    layer = packed("nvfp4_w4a16")
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other = make("nvfp4_w4a16")
    other.load_state_dict(torch.load(file))
    assert torch.equal(run(other), run(layer))


def test_states_that_do_not_fit():
    layer, state = make("int4_w4a16_g32"), packed("int4_w4a16_g32").state_dict()
    with pytest.raises(RuntimeError, match="q.scale must have shape"):
        layer.load_state_dict({**state, "w13_weight_scale": state["w13_weight_scale"].mT})
    with pytest.raises(RuntimeError, match="q.scale must be a Tensor"):
        layer.load_state_dict({k: x for k, x in state.items() if "w2_weight_scale" not in k})
    with pytest.raises(RuntimeError, match="scheme must quantize weights, got unquantized"):
        make(None).load_state_dict({k: x for k, x in state.items() if k != "_extra_state"})
    with pytest.raises(ValueError, match="weights must be in the plain form .*load_state_dict"):
        moe_ops.load_checkpoint(layer, state, progress=False)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_loading_again_keeps_the_form_and_the_memory(scheme, strict):
    layer = packed(scheme)
    before = {name: x.data_ptr() for name, x in layer.named_parameters()}
    source = source_of(scheme, seed=1)
    moe_ops.load_checkpoint(layer, source, progress=False, strict=strict)
    assert {name: x.data_ptr() for name, x in layer.named_parameters()} == before
    assert same_parameters(layer, packed(scheme, seed=1)) is True


def test_missing_parts_stay():
    layer, old, new = (packed("int4_w4a16_g32_zp", seed=seed) for seed in (0, 0, 1))
    source = source_of("int4_w4a16_g32_zp", seed=1)
    part = {name: x for name, x in source.items() if ".2." in name}
    report = moe_ops.load_checkpoint(layer, part, progress=False, strict=False)
    assert report.missing and layer.state.fragments == ("w13", "w2")
    for expert in range(E):
        expected = new if expert == 2 else old
        for name, x in layer.named_parameters():
            assert torch.equal(x[expert], getattr(expected, name)[expert])


def test_weight_loaders():
    """A packed parameter is refused; `load_weights` unpacks; other parameters load."""
    layer = packed("int8_w8a16")
    source = source_of("int8_w8a16", seed=1)
    for param in (layer.w13_weight, layer.w13_weight_scale):
        with pytest.raises(ValueError, match=r"param must be in the plain form .*w13_weight"):
            param.weight_loader(param, source["experts.0.up_proj.weight"], "up.weight", "w3", 0)
    assert set(layer.load_weights(source.items())) == {*source}
    assert layer.state.fragments == ()
    assert same_parameters(layer, loaded("int8_w8a16", seed=1)) is True


def test_first_loading_leaves_loaders_of_the_layer():
    """Parameters that loading replaces belong to the layer, not to a copy that is gone."""
    layer = loaded("mxfp4_w4a16")
    layer.pack_()
    for param in layer.parameters():
        assert param.weight_loader.layer is layer


@pytest.mark.parametrize("scheme", ["int4_w4a16_g32", "int8_w8a16_g32_zp", "mxfp6_e2m3"])
def test_reset_parameters(scheme):
    layer, plain = packed(scheme), make(scheme)
    layer.to_empty(device="cpu")
    layer.reset_parameters()
    assert layer.state.fragments
    layer.unpack_()
    assert same_parameters(layer, plain) is True


def test_moving_experts():
    """Experts are rows of axis 0 in the packed form too."""
    layers = [make("int4_w4a16_g32_zp", enable_eplb=True, num_redundant_experts=2) for _ in "ab"]
    results = []
    for layer, packs in zip(layers, (False, True), strict=True):
        state = moe_ops.EplbState.make(1, E, 2)
        layer.set_eplb_state(0, *state[1:])
        moe_ops.load_checkpoint(layer, source_of("int4_w4a16_g32_zp"), progress=False)
        if packs:
            layer.pack_()
            assert {x.shape[0] for x in layer.expert_tensors()} == {E + 2}
        before = run(layer)
        state.expert_load.copy_(torch.tensor([[900, 1, 1, 500, 0, 0]]))
        placement = state.physical_to_logical_map.clone()
        state.rebalance_([layer.expert_tensors()], 1, 1, 2)
        assert not torch.equal(placement, state.physical_to_logical_map)
        after = run(layer)  # products of other numbers of rows, which a CPU sums in other orders
        torch.testing.assert_close(after, before)
        layer.unpack_()
        results.append((after, layer))
    assert torch.equal(results[0][0], results[1][0])
    assert same_parameters(results[0][1], results[1][1]) is True


def test_ranks():
    """Each rank packs its part of the weights."""
    source = source_of("int4_w4a16_g32", 128)
    for options in ({"tp_size": 2, "tp_rank": 1}, {"ep_size": 2, "ep_rank": 1}):
        layer = make("int4_w4a16_g32", 128, reduce_results=False, **options)
        moe_ops.load_checkpoint(layer, source, progress=False)
        expected = run(layer)
        layer.pack_()
        assert layer.state.fragments == ("w13", "w2") and torch.equal(run(layer), expected)


def test_compiled():
    layer = packed("mxfp4_w4a16")
    expected = run(layer)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(run(compiled), expected)


@pytest.mark.parametrize(("scheme", "width"), WIDTHS)
def test_checkpoints_hold_the_plain_form(scheme, width):
    """Also of a layer of which one weight is packed."""
    plain = {x[:3]: x[3] for x in checkpoint_tensors(loaded(scheme, width))}
    stored = {x[:3]: x[3] for x in checkpoint_tensors(packed(scheme, width))}
    assert plain.keys() == stored.keys()
    for name, x in plain.items():
        assert x.dtype == stored[name].dtype and x.shape == stored[name].shape
        assert torch.equal(x.view(torch.uint8), stored[name].view(torch.uint8)), name


BF16 = {"params_dtype": torch.bfloat16}
"""The dtype for which kernels decode weights."""


@pytest.fixture
def on_gpu(monkeypatch):
    """Weights count as those of a GPU, which is Hopper unless another one is assumed."""
    monkeypatch.setattr(forms, "known_arch", lambda device: 90)


@pytest.mark.usefixtures("on_gpu")
def test_loading_packs_for_the_gpu():
    layer = loaded("mxfp4_w4a16", **BF16)
    assert layer.state.fragments == ("w13", "w2")
    assert all(param.weight_loader.layer is layer for param in layer.parameters())
    before = layer.w13_weight.data_ptr()
    moe_ops.load_checkpoint(layer, source_of("mxfp4_w4a16", seed=1), progress=False)
    assert layer.w13_weight.data_ptr() == before
    assert set(layer.load_weights(source_of("mxfp4_w4a16").items())) and not layer.state.fragments
    plain = layer.w13_weight
    wanted = pack_weight(QTensor(plain.clone(), layer.w13_weight_scale), "mxfp4_w4a16")
    layer.quant_method.process_weights_after_loading(layer)
    assert layer.state.fragments == ("w13", "w2")
    assert layer.w13_weight.data_ptr() == plain.data_ptr()  # packed in the plain weight's memory
    assert torch.equal(layer.w13_weight, wanted.data)
    assert loaded("mxfp4_w4a16", 96, **BF16).state.fragments == ("w13",)
    assert loaded("mxfp8", batch_invariant=True, **BF16).state.fragments == ("w13", "w2")
    assert not loaded("mxfp4_w4a16", 96, activation="silu", **BF16).state.fragments
    for dtype in (torch.bfloat16, torch.float16):  # rows are bf16 in the kernel in any case
        assert loaded("int4_w4a8_g128", params_dtype=dtype).state.fragments == ("w13", "w2")
    assert not loaded("int4_w4a8_g128").state.fragments  # the result in float32


@pytest.mark.usefixtures("on_gpu")
def test_loading_leaves_plain_what_no_kernel_reads():
    assert not loaded("int4_w4a8_g128", batch_invariant=True, **BF16).state.fragments
    assert not loaded("fp8_channel", **BF16).state.fragments
    assert not loaded("mxfp4_w4a16").state.fragments  # rows in float32
    assert not loaded(
        "mxfp4_w4a16", params_dtype=torch.float16
    ).state.fragments  # cannot hold scales
    for device in (NO_GPU._replace(portable_only=True), NO_GPU._replace(arch=80)):
        with assumed(device):
            assert not loaded("mxfp4_w4a16", **BF16).state.fragments
    layer = loaded("mxfp4_w4a16", **BF16)
    layer.unpack_()
    layer.kernel = kernel_of(layer)
    moe_ops.load_checkpoint(layer, source_of("mxfp4_w4a16"), progress=False)
    assert not layer.state.fragments


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("scheme", ["int4_w4a16_g128", "fp8_w8a16", "int4_w4a16_g32_zp"])
def test_first_call_after_unpacking(scheme):
    """A group's scales have the strides of the packed form then; the call reads them to warn."""
    layer = moe_ops.quantize_(make(None).to(torch.bfloat16), scheme, progress=False)
    assert layer.state.fragments
    layer.unpack_()
    assert run(layer, torch.bfloat16).isfinite().all()


def test_nothing_packs_on_a_cpu():
    assert not loaded("mxfp4_w4a16", **BF16).state.fragments
