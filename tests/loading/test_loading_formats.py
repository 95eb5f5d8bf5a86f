"""How quantized checkpoints store their tensors, each written here by its own rules."""

from functools import partial

import pytest
import torch
from checkpoint_formats import (
    AWQ_ORDER,
    E,
    H,
    I,
    K,
    check_ranks,
    codes_of,
    load_ranks,
    rewritten,
    words,
)
from checkpoints import FIELDS, MIXTRAL, Experts, expected, held, numbers, per_expert

import moe_ops
from moe_ops.scheme.formats import split_nibbles
from moe_ops.tensors import QTensor


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
def test_fine_grained_fp8(scale_dtype):
    experts = Experts.random(E, H, I).quantized("fp8_block128")
    experts = Experts(*(q._replace(scale=q.scale.to(scale_dtype).float()) for q in experts))
    source = per_expert(experts, fields={"scale": "weight_scale_inv"})
    source = {k: x.to(scale_dtype) if "scale" in k else x for k, x in source.items()}
    check_ranks("fp8_block128", experts, source)


def test_scales_that_are_powers_of_two():
    """As uint8 or float8_e8m0fnu exponents, under the name of DeepSeek-V4."""
    experts = Experts.random(E, H, I).quantized("fp8_block128_ue8m0")
    for dtype in (torch.uint8, torch.float8_e8m0fnu):
        source = per_expert(experts, names=MIXTRAL, fields={"scale": "scale"})
        for name in [n for n in source if n.endswith("scale")]:
            source[name] = source[name].to(torch.float8_e8m0fnu).view(dtype)
        check_ranks("fp8_block128_ue8m0", experts, source)


def test_fused_fp8_of_transformers():
    """Blocks counted from the first gate row; of whole tensors, one for gate and one for up."""
    for scheme, tail in (("fp8_block128", ()), ("fp8_tensor", (1,))):
        gate, up, down = experts = Experts.random(E, H, I).quantized(scheme)
        both = torch.cat((gate.data.float(), up.data.float()), 1).to(gate.data.dtype)
        if tail:
            scale = torch.stack((gate.scale, up.scale), 1)[..., None]
            down_scale = down.scale[:, None, None]
        else:
            scale, down_scale = torch.cat((gate.scale, up.scale), 1), down.scale
        source = {
            "gate_up_proj": both, "gate_up_proj_scale_inv": scale,
            "down_proj": down.data, "down_proj_scale_inv": down_scale,
        }  # fmt: skip
        check_ranks(scheme, experts, source)


def joined(*parts):
    """Tensors of all experts side by side along their rows, with columns as rows."""
    both = torch.cat([x.view(torch.uint8) if x.element_size() == 1 else x for x in parts], 1)
    return both.transpose(1, 2).contiguous().view(parts[0].dtype)


def of_llama4(experts, single):
    """ModelOpt's export of Llama 4: fused, columns as rows, one number for all experts.

    ``single``: these numbers, by the end of their names, for both weights.
    """
    gate, up, down = experts
    source = {"gate_up_proj": joined(gate.data, up.data), "down_proj": joined(down.data)}
    if "weight_scale" not in single:
        source["gate_up_proj_weight_scale"] = joined(gate.scale, up.scale)
        source["down_proj_weight_scale"] = joined(down.scale)
    for end, values in single.items():
        for name, value in zip(("gate_up_proj", "down_proj"), values, strict=True):
            source[f"{name}_{end}"] = torch.tensor(value)
    return source


LLAMA4 = {
    "nvfp4": {"weight_scale_2": (0.25, [0.5]), "input_scale": (0.5, 2.0)},
    "fp8_tensor_static": {"weight_scale": ([0.25], 0.5), "input_scale": (0.5, 2.0)},
    "nvfp4_w4a16": {"weight_scale_2": (0.25, 0.5)},
    "fp8_channel": {},
    "fp8_block32": {},
    "mxfp4_w4a16": {},
}
"""Schemes, and which scales are one number for all experts."""


