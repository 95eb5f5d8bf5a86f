"""`quantize_` on `FusedMoE`: bit for bit what `load_checkpoint(quantize=True)` makes."""

import copy
import itertools

import pytest
import torch
from compilations import Compilations
from safetensors.torch import save_file
from torch import nn

import moe_ops
from moe_ops.layer.plain import PlainExperts
from moe_ops.layer.saving import checkpoint_tensors
from moe_ops.quantization import quantize, targets
from moe_ops.quantization.peaks import Peaks, in_parts
from moe_ops.quantization.targets import LayerTarget
from moe_ops.scheme import SCHEMES, get_scheme
from moe_ops.tensors import Routing

E, K, H, I = 4, 2, 128, 256  # noqa: E741
QUANTIZED = [name for name in SCHEMES if name != "unquantized"]
ACTIVATIONS = ["silu", "swigluoai", "relu2_no_mul"]
NAMES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


def make(scheme=None, *, sizes=(E, K, H, I), **options):
    options = {"params_dtype": torch.bfloat16, **options}
    return moe_ops.FusedMoE(*sizes, scheme=scheme, **options)


def filled(**options):
    layer, g = make(**options), torch.Generator().manual_seed(0)
    for param in layer.parameters():
        param.data.copy_(torch.randn(param.shape, generator=g) * 0.2)
    return layer


def batch(num_experts=E, hidden=H):
    g = torch.Generator().manual_seed(1)
    x = torch.randn(9, hidden, generator=g).bfloat16()
    return x, torch.randn(9, num_experts, generator=g)


def calibration(scheme, hidden=H):
    return (
        (lambda layer: layer(*batch(hidden=hidden)))
        if get_scheme(scheme).input_scale_names
        else None
    )


def quantized(layer, scheme, **how):
    how = {"progress": False, "calibrate": calibration(scheme, layer.model_hidden_size), **how}
    return moe_ops.quantize_(layer, scheme, **how)


def same(layer, other):
    mine, others = layer.state_dict(), other.state_dict()
    return mine.keys() == others.keys() and all(
        torch.equal(mine[n].view(torch.uint8), others[n].view(torch.uint8)) for n in mine
    )


@pytest.mark.parametrize("scheme", QUANTIZED)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_scheme(scheme, activation):
    """As if constructed with the scheme and loaded from its own weights in bf16."""
    layer = filled(activation=activation, has_bias=True)
    source = dict(copy.deepcopy(layer).named_parameters())
    group = SCHEMES[scheme].weight.group
    if activation == "swigluoai" and group.rows > 1:
        with pytest.raises(NotImplementedError, match="blocks of one row if gate and up rows alt"):
            quantized(layer, scheme)
        assert all(torch.equal(source[n], p) for n, p in layer.named_parameters())
        return
    assert quantized(layer, scheme) is layer
    other = make(scheme, activation=activation, has_bias=True)
    for i in (1, 2):
        if SCHEMES[scheme].input_scale_names:
            name = f"w{'13' if i == 1 else '2'}_input_scale"
            source[name] = getattr(layer, name)
    moe_ops.load_checkpoint(other, source, quantize=True, progress=False)
    assert same(layer, other)
    assert layer.scheme == other.scheme and layer.checkpoint_scheme == other.checkpoint_scheme
    assert type(layer.quant_method) is type(other.quant_method)
    assert layer.w13_weight.weight_loader.layer is layer
    with torch.no_grad():
        assert torch.equal(layer(*batch()), other(*batch()))


OTHER_SCHEMES = [
    "int4_w4a16_g64_zp", "int8_w8a16_g64", "int8_w8a16_g64_zp", "fp8_block64x128",
    "|int8:1x64:float32", "int8:1x*:float32|uint8:1x*:input",
]  # fmt: skip


@pytest.mark.parametrize("scheme", [*QUANTIZED, *OTHER_SCHEMES])
@pytest.mark.parametrize("width", [256, 192, 26])
def test_what_is_saved_is_loaded(scheme, width):
    """Also if blocks do not divide I, which refines or pads them in the layer."""
    for activation in ACTIVATIONS:
        if activation == "swigluoai" and get_scheme(scheme).weight.group.rows > 1:
            continue
        options = {"sizes": (E, K, 64, width), "activation": activation, "has_bias": True}
        layer = quantized(filled(**options), scheme)
        source = {
            f"experts.{e}.{NAMES[shard if layer.sizes.gated or shard == 'w2' else 'w3']}.{end}": x
            for e, shard, end, x in checkpoint_tensors(layer)
        }
        other = make(scheme, **options)
        assert moe_ops.load_checkpoint(other, source, progress=False).is_complete
        assert same(layer, other)


