"""What compressed-tensors is told of a scheme, and the numbers that it divides by."""

import pytest
import torch

import moe_ops
from moe_ops.layer.saving import checkpoint_tensors
from moe_ops.loading.compressed import (
    config_group,
    format_of,
    quantization_config,
    stored_projection,
)
from moe_ops.scheme import SCHEMES, get_scheme

FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
INT4 = {**FP8, "num_bits": 4, "type": "int"}
NVFP4 = {**FP8, "num_bits": 4, "strategy": "tensor_group", "group_size": 16}
MXFP8 = {**FP8, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
SAID = {
    "fp8_tensor": (
        "float-quantized",
        {**FP8, "strategy": "tensor"},
        {**FP8, "strategy": "tensor", "dynamic": True},
    ),
    "fp8_tensor_static": (
        "float-quantized",
        {**FP8, "strategy": "tensor"},
        {**FP8, "strategy": "tensor"},
    ),
    "fp8_channel": (
        "float-quantized",
        {**FP8, "strategy": "channel"},
        {**FP8, "strategy": "token", "dynamic": True},
    ),
    "fp8_block64x128": (
        "float-quantized",
        {**FP8, "strategy": "block", "block_structure": [64, 128]},
        {**FP8, "strategy": "group", "group_size": 128, "dynamic": True},
    ),
    "fp8_w8a16": ("naive-quantized", {**FP8, "strategy": "channel"}, None),
    "int8_w8a16": ("pack-quantized", {**FP8, "type": "int", "strategy": "channel"}, None),
    "int4_w4a16_g64_zp": (
        "pack-quantized",
        {**INT4, "strategy": "group", "group_size": 64, "symmetric": False},
        None,
    ),
    "nvfp4": ("nvfp4-pack-quantized", NVFP4, {**NVFP4, "dynamic": "local"}),
    "mxfp4_w4a16": ("mxfp4-pack-quantized", {**MXFP8, "num_bits": 4}, None),
    "mxfp8": ("mxfp8-quantized", MXFP8, {**MXFP8, "dynamic": True}),
    "fp8:1x32:e8m0|fp8:1x*:float32": (
        "float-quantized",
        {**FP8, "strategy": "channel"},
        {**MXFP8, "dynamic": True},
    ),
    "fp8:1x16:pow2|fp8:16x16:pow2": (
        "float-quantized",
        {**FP8, "strategy": "block", "block_structure": [16, 16]},
        {**FP8, "strategy": "group", "group_size": 16, "dynamic": True},
    ),
}


@pytest.mark.parametrize("name", SAID)
def test_what_is_said(name):
    form, weights, activations = SAID[name]
    assert config_group(get_scheme(name), ["Linear"]) == {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": activations,
        "output_activations": None,
        "format": form,
    }


@pytest.mark.parametrize(
    "name",
    [
        "mxfp6_e2m3",
        "int4_w4a8_g128",
        "|int8:128x128:float32",
        "|fp4:1x64:e8m0",
        "|fp4:1x16:e4m3",
        "|fp6_e2m3:1x32:float32",
        "|int4:1x64:e4m3",  # one-byte scales would give numbers in one byte
        "int8:1x*:float32|uint8:1x*:input",  # weights with an offset, one number per entry
        "fp8:1x*:float32|int4:1x*:input",
        "fp4:1x*:float32|fp8:1x*:float32",  # activations of 4 and 6 bits
        "fp6_e2m3:1x64:e8m0|fp8:1x*:float32",
        "fp8:1x64:e8m0|fp8:1x*:float32",  # scales of activations in groups that have no name
    ],
)
def test_what_has_no_format(name):
    assert format_of(get_scheme(name)) is None


def test_shapes_of_scales():
    """A column for rows, one number for a tensor, as other readers take them."""
    weight = torch.zeros(4, 8).to(torch.float8_e4m3fn)
    for name, scale, shape in (
        ("fp8_channel", torch.ones(4), (4, 1)), ("fp8_channel", torch.ones(4, 1), (4, 1)),
        ("fp8_tensor", torch.ones(()), (1,)), ("fp8_block128", torch.ones(1, 1), (1, 1)),
    ):  # fmt: skip
        found = stored_projection(get_scheme(name), {"weight": weight, "scale": scale}, 8)
        assert found["weight_scale"].shape == shape, name


def test_groups_of_a_model():
    schemes = [get_scheme(name) for name in ("fp8_channel", "nvfp4_w4a16")]
    one = quantization_config({schemes[0]: ["Linear"]}, ["lm_head"])
    assert one["format"] == "float-quantized" and one["ignore"] == ["lm_head"]
    two = quantization_config({scheme: [scheme.name] for scheme in schemes}, [])
    assert two["format"] == "mixed-precision"
    groups = two["config_groups"]
    assert [groups[f"group_{i}"]["targets"] for i in (0, 1)] == [["fp8_channel"], ["nvfp4_w4a16"]]


def test_reciprocals_of_reciprocals_are_exact():
    """``1 / (1 / y) == y`` for the reciprocals y of all float32 numbers of one binade."""
    x = (torch.arange(2**23, dtype=torch.int32) + (127 << 23)).view(torch.float32)
    y = 1 / x
    assert torch.equal(1 / (1 / y), y) and not torch.equal(1 / y, x)


OWN_KEYS = [
    "int8:1x*:float32|uint8:1x*:input",
    "fp8:1x*:float32|int4:1x*:input",
    "fp8:1x*:float32|uint8:64x64:pow2",
    "fp8:1x*:float32|int4:32x16:e4m3",
    "|int4:1x64:e4m3",
    "|uint8:1x64:float32:zero_point",
    "|int4:*x*:float32",
    "|int8:1x64:pow2",
    "|fp8:16x32:input",
    "int8:1x64:pow2|int8:16x64:pow2",
    "fp8:*x*:float32|int8:1x*:vector",
    "fp8:1x32:e8m0|fp4:1x16:e4m3:global_scale",
]
"""Schemes without a name, of which some have no format."""


def test_the_package_of_compressed_tensors_reads_them():
    """Its configuration parses, and it decompresses projections to the same numbers in bf16."""
    package = pytest.importorskip("compressed_tensors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    for name in [name for name in (*SCHEMES, *OWN_KEYS) if format_of(get_scheme(name))]:
        scheme = get_scheme(name)
        said = quantization_config({scheme: ["Linear"]}, ["lm_head"])
        parsed = quantization.QuantizationConfig.model_validate(said)
        group = parsed.config_groups["group_0"]
        compressor = package.compressors.BaseCompressor.get_value_from_registry(said["format"])
        layer = moe_ops.FusedMoE(2, 2, 128, 256, params_dtype=torch.bfloat16)
        for param in layer.parameters():
            param.data.normal_(std=0.1)
        plain = {"w1": layer.w13_weight[:, :256], "w3": layer.w13_weight[:, 256:],
                 "w2": layer.w2_weight}  # fmt: skip
        inputs = torch.randn(9, 128).bfloat16(), torch.randn(9, 2)
        run = (lambda m, inputs=inputs: m(*inputs)) if scheme.input_scale_names else None
        moe_ops.quantize_(layer, name, calibrate=run, progress=False)
        projections = {}
        for expert, shard, suffix, x in checkpoint_tensors(layer):
            projections.setdefault((expert, shard), {})[suffix] = x
        for (expert, shard), tensors in projections.items():
            found = compressor.decompress(tensors, group)["weight"]
            q = moe_ops.quantize_weight(plain[shard][expert : expert + 1], name)
            expected = moe_ops.dequantize_weight(q, name, found.dtype)[0]
            # For some schemes the package rounds products of scales to bf16 in between.
            torch.testing.assert_close(found, expected, rtol=2**-7, atol=0)
