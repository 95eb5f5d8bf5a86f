"""Loading a checkpoint into host memory: expert by expert, with the bits of any other loading."""

import pytest
import torch
from checkpoints import Experts, fused, per_expert
from live_memory import LiveBytes
from packed_weights import PACKABLE

import moe_ops
from moe_ops import FusedMoE
from moe_ops.layer import forms
from moe_ops.scheme import SCHEMES, get_scheme

E, K, SIDE = 32, 2, 128
SLOTS = 3
NUMBERS = Experts.random(E, SIDE, SIDE, seed=3)


def checkpoint(scheme, stacked=False):
    """The tensors of a checkpoint: those of single experts, or of all experts."""
    if scheme == "unquantized":
        return fused(NUMBERS) if stacked else per_expert(NUMBERS)
    scheme = get_scheme(scheme)
    static = 0.5 if scheme.input_scale_names else None
    return per_expert(NUMBERS.quantized(scheme), input_scale=static)


def made(scheme, **options):
    chosen = None if scheme == "unquantized" else scheme
    return FusedMoE(E, K, SIDE, SIDE, scheme=chosen, params_dtype=torch.bfloat16, **options)


@pytest.fixture
def on_hopper(monkeypatch):
    """Layers think that their GPU reads the packed form."""
    monkeypatch.setattr(forms, "reads_packed", lambda w, scheme, *_, **__: not scheme.activation)


def assert_same_state(layer, other):
    own = dict(other.named_parameters())
    for name, p in layer.named_parameters():
        assert p.dtype == own[name].dtype and p.shape == own[name].shape, name
        both = (x.detach().reshape(-1).view(torch.uint8) for x in (p, own[name]))
        assert torch.equal(*both), name


def check_peak(scheme, source, most, **options):
    """Load with and without host memory: at most ``most`` experts more than all are on the host."""
    plain = made(scheme)
    moe_ops.load_checkpoint(plain, source, progress=False, **options)
    with LiveBytes() as memory:
        layer = made(scheme, resident_experts=SLOTS)
        moe_ops.load_checkpoint(layer, source, progress=False, **options)
    assert_same_state(plain, layer)
    residency = layer.host_experts.residency
    held = E * residency.expert_bytes
    slots = SLOTS * residency.expert_bytes
    assert memory.live >= held + slots
    more = (memory.peak - held - slots) / residency.expert_bytes
    assert more <= most
    x, logits = torch.randn(5, SIDE).bfloat16(), torch.randn(5, E).bfloat16()
    with torch.no_grad():
        assert torch.equal(layer(x, logits), plain(x, logits))


def test_every_scheme_is_loaded_expert_by_expert():
    failed = []
    for scheme in SCHEMES:
        try:
            check_peak(scheme, checkpoint(scheme), 2)
        except Exception as error:  # all schemes that fail are named
            failed.append(f"{scheme}: {error!r:.200}")
    assert not failed


def test_packed_forms_are_made_in_place(on_hopper):
    """Packing orders the words of an expert, and moves their bits in two more."""
    failed = []
    for scheme in PACKABLE:
        try:
            check_peak(scheme, checkpoint(scheme), 5)
        except Exception as error:
            failed.append(f"{scheme}: {error!r:.200}")
    assert not failed


def test_mxfp4_that_is_held_as_fp8(monkeypatch):
    """All rows must be exact, so a layer is converted at once, into a store of its own."""
    monkeypatch.setattr(forms, "gains_by_fp8", lambda *_: True)
    source = checkpoint("mxfp4_w4a8_token")
    plain, layer = made("mxfp4_w4a8_token"), made("mxfp4_w4a8_token", resident_experts=SLOTS)
    for each in (plain, layer):
        moe_ops.load_checkpoint(each, source, progress=False)
    assert layer.state.forms == dict.fromkeys(forms.WEIGHTS, forms.FP8)
    assert_same_state(plain, layer)
    x, logits = torch.randn(5, SIDE).bfloat16(), torch.randn(5, E).bfloat16()
    with torch.no_grad():
        assert torch.equal(layer(x, logits), plain(x, logits))


def test_stacked_and_plain_weights(tmp_path):
    stacked = checkpoint("unquantized", stacked=True)
    check_peak("unquantized", stacked, 4)
    pytest.importorskip("safetensors.torch").save_file(stacked, tmp_path / "model.safetensors")
    check_peak("unquantized", tmp_path, 4)
    for scheme in ("int4_w4a16_g128", "fp8_block128"):
        check_peak(scheme, checkpoint("unquantized"), 15, quantize=True)


def state_of(layer):
    return {name: x.clone() for name, x in layer.state_dict().items()}


def assert_state(layer, state):
    own = layer.state_dict()
    assert own.keys() == state.keys()
    for name, x in own.items():
        both = (y.reshape(-1).view(torch.uint8) for y in (x, state[name]))
        assert x.shape == state[name].shape and torch.equal(*both), name