@pytest.mark.parametrize("hidden", [64, 128, 256])
def test_fused_and_transposed_of_modelopt(hidden):
    """Some of the matrices are square, and scales may come before the weights."""
    experts, sizes = 2, (2, 1, hidden, 64)
    for scheme, single in LLAMA4.items():
        stored = Experts.random(experts, hidden, 64).quantized(scheme)
        source = of_llama4(stored, single)
        field = "scale" if "weight_scale" in single else "global_scale"
        factors = (0.25, 0.25, 0.5) if {*single} - {"input_scale"} else ()
        whole = [q._replace(**{field: torch.full((experts,), f)})
                 for q, f in zip(stored, factors, strict=False)]  # fmt: skip
        wanted = Experts(*(whole or stored))
        for given in (source, dict(reversed(source.items()))):
            for way in ({}, {"tp_size": 2, "tp_rank": 1}, {"ep_size": 2, "ep_rank": 1}):
                layer, streamed = (moe_ops.FusedMoE(*sizes, scheme=scheme, **way) for _ in range(2))
                assert moe_ops.load_checkpoint(layer, given, progress=False).is_complete
                assert len(list(streamed.load_weights(given.items()))) == len(source)
                dense = expected(wanted, scheme, layer, held(layer))
                for filled in (layer, streamed):
                    assert all(map(torch.equal, numbers(filled), dense)), (scheme, way)
                    if "input_scale" in single:
                        assert (filled.w13_input_scale == 0.5).all()
                        assert (filled.w2_input_scale == 2).all()


def test_biases_of_zeros():
    """GPTQ writes them for projections without one. Others need a layer that has biases."""
    experts, sizes = Experts.random(2, 128, 64), {"gate_proj": 64, "up_proj": 64, "down_proj": 128}
    of_one = {f"experts.{e}.{n}.bias": torch.zeros(m) for e in range(2) for n, m in sizes.items()}
    of_all = {"gate_up_proj_bias": torch.zeros(2, 128), "down_proj_bias": torch.zeros(2, 128)}
    for scheme in ("int4_w4a16_g32", "unquantized"):
        source = per_expert(experts if scheme == "unquantized" else experts.quantized(scheme))
        make = partial(moe_ops.FusedMoE, 2, 1, 128, 64, scheme=scheme)
        for biases in (of_one, of_all):
            for way in ({}, {"ep_size": 2, "ep_rank": 1}, {"tp_size": 2, "tp_rank": 0}):
                layer = make(**way)
                assert moe_ops.load_checkpoint(layer, source | biases, progress=False).is_complete
                assert {*layer.load_weights((source | biases).items())} <= source.keys()
            name, x = list(biases.items())[-1]
            for bad in (1e-7, torch.nan):
                x.view(-1)[-1] = bad
                with pytest.raises(ValueError, match=f"{name}: a layer without has_bias must"):
                    moe_ops.load_checkpoint(make(), source | biases, progress=False)
                with pytest.raises(ValueError, match=f"{name}: a layer without has_bias must"):
                    list(make().load_weights({name: x}.items()))
            x.zero_()
        beyond = {"experts.2.up_proj.bias": torch.zeros(64)}
        with pytest.raises(ValueError, match="1 unexpected .experts.2.up_proj.bias"):
            moe_ops.load_checkpoint(make(), source | beyond, progress=False)


def test_blocks_that_reach_from_gate_into_up():
    """704 rows of each: the sixth block of the fused scales holds rows of both."""
    width = 704
    whole = torch.cat(Experts.random(2, 128, width)[:2], 1)
    q = moe_ops.quantize_weight(whole, "fp8_block128")
    down = moe_ops.quantize_weight(Experts.random(2, 128, width).down, "fp8_block128")
    source = {
        "experts.gate_up_proj": q.data, "experts.gate_up_proj_scale_inv": q.scale,
        "experts.down_proj": down.data, "experts.down_proj_scale_inv": down.scale,
    }  # fmt: skip
    layer = moe_ops.FusedMoE(2, 1, 128, width, scheme="fp8_block128")
    moe_ops.load_checkpoint(layer, source, progress=False)
    assert layer.scheme.name == "fp8_block64x128"
    assert torch.equal(numbers(layer)[0], moe_ops.dequantize_weight(q, "fp8_block128"))


