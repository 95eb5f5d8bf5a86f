"""A layer with a modular kernel: dtypes of ids, shared experts beside it, room for its tokens."""

import copy
from dataclasses import replace

import pytest
import torch
from modular import Recorder
from small_layers import (
    KINDS,
    E,
    H,
    Int64Only,
    T,
    arguments,
    batch,
    filled,
    kernel_of,
    make,
    one_expert,
)
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import moe_ops


@pytest.mark.parametrize("kind", ["plain", "grouped", "identity", "balanced"])
def test_ids_have_the_dtype_that_the_kernel_asks_for(kind):
    layer = filled(**KINDS[kind])
    (x, logits), _ = arguments(layer)
    expected = layer(x, logits)
    layer.kernel = kernel_of(layer, Int64Only())
    torch.testing.assert_close(layer(x, logits), expected)
    assert layer.route(x, logits).topk_ids.dtype == torch.int64


def grouped(layer, **changes):
    """A kernel with the layer's scales and biases."""
    config = layer.quant_method.get_fused_moe_quant_config(layer)
    if config is None:
        biases = {"w1_bias": layer.w13_bias, "w2_bias": layer.w2_bias}
        config = moe_ops.FusedMoEQuantConfig("unquantized", **biases)
    experts = moe_ops.pipeline.GroupedGemmExperts(replace(layer.moe_config, **changes), config)
    return moe_ops.FusedMoEKernel(moe_ops.pipeline.MoEPrepareAndFinalizeNoEP(), experts)


@pytest.mark.parametrize("options", [{"has_bias": True}, {"scheme": "fp8_tensor"}])
def test_replaced_scales_and_biases_need_another_kernel(options):
    layer, other = filled(**options).requires_grad_(False), filled(**options).requires_grad_(False)
    layer.kernel = grouped(layer)
    x, logits = batch()
    near = layer(x, logits)
    for name, param in other.named_parameters():
        if name not in ("w13_weight", "w2_weight"):
            param.data.mul_(2)
    layer.load_state_dict(other.state_dict())  # in place
    expected = other(x, logits)
    assert not torch.equal(near, expected)
    torch.testing.assert_close(layer(x, logits), expected)
    layer.w13_weight = nn.Parameter(other.w13_weight.data, requires_grad=False)
    torch.testing.assert_close(layer(x, logits), expected)
    layer.load_state_dict(other.state_dict(), assign=True)
    raised = {
        ValueError: layer,
        torch._dynamo.exc.Unsupported: torch.compile(layer, backend="eager", fullgraph=True),
    }
    for error, call in raised.items():
        with pytest.raises(error, match="layer.kernel must be set after loading or copying, which"):
            call(x, logits)
    layer.kernel = grouped(layer)
    torch.testing.assert_close(layer(x, logits), expected)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x, logits), layer(x, logits))


STATIC = ["fp8_tensor_static", "nvfp4", "mxfp4_w4a8"]


def static(scheme):
    """A layer with static input scales, and a batch of its size."""
    layer, (x, logits) = moe_ops.FusedMoE(E, 2, 64, 64), batch(hidden=64)
    moe_ops.quantize_(layer, scheme, calibrate=lambda layer: layer(x, logits), progress=False)
    return layer, (x, logits)


def other_memory(scale):
    scale.data = scale.data * 3


def set_(scale):
    with torch.no_grad():
        scale.set_(scale.detach() * 3)


@pytest.mark.parametrize("change", [other_memory, set_, lambda scale: scale.data.mul_(3)])
@pytest.mark.parametrize("scheme", STATIC)
def test_a_static_scale_counts_in_whatever_memory_it_is(scheme, change):
    layer, (x, logits) = static(scheme)
    before, changed = layer(x, logits), copy.deepcopy(layer)
    for scale in (layer.w13_input_scale, layer.w2_input_scale):
        change(scale)
    changed.load_state_dict(layer.state_dict())
    expected = changed(x, logits)
    assert not torch.equal(before, expected)
    assert torch.equal(layer(x, logits), expected)
    config = layer.quant_method.get_fused_moe_quant_config(layer)
    assert layer.quant_method.get_fused_moe_quant_config(layer) is config


@pytest.mark.parametrize("scheme", STATIC)
def test_a_set_kernel_does_not_run_with_a_static_scale_of_other_memory(scheme):
    layer, (x, logits) = static(scheme)
    layer.kernel = grouped(layer)
    before = layer(x, logits)
    layer.w13_input_scale.data.mul_(3)
    after = layer(x, logits)
    assert not torch.equal(before, after)
    set_(layer.w2_input_scale)
    with pytest.raises(ValueError, match="layer.kernel must be set after loading or copying"):
        layer(x, logits)
    layer.kernel = grouped(layer)
    assert not torch.equal(layer(x, logits), after)
    if scheme != "nvfp4":  # torch does not copy the 8-bit floats that its kernel holds
        with pytest.raises(ValueError, match="layer.kernel must be set after loading or copying"):
            copy.deepcopy(layer)(x, logits)


class SiluOnly(moe_ops.pipeline.TritonExperts):
    SUPPORTS = replace(
        moe_ops.pipeline.TritonExperts.SUPPORTS, activations=(moe_ops.MoEActivation.SILU,)
    )

    def supports_chunking(self):
        return False