@pytest.mark.parametrize("scheme", ["unquantized", "int4_w4a16_g128", "nvfp4"])
def test_a_load_that_fails_leaves_the_layer_as_it_was(scheme, on_hopper, monkeypatch):
    """Before anything was loaded, and after: the second load goes into memory of its own."""
    source = checkpoint(scheme)
    short = {name: x for name, x in source.items() if name != "experts.31.down_proj.weight"}
    wrong = {**source, "experts.31.down_proj.weight": torch.ones(3, 3)}
    layer = made(scheme, resident_experts=SLOTS)
    before = state_of(layer)
    for broken in (short, wrong, iter([*source.items()][:5])):
        with pytest.raises(ValueError, match="source must hold this layer exactly"):
            moe_ops.load_checkpoint(layer, broken, progress=False)
        assert_state(layer, before)
    report = moe_ops.load_checkpoint(layer, short, strict=False, progress=False)
    missing = getattr(layer, report.missing[0].partition("[")[0])
    assert torch.equal(missing[31], before[report.missing[0].partition("[")[0]][31])
    layer = made(scheme, resident_experts=SLOTS)
    before = state_of(layer)
    renew = type(layer).renew_slots
    calls = iter([RuntimeError("no room for slots")])

    def fails(module):
        for error in calls:
            raise error
        renew(module)

    with monkeypatch.context() as patch:
        patch.setattr(type(layer), "renew_slots", fails)
        with pytest.raises(RuntimeError, match="no room for slots"):
            moe_ops.load_checkpoint(layer, source, progress=False)
    assert_state(layer, before)
    moe_ops.load_checkpoint(layer, source, progress=False)
    before = state_of(layer)
    other = {name: x if x.dim() == 0 else x.flip(0) for name, x in short.items()}
    with pytest.raises(ValueError, match="source must hold this layer exactly"):
        moe_ops.load_checkpoint(layer, other, progress=False)
    assert_state(layer, before)


def test_what_a_layer_holds_that_was_written_or_moved():
    """Only a layer that nothing was written into is filled in place."""
    source = checkpoint("unquantized")
    layer = made("unquantized", resident_experts=SLOTS)
    for change in (lambda x: x.to("cpu"), lambda x: x.reset_parameters(), torch.nn.Module.eval):
        change(layer)
        assert layer.initial_seed is not None
    layer.load_state_dict(made("unquantized").state_dict())
    assert layer.initial_seed is None
    before = state_of(layer)
    with pytest.raises(ValueError, match="source must hold"):
        moe_ops.load_checkpoint(layer, [*source.items()][:5], progress=False)
    assert_state(layer, before)
    meta = FusedMoE(E, K, SIDE, SIDE, resident_experts=SLOTS, device="meta")
    assert meta.to_empty(device="cpu").initial_seed is None
    assert made("unquantized", resident_experts=SLOTS).to(torch.float32).initial_seed is None


@pytest.mark.parametrize("scheme", ["unquantized", "nvfp4", "int4_w4a16_g128"])
def test_another_number_of_slots_keeps_the_store(scheme):
    """Also where the store holds products of parameters."""
    layer = made(scheme, resident_experts=SLOTS)
    moe_ops.load_checkpoint(layer, checkpoint(scheme), progress=False)
    places = [x.data_ptr() for x in layer.parameters()]
    x, logits = torch.randn(5, SIDE).bfloat16(), torch.randn(5, E).bfloat16()
    with torch.no_grad():
        expected = layer(x, logits)
        moe_ops.offload_(layer, resident=7, progress=False)
        assert torch.equal(layer(x, logits), expected)
    assert [x.data_ptr() for x in layer.parameters()] == places
    assert layer.host_experts.residency.num_slots == 7


def test_a_layer_of_the_device(device):
    """In the forms in which kernels of this device read weights."""
    for scheme in ("unquantized", "int4_w4a16_g128", "mxfp4_w4a16", "fp8_block128"):
        plain, layer = (made(scheme, device=device, **n) for n in ({}, {"resident_experts": SLOTS}))
        for each in (plain, layer):
            moe_ops.load_checkpoint(each, checkpoint(scheme), progress=False)
        assert plain.state.forms == layer.state.forms
        assert all(p.is_pinned() for p in (layer.w13_weight, layer.w2_weight)) or device == "cpu"
        for tokens in (1, 5):
            x = torch.randn(tokens, SIDE, device=device).bfloat16()
            logits = torch.randn(tokens, E, device=device).bfloat16()
            with torch.no_grad():
                assert torch.equal(layer(x, logits), plain(x, logits)), (scheme, tokens)


@pytest.mark.parametrize("scheme", ["unquantized", "nvfp4"])
def test_slots_made_in_inference_mode(scheme):
    """Calls outside of it write to them, and loading to the parameters and to products of them."""
    layer, other = made(scheme), made(scheme)
    for each in (layer, other):
        moe_ops.load_checkpoint(each, checkpoint(scheme), progress=False)
    x, logits = torch.randn(5, SIDE).bfloat16(), torch.randn(5, E)
    with torch.inference_mode():
        moe_ops.offload_(other, resident=SLOTS, progress=False)
        expected = layer(x, logits)
        assert torch.equal(other(x, logits), expected)
    with torch.no_grad():
        assert torch.equal(other(x, logits), expected)
        other.load_state_dict({name: x.clone() for name, x in layer.state_dict().items()})
        assert torch.equal(other(x, logits), expected)