BLOCKS = ["fp8_block128", "fp8_w8a16_block128", "int8_block128", "fp8_block64x128"]
"""Schemes whose blocks have several rows."""


def loaded_by(how, layer, state, path):
    """Load a state dict into a new layer in one of the ways that there are."""
    if how == "load_checkpoint":
        moe_ops.load_checkpoint(layer, state, progress=False)
    elif how == "a file":
        save_file(state, path / "layer.safetensors")
        moe_ops.load_checkpoint(layer, path / "layer.safetensors", progress=False)
    elif how == "load_weights":
        assert len(list(layer.load_weights(state.items()))) == len(state) - 1
        layer.quant_method.process_weights_after_loading(layer)
    elif how == "a parent":
        parent = {f"0.{name}": x for name, x in state.items()}
        nn.Sequential(layer).load_state_dict(parent)
    else:
        layer.load_state_dict(state, assign=how == "assigned")
    return layer


def test_state_dicts_with_refined_blocks(tmp_path):
    """A state dict loads into a layer constructed with the same arguments: all ways, all bits."""
    ways = ("load_state_dict", "assigned", "a parent", "load_checkpoint", "a file", "load_weights")
    sizes = [(96, 128, "silu"), (192, 72, "silu"), (40, 72, "silu"), (136, 128, "relu2_no_mul")]
    for scheme, (width, hidden, activation) in itertools.product(BLOCKS, sizes):
        options = {"sizes": (E, K, hidden, width), "activation": activation}
        layer = quantized(filled(**options), scheme)
        for how in ways:
            device = "meta" if how == "assigned" else None
            new = make(scheme, **options, device=device)
            assert new.scheme == layer.scheme, (scheme, width)
            assert same(loaded_by(how, new, layer.state_dict(), tmp_path), layer), (how, width)
        tensors = {
            f"{e}.{'w1' if shard == 'w3' and not layer.sizes.gated else shard}.{end}": x
            for e, shard, end, x in checkpoint_tensors(layer)
        }
        for rank in range(2):
            pair = [make(scheme, **options, tp_size=2, tp_rank=rank) for _ in range(2)]
            for new, source in zip(pair, (layer.state_dict(), tensors), strict=True):
                moe_ops.load_checkpoint(new, source, progress=False)
            assert same(*pair), (scheme, width, rank)


def test_saved_blocks_are_merged_only_if_that_loses_nothing():
    """Two ranks of 48 columns are padded to a block of 128, which needs one scale."""
    sizes, ranks = (E, K, H, 96), {"tp_size": 2, "tp_rank": 0}
    state = quantized(filled(sizes=sizes), "fp8_block128").state_dict()
    state["w13_weight_scale"][2, 1] *= 2
    moe_ops.load_checkpoint(make("fp8_block128", sizes=sizes), state, progress=False)
    with pytest.raises(ValueError, match="w13_weight_scale: .*of 32 must be equal within .* 128"):
        layer = make("fp8_block128", sizes=sizes, **ranks)
        moe_ops.load_checkpoint(layer, state, progress=False)


def test_layers_of_a_model_by_name():
    model = nn.ModuleDict({f"layer_{i}": filled() for i in range(3)})
    moe_ops.quantize_(model, "fp8_channel", modules="layer_[01]", progress=False)
    assert [m.scheme.name for m in model.values()] == ["fp8_channel"] * 2 + ["unquantized"]
    moe_ops.quantize_(model, "nvfp4_w4a16", modules=lambda n, m: n == "layer_2", progress=False)
    assert model["layer_2"].scheme.name == "nvfp4_w4a16"
    for modules, match in (("layer_9", "got 'layer_9'"), ([], "got none"), (["layer_0"], "alread")):
        with pytest.raises(ValueError, match=match):
            moe_ops.quantize_(model, "fp8_channel", modules=modules, progress=False)
    with pytest.raises(TypeError, match="modules must be a str, got int"):
        moe_ops.quantize_(model, "fp8_channel", modules=[3], progress=False)