def test_blocks_of_up_that_begin_within_those_of_the_source():
    """200 rows of each, padded to 256 in the layer: 128 rows of up lie in two blocks of four."""
    scheme, width = "fp8_block128", 200
    experts = Experts.random(2, 128, width).quantized(scheme)
    source = {
        "experts.gate_up_proj": torch.cat((experts.gate.data, experts.up.data), 1),
        "experts.gate_up_proj_scale_inv": torch.full((2, 4, 1), 0.5),
        "experts.down_proj": experts.down.data, "experts.down_proj_scale_inv": experts.down.scale,
    }  # fmt: skip
    layer = moe_ops.FusedMoE(2, 1, 128, width, scheme=scheme)
    moe_ops.load_checkpoint(layer, source, progress=False)
    gate, up = (q.data.float() / 2 for q in experts[:2])
    w13 = numbers(layer)[0]
    assert torch.equal(w13[:, :width], gate) and torch.equal(w13[:, 256 : 256 + width], up)
    source["experts.gate_up_proj_scale_inv"][1, 3] = 1
    with pytest.raises(ValueError, match="blocks of 128 rows must not reach from the 200 gate r"):
        moe_ops.load_checkpoint(layer, source, progress=False)


@pytest.mark.parametrize("scheme", ["int8_channel", "int8_w8a16", "fp8_channel"])
def test_channels_of_compressed_tensors(scheme):
    experts = Experts.random(E, H, I).quantized(scheme)
    columns = [q._replace(scale=q.scale.reshape(E, -1, 1)) for q in experts]
    check_ranks(scheme, experts, per_expert(Experts(*columns)))


