"""Layers that are made without memory, filled later, copied and moved; and their weight loaders."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from checkpoints import Experts, per_expert
from loaded_layers import SECOND_OF_TWO, E, H, I, batch, loaded, make
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import prune

import moe_ops
from moe_ops.layer import parameter_specs


def on_meta(*args, **options):
    with torch.device("meta"):
        return make(*args, **options)


def spoil(layer):
    """Memory as `to_empty` may find it."""
    for x in (*layer.parameters(), *layer.buffers()):
        x.data.view(torch.uint8).fill_(0x5A)


@pytest.mark.parametrize("scheme", [None, "fp8_tensor_static", "nvfp4", "int4_w4a16_g32"])
def test_made_on_meta(scheme):
    bias = torch.zeros(E)
    options = {**SECOND_OF_TWO, "has_bias": True, "e_score_correction_bias": bias}
    torch.manual_seed(0)
    layer, plain = on_meta(scheme, **options), make(scheme, **options)
    assert all(x.is_meta for x in layer.parameters()) and layer.expert_map.is_meta
    layer.e_score_correction_bias = torch.ones(E)
    layer.to_empty(device="cpu")
    assert layer.expert_map.tolist() == plain.expert_map.tolist() == [-1] * 4 + [0, 1, 2, 3]
    spoil(layer)
    torch.manual_seed(0)
    layer.reset_parameters()
    names = [*dict(plain.named_parameters()), *dict(plain.named_buffers())]
    for name in names:
        x, y = getattr(layer, name), getattr(plain, name)
        assert x.dtype == y.dtype and not x.is_meta and x.requires_grad == y.requires_grad
        torch.testing.assert_close(x.float(), y.float(), rtol=0, atol=0, equal_nan=True)
    assert layer.w13_input_order is None


@pytest.mark.parametrize("scheme", [None, "fp8_block128", "int4_w4a16_g32"])
def test_made_and_trained_of_fake_tensors(scheme):
    """As estimates of memory do: nothing that a layer reads to be made may be a tensor."""
    real, (x, logits) = make(scheme, has_bias=True, **SECOND_OF_TWO), batch()
    expected = real(x.requires_grad_(), logits.requires_grad_())
    expected.sum().backward()
    with FakeTensorMode(allow_non_fake_inputs=False):
        layer = make(scheme, has_bias=True, **SECOND_OF_TWO)
        inputs = [torch.empty(t.shape, requires_grad=True) for t in (x, logits)]
        out = layer(*inputs)
        out.sum().backward()
    assert (out.shape, out.stride()) == (expected.shape, expected.stride())
    assert (out.dtype, out.device) == (expected.dtype, expected.device)
    trained = (*inputs, *layer.parameters())
    for fake, own in zip(trained, (x, logits, *real.parameters()), strict=True):
        assert (fake.shape, fake.dtype, fake.device) == (own.shape, own.dtype, own.device)
        assert (fake.grad is None) == (own.grad is None)


def test_names_of_experts_on_meta():
    """Loaders of models call it while a model is made."""
    arguments = ("gate_proj", "down_proj", "up_proj", E, 2)
    with torch.device("meta"):
        mapping = moe_ops.parallel.make_expert_params_mapping(*arguments)
    assert mapping == moe_ops.parallel.make_expert_params_mapping(*arguments)


@pytest.mark.parametrize("scheme", [None, "fp8_block128"])
def test_loaded_after_meta(scheme):
    layer = on_meta(scheme, **SECOND_OF_TWO)
    with pytest.raises(ValueError, match="call to_empty first"):
        loaded(layer, scheme)
    layer.to_empty(device="cpu").reset_parameters()
    x, logits = batch()
    expected = loaded(make(scheme, **SECOND_OF_TWO), scheme)(x, logits)
    assert torch.equal(loaded(layer, scheme)(x, logits), expected)


def test_a_reset_layer_is_a_new_one():
    layer = loaded(make())
    layer.w13_input_order = torch.arange(H)[None]
    torch.manual_seed(0)
    layer.reset_parameters()
    torch.manual_seed(0)
    for x, y in zip(layer.parameters(), make().parameters(), strict=True):
        assert torch.equal(x, y) and x.any() and x.requires_grad
    assert layer.w13_input_order is None


def test_scales_in_new_memory_are_used():
    """A layer keeps views of its static scales; they follow the parameters."""
    layer = make("fp8_tensor_static")
    for p in layer.parameters():
        p.data.copy_(torch.ones(p.shape))
    layer(*batch())
    layer.to_empty(device="cpu")
    for p in layer.parameters():
        p.data.copy_(torch.full(p.shape, 2.0))
    config = layer.quant_method.get_fused_moe_quant_config(layer)
    assert config.a1_scale == 2 and config.a2_scale == 2


def saved_and_read(layer):
    return pickle.loads(pickle.dumps(layer))


def emptied(layer):
    return layer.to("meta").to_empty(device="cpu")


def replaced(layer):
    layer.w13_weight = nn.Parameter(torch.zeros_like(layer.w13_weight), False)
    return layer


@pytest.mark.parametrize("scheme", [None, "fp8_channel"])
@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer, copy.deepcopy, saved_and_read, emptied, replaced,
        lambda layer: layer.to(torch.bfloat16), lambda layer: layer.to_empty(device="cpu"),
    ],
    ids=["new", "deepcopy", "pickle", "meta", "replaced", "dtype", "to_empty"],
)  # fmt: skip
def test_every_parameter_has_a_weight_loader(change, scheme):
    """As loaders of vLLM's models call it; it is the loader of the layer that has the parameter."""
    layer = change(make(scheme, has_bias=True, **SECOND_OF_TWO))
    layer.reset_parameters()
    params = dict(layer.named_parameters())
    assert set(params) == set(parameter_specs(layer.sizes))
    experts = Experts.random(E, H, I)
    source = per_expert(experts if scheme is None else experts.quantized(scheme))
    mapping = moe_ops.parallel.make_expert_params_mapping("gate_proj", "down_proj", "up_proj", E)
    for name, x in source.items():
        for param_name, weight_name, expert, shard in mapping:
            if weight_name not in name:
                continue
            mapped = name.replace(weight_name, param_name).removeprefix("experts.")
            param = params[mapped]
            done = param.weight_loader(
                param, x, mapped, shard_id=shard, expert_id=expert, return_success=True
            )
            assert done is (expert >= E // 2)
    wanted = loaded_without_bias(make(scheme, has_bias=True, **SECOND_OF_TWO), source)
    for name, param in params.items():
        if scheme is None and "bias" in name:  # random, as before
            continue
        assert torch.equal(param.float(), getattr(wanted, name).to(param.dtype).float()), name


def loaded_without_bias(layer, source):
    moe_ops.load_checkpoint(layer, source, strict=False, progress=False)
    return layer


def test_loaders_keep_no_layer_alive():
    layer = make()
    param, seen = layer.w13_weight, weakref.ref(layer)
    gc.disable()
    try:
        del layer
        assert seen() is None
    finally:
        gc.enable()
    with pytest.raises(ValueError, match="must belong to a FusedMoE that exists"):
        param.weight_loader(param, torch.zeros(I, H), "w1.weight", "w1", 0)


def test_a_parameter_saved_by_itself():
    buffer = io.BytesIO()
    torch.save(make().w2_weight, buffer)
    buffer.seek(0)
    assert torch.load(buffer, weights_only=True).shape == (E, H, I)


def test_what_a_cast_changes():
    """Plain weights, all biases and the sizes; stored values stay, wherever they lie in memory."""
    plain = moe_ops.FusedMoE(4, 2, 64, 32, has_bias=True, params_dtype=torch.float32)
    plain.to(torch.bfloat16)
    assert {p.dtype for p in plain.parameters()} == {plain.sizes.dtype} == {torch.bfloat16}
    layer = moe_ops.FusedMoE(4, 2, 64, 32, has_bias=True, scheme="fp8_block32")
    scale = torch.rand(2, 2, 4).permute(2, 0, 1)
    layer.w13_weight_scale = torch.nn.Parameter(scale, requires_grad=False)
    for cast in (layer.to, layer.type):  # the second casts integers too
        for dtype in (torch.float16, torch.bfloat16):
            cast(dtype)
            assert layer.w13_bias.dtype == layer.w2_bias.dtype == dtype
            assert layer.moe_config.in_dtype == dtype
            assert layer.w13_weight.dtype == torch.float8_e4m3fn
            assert torch.equal(layer.w13_weight_scale, scale)


def test_what_pruning_holds_is_cast():
    layer, (x, logits) = make(has_bias=True, scheme=None), batch()
    prune.l1_unstructured(layer, "w13_weight", 0.5)
    prune.l1_unstructured(layer, "w2_bias", 0.5)
    layer.to(torch.float16)
    assert {p.dtype for p in layer.parameters()} == {torch.float16}
    assert layer(x.half(), logits).dtype == torch.float16


@pytest.mark.parametrize("pack", [True, False])
def test_one_group_a_row_moves_in_any_form(pack):
    layer = moe_ops.FusedMoE(E, 2, 128, 128)
    moe_ops.quantize_(layer, "int4_w4a16_g128", progress=False)
    read = moe_ops.FusedMoE(E, 2, 128, 128, scheme="int4_w4a16_g128", device="meta")
    if pack:
        layer.pack_()
    # Tensors as files give them: an axis of size 1 has the stride that its place asks for.
    saved = {name: x.flatten().view(x.shape) for name, x in layer.state_dict().items()}
    read.load_state_dict(saved, assign=True)
    read.unpack_()
    x, logits = torch.randn(4, 128), torch.randn(4, E)
    expected = layer(x, logits)
    for move in (read.half, read.share_memory, lambda: read.to(torch.float32)):
        move()
        assert torch.equal(read(x, logits), expected)