@pytest.mark.parametrize("on_input", [False, True])
def test_peaks_are_those_of_the_inputs(on_input):
    """The largest magnitudes in the inputs of both GEMMs, among chosen experts only."""
    layer = filled(apply_router_weight_on_input=on_input)
    plain, (x, logits) = (
        PlainExperts(*(w.clone() for w in PlainExperts.of_layer(layer)[:2]), None, None),
        batch(),
    )
    weights, ids, _ = layer.route(x, logits)
    first = second = 0.0
    for token in range(len(x)):
        for weight, expert in zip(weights[token], ids[token], strict=True):
            row = x[token].float() * (weight if on_input else 1)
            gate, up = (plain.w1[expert].float() @ row.bfloat16().float()).chunk(2)
            h = nn.functional.silu(gate) * up
            first, second = max(first, row.abs().max()), max(second, h.abs().max())
    moe_ops.quantize_(layer, "fp8_tensor_static", calibrate=lambda m: m(x, logits), progress=False)
    torch.testing.assert_close(layer.w13_input_scale, (first / 448).repeat(E), rtol=0.01, atol=0)
    torch.testing.assert_close(layer.w2_input_scale, (second / 448).repeat(E), rtol=0.02, atol=0)


LARGEST = {"fp8_tensor_static": 448, "mxfp4_w4a8": 448, "nvfp4": 6 * 448}
"""The largest number of the inputs' elements, times that of their scales."""


@pytest.mark.parametrize("part_bytes", [None, 1])
@pytest.mark.parametrize("on_input", [False, True])
def test_which_inputs_count(on_input, part_bytes):
    """Magnitudes of rows that an expert takes: ids of -1 and from E on are of none."""
    g = torch.Generator().manual_seed(2)
    w1, b1, w2 = (torch.randn(s, generator=g) for s in ((3, 8, 3), (3, 8), (3, 3, 8)))
    plain = PlainExperts(w1, w2, b1, None)
    x = torch.tensor([[1, -9, 2], [90, 0, 0], [80, 0, 0], [3, 7, 1]]).float()
    ids = torch.tensor([[0, -1], [3, -1], [-1, 9], [1, 3]])
    weights = torch.tensor([[0.5, 70], [1, 1], [1, 1], [2, 60]])
    rows = {e: row * (w if on_input else 1) for e, row, w in ((0, x[0], 0.5), (1, x[3], 2.0))}
    wanted = [row.abs().max() for row in rows.values()]
    between = [(w1[e] @ row + b1[e]).relu().max() for e, row in rows.items()]
    peaks, expert_map = Peaks(), torch.tensor([0, 1, 2, -1], dtype=torch.int32)
    for part in (x, x / 2):  # the second call has smaller ones
        routing = Routing(weights, ids, None if on_input else expert_map)
        calls = [(plain, routing)]
        if part_bytes is not None:  # as from host memory
            calls = in_parts(plain, routing, x.device, part_bytes)
        for experts, slots in calls:
            peaks.observe(part, experts, slots, torch.relu, weight_on_input=on_input)
    for scheme, largest in LARGEST.items():
        found = peaks.input_scales("layer", get_scheme(scheme))
        expected = (float(max(wanted)) / largest, float(max(between)) / largest)
        assert found == pytest.approx(expected, rel=1e-6), scheme
    for n in range(1, 40):  # the divisors that checkpoints hold lead back to the same scales
        peaks.observe(x * 1.3**n, plain, Routing(weights, ids, None), torch.relu)
        scales = torch.tensor(peaks.input_scales("layer", get_scheme("nvfp4")))
        assert torch.equal(1 / (1 / scales), scales)
    peaks.observe(x * torch.inf, plain, Routing(weights, ids, None), torch.relu)
    with pytest.raises(ValueError, match="positive and finite, got inf for GEMM 1"):
        peaks.input_scales("layer", get_scheme("nvfp4"))


def test_peaks_of_several_calls():
    x, logits = batch()
    layers = [filled() for _ in range(2)]
    runs = (lambda m: [m(x / 2, logits), m(x, logits)], lambda m: m(x, logits))
    for layer, run in zip(layers, runs, strict=True):
        moe_ops.quantize_(layer, "nvfp4", calibrate=run, progress=False)
    assert same(*layers)


def test_nothing_changes_unless_everything_can():
    model = nn.ModuleList([filled(), filled(), filled()])
    before = copy.deepcopy(model.state_dict())
    model[2].w2_weight.data[1, 2, 3] = torch.nan
    with pytest.raises(
        ValueError, match="FusedMoE|model.2 must have finite weights.*w2 of expert 1"
    ):
        moe_ops.quantize_(model, "fp8_channel", progress=False)
    model[2].w2_weight.data.copy_(before["2.w2_weight"])
    alternating = nn.ModuleList([model[0], filled(activation="swigluoai")])
    with pytest.raises(NotImplementedError, match="blocks of one row if gate and up rows alt"):
        moe_ops.quantize_(alternating, "fp8_block128", progress=False)
    with pytest.raises(ValueError, match="positive and finite, got 0.0 for GEMM 1 of 2"):
        run = lambda m: [m[0](*batch()), m[1](*batch())]  # noqa: E731
        moe_ops.quantize_(model, "nvfp4", calibrate=run, progress=False)
    after = model.state_dict()
    assert all(torch.equal(x, after[name]) for name, x in before.items())
    assert all(
        type(layer.quant_method) is moe_ops.layer.UnquantizedFusedMoEMethod for layer in model
    )


