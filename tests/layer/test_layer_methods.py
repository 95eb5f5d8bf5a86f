"""The parts of a layer: method classes, parameters, and a kernel that was chosen once."""

import copy

import pytest
import torch
from checkpoints import Experts, per_expert
from small_layers import E, H, K, T, batch, make

import moe_ops
from moe_ops.layer import parameter_specs


def test_a_kernel_that_was_chosen():
    layer, (x, logits) = make(), batch()
    expected = layer(x, logits)
    config = moe_ops.FusedMoEQuantConfig("unquantized")
    experts = moe_ops.pipeline.GroupedGemmExperts(layer.moe_config, config)
    layer.kernel = moe_ops.FusedMoEKernel(moe_ops.pipeline.MoEPrepareAndFinalizeNoEP(), experts)
    torch.testing.assert_close(layer(x, logits), expected)
    assert not layer.must_reduce_shared_expert_outputs()
    assert torch.equal(copy.deepcopy(layer)(x, logits), layer(x, logits))


@pytest.mark.parametrize("scheme", ["unquantized", "fp8_block128", "mxfp4_w4a16"])
def test_select_kernel_serves_the_layer(scheme):
    experts, (x, logits) = Experts.random(E, H, 32).quantized(scheme), batch()
    layer = moe_ops.FusedMoE(E, K, H, 32, scheme=scheme)
    moe_ops.load_checkpoint(layer, per_expert(experts), progress=False)
    expected = layer(x, logits)
    config = layer.quant_method.get_fused_moe_quant_config(layer) or scheme
    layer.kernel = moe_ops.select_kernel(layer.moe_config, config)
    torch.testing.assert_close(layer(x, logits), expected)


@pytest.mark.parametrize("scheme", [None, "fp8_channel", "nvfp4_w4a16"])
def test_method_classes(scheme):
    layer, (x, logits) = make(scheme=scheme), batch()
    method = layer.quant_method
    kind = (
        moe_ops.layer.QuantizedFusedMoEMethod if scheme else moe_ops.layer.UnquantizedFusedMoEMethod
    )
    assert type(method) is kind and isinstance(method, moe_ops.layer.FusedMoEMethodBase)
    weights, ids, _ = layer.route(x, logits)
    assert torch.equal(method.apply(layer, x, weights, ids), layer(x, logits))
    config = method.get_fused_moe_quant_config(layer)
    assert (config is None) is (scheme is None)
    assert method.uses_weight_scale_2_pattern() is (layer.w13_weight_scale_2 is not None)
    assert method.maybe_make_prepare_finalize() is None
    parts = (
        moe_ops.pipeline.MoEPrepareAndFinalizeNoEP(),
        moe_ops.pipeline.BatchedPrepareAndFinalize(T * K, E, 1, 0),
    )
    expected = layer(x, logits)
    for prepare_finalize in parts:
        method.maybe_make_prepare_finalize = lambda part=prepare_finalize: part
        method.init_prepare_finalize(layer)
        assert type(layer.kernel.prepare_finalize) is type(prepare_finalize)
        torch.testing.assert_close(layer(x, logits), expected)


def test_a_method_of_ones_own():
    class Doubled(moe_ops.layer.UnquantizedFusedMoEMethod):
        def apply(self, layer, x, topk_weights, topk_ids):
            return 2 * super().apply(layer, x, topk_weights, topk_ids)

    layer, (x, logits) = make(), batch()
    expected = 2 * layer(x, logits)
    layer.quant_method = Doubled()
    assert torch.equal(layer(x, logits), expected)


def test_kinds_of_scales():
    kinds = {
        "fp8_tensor": "tensor", "fp8_channel": "channel", "int8_w8a16": "channel",
        "int4_w4a16_g32": "group", "fp8_block128": "block",
    }  # fmt: skip
    for scheme, kind in kinds.items():
        found = moe_ops.layer.FusedMoeWeightScaleSupported.of(moe_ops.get_scheme(scheme).weight)
        assert found is moe_ops.layer.FusedMoeWeightScaleSupported(kind)


@pytest.mark.parametrize("scheme", ["fp8_tensor_static", "int4_w4a16_g128_zp", "nvfp4_w4a16"])
@pytest.mark.parametrize("activation", ["silu", "relu2_no_mul", "swigluoai"])
def test_parameters_are_what_the_scheme_says(scheme, activation):
    """Those of quantize_weight, under the field's names."""
    layer = moe_ops.FusedMoE(4, 2, 128, 256, scheme=scheme, activation=activation)
    rows = 256 if activation == "relu2_no_mul" else 512
    w13 = moe_ops.quantize_weight(torch.randn(4, rows, 128), scheme)
    w2 = moe_ops.quantize_weight(torch.randn(4, 128, 256), scheme)
    names = ("weight", "weight_scale", "weight_zero_point", "weight_scale_2")
    for which, q in (("w13", w13), ("w2", w2)):
        for name, x in zip(names, q, strict=True):
            param = getattr(layer, f"{which}_{name}")
            assert (param is None) is (x is None)
            if x is not None:
                halves = which == "w13" and activation == "silu" and x.dim() == 1
                assert param.shape == ((4, 2) if halves else x.shape) and param.dtype == x.dtype
    specs = parameter_specs(layer.sizes)
    assert list(specs) == [name for name, _ in layer.named_parameters()]
