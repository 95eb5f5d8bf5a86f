"""Words, groups and scales of checkpoints at their edges; errors that say which expert it is."""

import re
from dataclasses import replace

import pytest
import torch
from checkpoint_formats import check_ranks, rewritten, words
from checkpoints import Experts, expected, numbers, per_expert
from torch.nn.functional import pad

import moe_ops
from moe_ops.loading.derived import channel_scales
from moe_ops.loading.names import CheckpointLayout, Piece
from moe_ops.loading.split import split_gate_and_up
from moe_ops.loading.stored import Form, canonical
from moe_ops.scheme import Group, Scheme, get_scheme
from moe_ops.scheme.formats import split_nibbles
from moe_ops.tensors import QTensor

E, K, H, I = 8, 2, 256, 512  # noqa: E741


@pytest.mark.parametrize("layout", ["awq", "gptq_v2"])
def test_zero_points_of_another_version(layout):
    """7 is 8 less one in version 1 alone."""
    experts = Experts.random(E, H, I).quantized("int4_w4a16_g128")
    source = per_expert(experts)
    source["experts.3.up_proj.qzeros"] = torch.full((2, I // 8), 0x77777777, dtype=torch.int32)
    layer = moe_ops.FusedMoE(E, K, H, I, scheme="int4_w4a16_g128")
    moe_ops.load_checkpoint(layer, source, progress=False)
    with pytest.raises(ValueError, match="experts.3.up_proj.qzeros: zero points must all be 8"):
        moe_ops.load_checkpoint(layer, source, progress=False, layout=layout)


def test_as_many_groups_as_rows():
    """Scales of GPTQ are (G, N), whatever their numbers."""
    q = Experts(*(moe_ops.quantize_weight(torch.randn(1, *s), "int4_w4a16_g32")
                  for s in ((4, 128), (4, 128), (128, 4))))  # fmt: skip
    source = {n.replace("weight_scale", "scales"): x for n, x in per_expert(q).items()}
    source = {n: x.t() if n.endswith("scales") else x for n, x in source.items()}
    layer = moe_ops.FusedMoE(1, 1, 128, 4, scheme="int4_w4a16_g32")
    moe_ops.load_checkpoint(layer, source, progress=False)
    assert torch.equal(layer.w13_weight_scale[:, :4], q.gate.scale)
    assert torch.equal(layer.w2_weight_scale, q.down.scale)


def test_words_that_are_not_full():
    """compressed-tensors fills the last word of a row up: 20 columns are three words."""
    experts = Experts.random(2, 20, 12).quantized("int4_w4a16_channel")
    filled = Experts(
        *(q._replace(data=words(pad(split_nibbles(q.data, 2), (0, 4)))) for q in experts)
    )
    fields = {"scale": "weight_scale"}
    source = {n.replace("_proj.weight", "_proj.weight_packed") if n.endswith("weight") else n: x
              for n, x in per_expert(filled, fields=fields).items()}  # fmt: skip
    source["experts.1.up_proj.weight_shape"] = torch.tensor([12, 20])
    layer = moe_ops.FusedMoE(2, 1, 20, 12, scheme="int4_w4a16_channel")
    moe_ops.load_checkpoint(layer, source, progress=False)
    assert all(map(torch.equal, numbers(layer), expected(
        experts, "int4_w4a16_channel", layer, slice(None))))  # fmt: skip
    source["experts.1.up_proj.weight_shape"] = torch.tensor([12, 24])
    with pytest.raises(ValueError, match=r"up_proj.weight_shape: numbers must be \[12, 20\]"):
        moe_ops.load_checkpoint(layer, source, progress=False)


@pytest.mark.parametrize("kind", ["mxfp4_w4a16", "mxfp6_e3m2"])
def test_microscaling_of_compressed_tensors(kind):
    experts = Experts.random(E, H, I).quantized(kind)
    name = "weight_packed" if kind.startswith("mxfp4") else "weight"
    check_ranks(kind, experts, rewritten(
        experts, lambda q, e: {name: q.data[e], "weight_scale": q.scale[e]}))  # fmt: skip


def test_zero_points_by_themselves_do_not_say_their_order():
    """AWQ and GPTQ have them in the same shape; `weight_loader` sees one tensor at a time."""
    layer = moe_ops.FusedMoE(E, K, H, I, scheme="int4_w4a16_g128_zp")
    x = torch.zeros(H // 128, I // 8, dtype=torch.int32)
    with pytest.raises(ValueError, match="qzeros must come with a layout that says awq"):
        layer.weight_loader(layer.w13_weight_zero_point, x, "experts.0.w1.qzeros", "w1", 0)


def test_gate_and_up_have_two_numbers_at_most():
    """In one tensor of both: one for each, or one for both."""
    for count in (1, 2):
        form = Form(2 * I, H, torch.float32, None, None, CheckpointLayout())
        piece, x = Piece("w13", "global_scale", "weight_scale_2"), torch.arange(1.0, count + 1)
        assert [float(part) for part in split_gate_and_up(piece, x, form, False)] == [1, count]
    with pytest.raises(ValueError, match=r"shape must be that of one or two numbers, got \(3,\)"):
        split_gate_and_up(piece, torch.ones(3), form, False)


def refuses(scheme, source, message):
    layer = moe_ops.FusedMoE(E, K, H, I, scheme=scheme)
    before = [p.clone() for p in layer.parameters()]
    with pytest.raises(ValueError, match=message):
        moe_ops.load_checkpoint(layer, source, progress=False)
    after = zip(before, layer.parameters(), strict=True)
    assert all(torch.equal(a.view(torch.uint8), b.data.view(torch.uint8)) for a, b in after)


@pytest.mark.parametrize(
    ("scheme", "bad", "rule"),
    [
        ("fp8_tensor", [0.0, -1.0, torch.nan, torch.inf], "finite and positive"),
        ("fp8_channel", [0.0, -1.0, torch.nan, torch.inf], "finite and positive"),
        ("fp8_block128", [0.0, -1.0, torch.nan, torch.inf], "finite and positive"),
        ("fp8_block128_ue8m0", [0.0, -1.0, torch.nan], "finite and positive"),
        ("int8_w8a16", [0.0, -1.0, torch.nan, torch.inf], "finite and positive"),
        ("int4_w4a16_g32", [torch.nan, torch.inf], "finite"),
        ("nvfp4_w4a16", [-1.0, torch.nan], "finite and not negative"),
        ("mxfp4_w4a16", [torch.nan], "finite"),
    ],
)
def test_scales_that_cannot_be_used(scheme, bad, rule):
    experts = Experts.random(E, H, I).quantized(scheme)
    name = "experts.5.up_proj.weight_scale"
    for number in bad:
        source = per_expert(experts)
        broken = source[name].clone()
        if broken.dtype == torch.uint8:
            broken = broken.view(torch.float8_e8m0fnu)
        broken.view(-1)[-1:] = torch.tensor([number]).to(broken.dtype)
        refuses(
            scheme, source | {name: broken}, f"{name}: scales must be {rule}, got 1 that are not"
        )


def test_a_scale_that_its_parameter_cannot_hold():
    experts = Experts.random(E, H, I).quantized("int4_w4a16_g32")
    source = per_expert(experts)
    source["experts.5.up_proj.weight_scale"] += 1e6
    layer = moe_ops.FusedMoE(E, K, H, I, scheme="int4_w4a16_g32", params_dtype=torch.float16)
    with pytest.raises(ValueError, match="scales must be finite, got 4096 that are not"):
        moe_ops.load_checkpoint(layer, source, progress=False)


def test_the_expert_of_a_tensor_of_all():
    gate, up, down = Experts.random(E, H, I).quantized("mxfp4_w4a16")
    both = torch.cat((gate.data, up.data), 1)
    for name, row in (("gate_up_proj_scales", 3), ("down_proj_scales", 6)):
        source = {
            "experts.gate_up_proj_blocks": both.unflatten(2, (-1, 16)),
            "experts.gate_up_proj_scales": torch.cat((gate.scale, up.scale), 1),
            "experts.down_proj_blocks": down.data.unflatten(2, (-1, 16)),
            "experts.down_proj_scales": down.scale.clone(),
        }  # fmt: skip
        source[f"experts.{name}"][row, 2, 1] = 255
        refuses(
            "mxfp4_w4a16", source, f"experts.{name}: expert {row}: scales must be finite, got 1"
        )


def test_zero_and_negative_scales_that_can_be_used():
    """NVFP4 blocks of zeros; AutoRound gives the largest magnitude the code -8, of either sign."""
    experts = Experts.random(E, H, I)
    experts.up[2, 3, 16:32] = 0
    nvfp4 = experts.quantized("nvfp4_w4a16")
    assert nvfp4.up.scale[2, 3, 1] == 0
    check_ranks("nvfp4_w4a16", nvfp4, per_expert(nvfp4))
    int4 = experts.quantized("int4_w4a16_g32")
    signs = torch.where(torch.arange(H // 32) % 2 == 0, -1.0, 1.0)
    int4 = int4._replace(gate=int4.gate._replace(scale=int4.gate.scale * signs))
    check_ranks("int4_w4a16_g32", int4, per_expert(int4))


def test_weights_of_one_byte_with_a_sign():
    """compressed-tensors int8 in groups: int8 where this library stores it with an offset."""
    experts = Experts.random(E, H, I).quantized("int8_w8a16_g128")
    signed = Experts(*(QTensor((q.data ^ 128).view(torch.int8), q.scale) for q in experts))
    check_ranks("int8_w8a16_g128", experts, per_expert(signed))


def form_of(scheme, n, k, *, own=None, dtype=torch.float32, **layout):
    quant = None if scheme is None else get_scheme(scheme).weight
    own = quant if own is None else replace(quant, group=own)
    return Form(n, k, dtype, quant, own, CheckpointLayout(**layout))


@pytest.mark.parametrize("awq, right, wrong", [(True, (32, 2), (4, 16)), (False, (4, 16), (32, 2))])
def test_words_of_another_layout(awq, right, wrong):
    """A down projection in the order of the other tool went into the layer as far as it fitted."""
    form = form_of("int4_w4a16_g16", 16, 32, awq=awq)
    with pytest.raises(ValueError, match=re.escape(f"shape must be {right}, got {wrong}")):
        canonical("weight", torch.zeros(wrong, dtype=torch.int32), "qweight", form)
    assert (
        canonical("weight", torch.zeros(right, dtype=torch.int32), "qweight", form).shape[0] == 16
    )


def test_zero_points_in_every_form():
    """Numbers 0 to 15, for twelve rows of three groups, as each tool packs them."""
    zeros = (torch.arange(36).view(12, 3) % 16).to(torch.uint8)
    shift = 4 * torch.arange(8)
    padded = pad(zeros, (0, 0, 0, 4)).long()
    by_rows = (padded.view(2, 8, 3) << shift[None, :, None]).sum(1).to(torch.int32)
    scheme, sizes = "int4_w4a16_g32_zp", (12, 96)
    for x in (zeros, zeros[::2] | zeros[1::2] << 4, by_rows, (zeros.int() - 8).to(torch.int8)):
        found = canonical("zero_point", x, "weight_zero_point", form_of(scheme, *sizes))
        assert torch.equal(found, zeros), x.dtype
    finer = form_of("int4_w4a16_g64_zp", 12, 191, own=Group(1, 32))
    assert torch.equal(
        canonical("zero_point", zeros, "weight_zero_point", finer), zeros.repeat_interleave(2, 1)
    )
    codes = torch.arange(16).view(1, 16)  # GPTQ stores one less, and the largest code for 0
    packed = ((codes - 1) % 16).view(1, 2, 8)
    packed = (packed << shift).sum(2).to(torch.int32)
    for less, wanted in ((True, codes), (False, (codes - 1) % 16)):
        form = form_of(scheme, 16, 32, awq=False, zeros_plus_one=less)
        assert torch.equal(canonical("zero_point", packed, "qzeros", form).long(), wanted.t())


def test_finer_scales_and_numbers_at_the_edge():
    scales = torch.arange(1.0, 9.0).view(4, 2)
    form = form_of("fp8_block64x128", 250, 191, own=Group(32, 32))
    found = canonical("scale", scales, "weight_scale_inv", form)
    rows, cols = torch.arange(8) * 32 // 64, torch.arange(6) * 32 // 128
    assert torch.equal(found, scales[rows][:, cols])
    eight = form_of("int8_w8a16_g32", 8, 32, awq=True)  # 8-bit words in order
    codes = torch.arange(256).view(32, 8)
    packed = (codes.view(32, 2, 4) << 8 * torch.arange(4)).sum(2).to(torch.int32)
    assert torch.equal(canonical("weight", packed, "qweight", eight).long(), codes.t())
    power = Scheme("own", None, replace(get_scheme("fp8_channel").weight, scale="pow2")).weight
    form = form_of("fp8_channel", 1, 8)._replace(quant=power, own=power)
    assert canonical("scale", torch.ones(1), "weight_scale", form).item() == 1
    with pytest.raises(ValueError, match="scales must be powers of two"):
        canonical("scale", torch.ones(1).nextafter(torch.tensor(2.0)), "weight_scale", form)
    half = form_of(None, 1, 2, dtype=torch.float16)
    infinite = torch.tensor([[torch.inf, 1.0]], dtype=torch.bfloat16)
    assert torch.equal(canonical("weight", infinite, "weight", half), infinite.half())
    with pytest.raises(ValueError, match="finite in torch.float16, got 1 that are not"):
        canonical("weight", torch.tensor([[7e4, 1.0]], dtype=torch.bfloat16), "weight", half)


def test_scales_that_are_split():
    """Numbers of any sign, also the largest; rows of zeros stay zeros."""
    scales = torch.randn(40, 12, generator=torch.Generator().manual_seed(0)) * 0.1
    scales[0] = -scales[0].abs()
    scales[1] = 0
    small, row = channel_scales(scales).values()
    assert small.dtype == torch.float8_e4m3fn and small.float().abs().max() <= 56
    back = small.float() * row[:, None]
    assert ((back - scales).abs() <= 2**-3.9 * scales.abs() + 2**-8 * row[:, None]).all()