def test_what_is_refused():
    def refused(error, match, layer=None, scheme="fp8_channel", **how):
        layer = filled() if layer is None else layer
        with pytest.raises(error, match=match):
            moe_ops.quantize_(layer, scheme, progress=False, **how)

    refused(ValueError, "model must have experts that moe_ops runs", nn.Linear(2, 2))
    refused(TypeError, "model must be a torch.nn.Module, got int", 3)
    refused(ValueError, "scheme must be one of", scheme="fp8_chanel")
    refused(ValueError, "scheme must quantize weights, got 'unquantized'", scheme="unquantized")
    refused(ValueError, "calibrate must be a function .* nvfp4 has static", scheme="nvfp4")
    refused(ValueError, "calibrate must be None for fp8_channel", calibrate=print)
    refused(TypeError, "calibrate must be a function or None, got int", scheme="nvfp4", calibrate=3)
    refused(ValueError, "quantized already .fp8_tensor", make("fp8_tensor"))
    refused(NotImplementedError, "ranks hold parts", filled(tp_size=2, tp_rank=0))
    refused(ValueError, "must hold numbers, got w1 on meta", make(device="meta"))
    for sizes in ((E, K, 64, 33), (E, K, 33, 64)):
        odd = filled(sizes=sizes, activation="relu2_no_mul")
        refused(ValueError, "even sizes for 4-bit scheme mxfp4", odd, "mxfp4")
    own = filled()
    own.kernel = moe_ops.select_kernel(own.moe_config, "unquantized")
    refused(ValueError, "its kernel is for unquantized weights", own)
    ranked = filled(ep_size=2, ep_rank=1)
    refused(NotImplementedError, "different static scales", ranked, "nvfp4", calibrate=print)
    with pytest.raises(TypeError, match="progress must be a bool"):
        moe_ops.quantize_(filled(), "fp8_channel", progress=1)


def test_ranks_with_whole_experts_and_copies():
    """A rank quantizes the experts that it holds; with shared experts and redundant ones."""
    copies = {"num_redundant_experts": 2, "enable_eplb": True}
    for more in ({"ep_size": 2, "ep_rank": 1}, {"n_shared_experts": 1}, copies):
        layer = filled(**more)
        w1 = layer.w13_weight[[row[0] for row in layer.placement.rows.values() if row]]
        quantized(layer, "int8_channel")
        held = moe_ops.QTensor(layer.w13_weight, layer.w13_weight_scale)
        rows = moe_ops.dequantize_weight(held, "int8_channel")
        assert (rows[: len(w1)] - w1).abs().max() < 0.01


@pytest.mark.slow
def test_compiled_before_and_after():
    """A new compilation for the new scheme, and one only."""
    torch._dynamo.reset()
    layer, counter = filled(), Compilations("eager")
    run = torch.compile(layer, fullgraph=True, backend=counter)
    with torch.no_grad():
        run(*batch())
        moe_ops.quantize_(layer, "fp8_channel", progress=False)
        assert counter.count == 1
        for _ in range(2):
            assert torch.equal(run(*batch()), layer(*batch()))
    assert counter.count == 2


def test_calibration_runs_compiled_models_eagerly():
    layer, counter = filled(), Compilations("eager")
    layer.compile(backend=counter, fullgraph=True)
    quantized(layer, "fp8_tensor_static")
    assert (layer.w2_input_scale > 0).all() and counter.count == 0


class Other(LayerTarget):
    """A kind of target of another library."""

    finished = 0

    @classmethod
    def finish(cls, model):
        """Count calls."""
        cls.finished += 1


def test_targets_of_several_kinds(monkeypatch):
    """Each kind is finished once; what is inside a target belongs to it."""
    model = nn.ModuleDict({name: filled() for name in "abc"})
    model.a.inside = filled()
    others = [Other(name, model[name]) for name in "bc"]
    monkeypatch.setattr(targets, "FINDERS", [*targets.FINDERS, lambda _: iter(others)])
    monkeypatch.setattr(quantize, "FINDERS", targets.FINDERS)
    assert [t.name for t in quantize.targets_of(model)] == ["a", "b", "c"]
    moe_ops.quantize_(model, "fp8_channel", progress=False)
    assert Other.finished == 1
    monkeypatch.undo()
    outer = filled()
    outer.inside = filled()
    assert [target.name for target in quantize.targets_of(outer)] == [""]