def test_a_kernel_must_serve_its_layer():
    def refused(layer, kernel, error, text):
        with pytest.raises(error, match=text):
            layer.kernel = kernel

    def silu_only(layer):
        config = moe_ops.FusedMoEQuantConfig("unquantized")
        experts = SiluOnly(layer.moe_config, config)
        return moe_ops.FusedMoEKernel(moe_ops.pipeline.MoEPrepareAndFinalizeNoEP(), experts)

    layer = make()
    refused(layer, moe_ops.FusedMoEKernel, TypeError, "layer.kernel must be a FusedMoEKernel")
    monolithic = moe_ops.select_kernel(
        layer.moe_config, "unquantized", experts=moe_ops.pipeline.MonolithicExperts
    )
    refused(layer, monolithic, ValueError, "must be modular.*got MonolithicExperts")
    for size in ("hidden_dim", "intermediate_size", "num_experts", "experts_per_token"):
        wrong = {size: getattr(layer.moe_config, size) + 1}
        refused(layer, grouped(layer, **wrong), ValueError, f"must have the layer's {size}, ")
    other = moe_ops.FusedMoE(E, 2, H, 24, scheme="fp8_tensor")
    refused(layer, grouped(other), ValueError, "scheme, unquantized, got fp8_tensor")
    refused(make(has_bias=True), kernel_of(layer), ValueError, "has_bias, True, got False")
    layer.kernel = silu_only(layer)
    gelu, chunked = make(activation="gelu"), make(chunk_size=4)
    refused(gelu, silu_only(gelu), ValueError, "got SiluOnly: kernel does not support gelu")
    refused(chunked, silu_only(chunked), ValueError, "chunk_size = 4 asks for, got SiluOnly")
    for method, name in ((3, "int"), (moe_ops.UnquantizedFusedMoEMethod, "the class Unquantized")):
        text = f"must be an instance of FusedMoEMethodBase, got {name}"
        with pytest.raises(TypeError, match=text):
            layer.quant_method = method


class Shared(nn.Module):
    """Counts its calls, and notes them among the events."""

    def __init__(self, events):
        super().__init__()
        self.events = events

    def forward(self, x):
        self.events.append(f"shared {tuple(x.shape)}")
        return x * 2


@pytest.mark.parametrize("chunk_size", [None, 4])
@pytest.mark.parametrize("where", ["layer", "kernel", "both"])
def test_shared_experts_run_once_while_rows_come_back(where, chunk_size):
    events = []
    shared = Shared(events)
    layer = make(shared_experts=None if where == "kernel" else shared, chunk_size=chunk_size)
    x, logits = batch()
    routed = make()(x, logits)
    part = Recorder(moe_ops.pipeline.MoEPrepareAndFinalizeNoEP(), events)
    options = {} if where == "layer" else {"shared_experts": shared}
    layer.kernel = kernel_of(layer, part, **options)
    beside, out = layer(x, logits)
    torch.testing.assert_close(out, routed)
    assert torch.equal(beside, x * 2)
    steps = [e for e in events if not e.startswith("hook") and "prepare" not in e]
    assert steps[:3] == ["start finalize 0", f"shared ({T}, {H})", "receive finalize 0"]
    assert sum(e.startswith("shared") for e in events) == 1
    latent = torch.ones(3, 5, 7)
    beside, out = layer(x.view(3, 3, H), logits.view(3, 3, E), latent)
    assert torch.equal(beside, latent * 2) and out.shape == (3, 3, H)
    if where == "both":
        layer.shared_experts = Shared(events)
        with pytest.raises(ValueError, match="layer.kernel.shared_experts must be None or the lay"):
            layer(x, logits)


def test_shared_experts_read_tokens_that_a_kernel_overwrites():
    layer, (x, logits) = make(shared_experts=Shared([])), batch()
    layer.kernel = kernel_of(layer, inplace=True)
    expected = make()(x, logits), 2 * x
    shared, out = layer(x, logits)
    torch.testing.assert_close((out, shared), expected)


@pytest.mark.parametrize("room", [1, 2, 4, T, 100])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_batched_kernel_takes_any_number_of_tokens(room, asynchronous):
    """All to one expert: as many rows of it as there are tokens."""
    layer, (x, logits) = make(custom_routing_function=one_expert), batch()
    expected = layer(x, logits)
    part = moe_ops.pipeline.BatchedPrepareAndFinalize(room, E, 1, 0)
    part = moe_ops.pipeline.AsyncPrepareAndFinalize(part) if asynchronous else part
    layer.quant_method.maybe_make_prepare_finalize = lambda: part
    layer.quant_method.init_prepare_finalize(layer)
    layer.shared_experts = shared = Shared([])
    beside, out = layer(x, logits)
    torch.testing.assert_close(out, expected)
    assert torch.equal(beside, 2 * x) and len(shared.events) == 1


def test_a_batched_kernel_that_others_wait_for_says_its_room():
    layer = make(custom_routing_function=one_expert)
    part = moe_ops.pipeline.BatchedPrepareAndFinalize(4, E, 2, 0)
    layer.quant_method.maybe_make_prepare_finalize = lambda: part
    layer.quant_method.init_prepare_finalize(layer)
    with pytest.raises(ValueError, match="must have at most max_num_tokens = 4 tokens.* got 9"):
        layer(*batch())
    layer.chunk_size = 4
    torch.testing.assert_close(layer(*batch()), make(custom_routing_function=one_expert)(*batch()))


def test_a_compiled_batched_kernel_says_its_room():
    """Nothing is asked of the number of tokens while it is traced."""
    torch._dynamo.reset()
    layer = make(custom_routing_function=one_expert)
    layer.quant_method.maybe_make_prepare_finalize = lambda: (
        moe_ops.pipeline.BatchedPrepareAndFinalize(7, E, 1, 0)
    )
    layer.quant_method.init_prepare_finalize(layer)
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    torch.testing.assert_close(compiled(*batch(5)), layer(*batch(5)))
    torch.testing.assert_close(compiled(*batch(7)), layer(*batch(7)))
    with pytest.raises(ValueError, match="must have at most max_num_tokens = 7 tokens, got 9"):
        compiled(*batch())
    assert counter.frame_count == 1