@pytest.mark.parametrize(
    "scheme", ["int4_w4a16_g32", "int4_w4a16_g128_zp", "int8_w8a16_g128", "int4_w4a16_channel"]
)
def test_packed_words_of_compressed_tensors(scheme):
    bits = 8 if scheme.startswith("int8") else 4
    experts = Experts.random(E, H, I).quantized(scheme)

    def rules(q, e):
        out = {
            "weight_packed": words(codes_of(q, e, bits), bits), "weight_scale": q.scale[e],
            "weight_shape": torch.tensor([q.data.shape[1], q.data.shape[2] * 8 // bits]),
        }  # fmt: skip
        if q.zero_point is not None:
            out["weight_zero_point"] = words(split_nibbles(q.zero_point, 1)[e].t(), bits).t()
        return out

    check_ranks(scheme, experts, rewritten(experts, rules))


@pytest.mark.parametrize("scheme", ["int4_w4a16_g128_zp", "int4_w4a16_g128"])
def test_awq(scheme):
    experts = Experts.random(E, H, I).quantized(scheme)

    def pack_awq(codes):
        return words(codes.unflatten(-1, (-1, 8))[..., list(AWQ_ORDER)].flatten(-2))

    def rules(q, e):
        zero = torch.full_like(split_nibbles(q.data, 2)[e][:, : q.scale.shape[2]], 8)
        if q.zero_point is not None:
            zero = split_nibbles(q.zero_point, 1)[e]
        return {
            "qzeros": pack_awq(zero.t()),  # before the weight that shows the packing
            "qweight": pack_awq(codes_of(q, e, 4).t()),
            "scales": q.scale[e].t(),
        }

    check_ranks(scheme, experts, rewritten(experts, rules))


@pytest.mark.parametrize(
    "scheme",
    [
        "int4_w4a16_g128_zp", "int4_w4a16_g128", "int8_w8a16_g128", "int4_w4a16_channel",
        "int8_w8a16",
    ],
)  # fmt: skip
@pytest.mark.parametrize("less", [1, 0])
def test_gptq(scheme, less):
    """Version 1, and version 2, whose zero points are what they are."""
    bits = 8 if scheme.startswith("int8") else 4
    experts = Experts.random(E, H, I).quantized(scheme)
    if scheme.endswith("zp"):  # stored one less: 0 as 15
        experts.gate.zero_point[3, :5] &= 0xF0
        experts.down.zero_point[3, :5] = 0

    def rules(q, e):
        codes, scale = codes_of(q, e, bits), q.scale[e].view(q.scale.shape[1], -1)
        if codes.dtype == torch.int8:  # one scale a row: the layer has signed numbers
            codes = (codes.int() + 128).to(torch.uint8)
        zero = torch.full_like(codes[:, : scale.shape[1]], 2 ** (bits - 1))
        if q.zero_point is not None:
            zero = split_nibbles(q.zero_point, 1)[e]
        return {
            "qweight": words(codes.t().contiguous().t(), bits).t(),
            "qzeros": words(zero.t() - less & 2**bits - 1, bits), "scales": scale.t(),
            "g_idx": torch.arange(zero.shape[1]).repeat_interleave(codes.shape[1] // zero.shape[1]),
        }  # fmt: skip

    source = rewritten(experts, rules)
    check_ranks(scheme, experts, source, layout="auto" if less else "gptq_v2")


def test_global_scales_divide_or_multiply():
    """compressed-tensors and ModelOpt; gate and up keep their own (they differ here)."""
    experts = Experts.random(E, H, I)
    experts = Experts(experts.gate * 8, *experts[1:]).quantized("nvfp4_w4a16")
    assert (experts.gate.global_scale != experts.up.global_scale).all()
    exact = Experts(*(q._replace(global_scale=1 / (1 / q.global_scale)) for q in experts))

    def compressed(q, e):
        return {
            "weight_packed": q.data[e], "weight_scale": q.scale[e],
            "weight_global_scale": (1 / q.global_scale[e]).view(1),
            "input_global_scale": torch.ones(1),
        }  # fmt: skip

    check_ranks("nvfp4_w4a16", exact, rewritten(experts, compressed))
    source = per_expert(experts, fields=FIELDS, input_scale=0.25)
    check_ranks("nvfp4_w4a16", experts, source)


@pytest.mark.parametrize("name", ["gate_up_proj{}", "gate_up_proj.weight{}", "w13_weight.weight{}"])
def test_all_experts_in_one_tensor(name):
    """NVFP4 by the names of ModelOpt and LLM Compressor, with a word left out, and nested."""
    gate, up, down = experts = Experts.random(E, H, I).quantized("nvfp4_w4a16")
    both = {
        "weight": torch.cat((gate.data, up.data), 1),
        "scale": torch.cat((gate.scale, up.scale), 1),
        "global": torch.stack((gate.global_scale, up.global_scale), 1),
    }
    second = {"weight": down.data, "scale": down.scale, "global": down.global_scale}
    other = name.replace("gate_up_proj", "down_proj").replace("w13", "w2")
    parts = [(name, both), (other, second)]
    modelopt = {"weight": "", "scale": "_scale", "global": "_scale_2"}
    source = {f"experts.{n.format(modelopt[k])}": x for n, its in parts for k, x in its.items()}
    check_ranks("nvfp4_w4a16", experts, source)

    exact = Experts(*(q._replace(global_scale=1 / (1 / q.global_scale)) for q in experts))
    compressor = {"weight": "_packed", "scale": "_scale", "global": "_global_scale"}
    for its in (both, second):
        its["global"] = 1 / its["global"]
    source = {f"experts.{n.format(compressor[k])}": x for n, its in parts for k, x in its.items()}
    source |= {f"experts.{n.format('_shape')}": torch.tensor([E, 0, 0]) for n, _ in parts}
    check_ranks("nvfp4_w4a16", exact, source)


@pytest.mark.parametrize("value", [0.0, float("inf"), float("nan"), -1.0])
def test_a_global_scale_that_cannot_be_used(value):
    experts = Experts.random(E, H, I).quantized("nvfp4_w4a16")
    source = per_expert(experts)
    source["experts.5.up_proj.weight_scale_2"] = torch.tensor(value)
    layer = moe_ops.FusedMoE(E, K, H, I, scheme="nvfp4_w4a16")
    with pytest.raises(ValueError, match="experts.5.up_proj.weight_scale_2: .*positive and finite"):
        moe_ops.load_checkpoint(layer, source, progress=False)


def test_mxfp4_of_gpt_oss():
    """``_blocks``, ``_scales`` and ``_bias``; gate and up rows alternate."""
    gate, up, down = experts = Experts.random(E, H, I).quantized("mxfp4_w4a16")

    def both(name):
        return torch.stack((getattr(gate, name), getattr(up, name)), 2).flatten(1, 2)

    g = torch.Generator().manual_seed(1)
    biases = torch.randn(E, 2 * I, generator=g), torch.randn(E, H, generator=g)
    source = {
        "experts.gate_up_proj_blocks": both("data").unflatten(2, (-1, 16)),
        "experts.gate_up_proj_scales": both("scale"),
        "experts.gate_up_proj_bias": biases[0],
        "experts.down_proj_blocks": down.data.unflatten(2, (-1, 16)),
        "experts.down_proj_scales": down.scale,
        "experts.down_proj_bias": biases[1],
    }
    oai = "swigluoai(clamp_limit=7.0,alpha=1.702)"
    for layer in load_ranks("mxfp4_w4a16", source, activation=oai, has_bias=True):
        wanted = expected(experts, "mxfp4_w4a16", layer, held(layer))
        assert all(map(torch.equal, numbers(layer), wanted))
        each, rank = layer.sizes.intermediate_size, layer.moe_parallel_config.tp_rank
        mine = biases[0][held(layer)][:, 2 * each * rank : 2 * each * (rank + 1)]
        assert torch.equal(layer.w13_bias, mine)
        assert torch.equal(layer.w2_bias, biases[1][held(layer)] * (rank == 0))
    plain = moe_ops.FusedMoE(E, K, H, I, scheme="mxfp4_w4a16", has_bias=True)
    moe_ops.load_checkpoint(plain, source, progress=False, layout="gpt_oss")
    wanted = expected(experts, "mxfp4_w4a16", plain, slice(None))
    assert all(map(torch.equal, numbers(plain), wanted))


def test_square_scales_of_gpt_oss():
    """Scales named ``scales`` are never transposed, whatever the layout says of weights."""
    experts = Experts.random(2, 32, 1024).quantized("mxfp4_w4a16")
    gate, up, down = experts
    assert down.scale.shape == (2, 32, 32)
    source = {
        "gate_up_proj_blocks": torch.cat((gate.data, up.data), 1).unflatten(2, (-1, 16)),
        "gate_up_proj_scales": torch.cat((gate.scale, up.scale), 1),
        "down_proj_blocks": down.data.unflatten(2, (-1, 16)), "down_proj_scales": down.scale,
    }  # fmt: skip
    layer = moe_ops.FusedMoE(2, 1, 32, 1024, scheme="mxfp4_w4a16")
    layout = moe_ops.loading.CheckpointLayout(transposed=True)
    moe_ops.load_checkpoint(layer, source, progress=False, layout=layout)
    wanted = expected(experts, "mxfp4_w4a16", layer, slice(None))
    assert all(map(torch.equal, numbers(layer), wanted))


def test_mxfp4_as_bytes_with_a_sign():
    """DeepSeek-V4: int8 pairs, float8_e8m0fnu scales."""
    experts = Experts.random(E, H, I).quantized("mxfp4_w4a16")
    signed = Experts(
        *(QTensor(q.data.view(torch.int8), q.scale.view(torch.float8_e8m0fnu)) for q in experts)
    )
    check_ranks("mxfp4_w4a16", experts, per_expert(signed, fields={"scale": "scale"}))


@pytest.mark.parametrize("scheme", ["int4_w4a16_g128_zp", "fp8_block128", "nvfp4_w4a16"])
def test_the_layers_own_state(scheme):
    """A saved layer is a checkpoint too, for any number of ranks."""
    experts = Experts.random(E, H, I).quantized(scheme)
    whole = moe_ops.FusedMoE(E, K, H, I, scheme=scheme)
    moe_ops.load_checkpoint(whole, per_expert(experts), progress=False)
    check_ranks(scheme, experts, whole.state_dict())
