"""Weights into schemes and back: to the bit against plain Python, and within half a step."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from table_items import every_row

import moe_ops
from moe_ops import SCHEMES, FusedMoEQuantConfig, dequantize_weight, get_scheme, quantize_weight
from moe_ops.scheme import Scheme, formats, parse_quant, rounding
from moe_ops.scheme.values import ELEMENTS
from moe_ops.scheme.weights import halves, spread_scale
from moe_ops.tensors import QTensor

QUANTIZED = [name for name, s in SCHEMES.items() if s.weight is not None]
MORE = ["int4_w4a16_g64_zp", "int8_w8a16_g64", "int8_w8a16_g32_zp", "int4_w4a16_g16",
        "fp8_w8a16_block64x128", "fp8_block32x64"]  # fmt: skip
SMALL_FLOATS = ("fp4", "fp6_e2m3", "fp6_e3m2")


def weight(shape, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(shape, generator=g) / shape[2] ** 0.5
    w *= torch.rand(shape[0], shape[1], 1, generator=g) + 0.01
    return w.to(dtype)


@every_row("name", [*QUANTIZED, *MORE])
def test_keys_stand_for_quants(name):
    scheme = get_scheme(name)
    for quant in (scheme.activation, scheme.weight):
        assert quant is None or parse_quant(quant.key) == quant


def test_names_that_differ_only_in_group_sizes():
    assert get_scheme("int4_w4a16_g64_zp").weight.key == "int4:1x64:input:zero_point"
    assert get_scheme("fp8_w8a16_block64x128").weight.key == "fp8:64x128:float32"
    for name in ("int4_w4a16_g48", "int8_w8a16_g8", "fp8_w8a16_block12"):
        with pytest.raises(ValueError, match="powers of two"):
            get_scheme(name)
    for other in (None, 8, get_scheme("fp8_block64x128")):
        with pytest.raises(TypeError, match=f"name must be a str, got {type(other).__name__}"):
            get_scheme(other)


def nearest_even(x, grid):
    """Index of the number of ``grid`` nearest to ``x``, the even one of two; exact arithmetic."""
    x = min(x, grid[-1])
    best = min(abs(g - x) for g in grid)
    ties = [i for i, g in enumerate(grid) if abs(g - x) == best]
    return next((i for i in ties if i % 2 == 0), ties[0])


def test_the_fp4_table():
    edges = {0.25: 0, 0.75: 1, 1.25: 1, 1.75: 2, 2.5: 2, 3.5: 4, 5.0: 4, 6.0: 6, 9.0: 6}
    fp4 = ELEMENTS["fp4"]
    for x, rounded in edges.items():
        for sign in (1, -1):
            code = rounding.encode(torch.tensor([sign * x]), fp4)
            assert rounding.stored_values(code, fp4).item() == sign * rounded, x
    inside = {0.26: 0.5, 0.74: 0.5, 1.26: 1.5, 1.74: 1.5, 2.51: 3.0, 3.49: 3.0, 5.01: 6.0}
    for x, rounded in inside.items():
        assert (
            rounding.stored_values(rounding.encode(torch.tensor([x]), fp4), fp4).item() == rounded
        )


@pytest.mark.parametrize("name", SMALL_FLOATS)
def test_small_floats_round_to_the_nearest(name):
    element = ELEMENTS[name]
    grid = [
        abs(v) for v in formats.code_values(torch.arange(2 ** (element.bits - 1)), element).tolist()
    ]
    assert grid[-1] == element.largest and grid == sorted(set(grid))
    x = torch.cat(
        [
            torch.linspace(0, 1.2 * grid[-1], 3001),
            torch.tensor(grid),
            torch.tensor([(a + b) / 2 for a, b in zip(grid, grid[1:], strict=False)]),
        ]
    )
    codes = rounding.encode(x, element)
    assert codes.tolist() == [nearest_even(v, grid) for v in x.tolist()]
    minus = rounding.encode(-x, element)
    assert torch.equal(minus, codes + len(grid))


@pytest.mark.parametrize("name", SMALL_FLOATS)
def test_shared_exponents(name):
    """The power of two that puts amax, rounded to the element, in the top binade."""
    element = ELEMENTS[name]
    top = math.frexp(element.largest)[1] - 1
    mantissa = element.bits - 1 - element.exponent
    amax = torch.cat([torch.logspace(-30, 30, 500), torch.tensor([1.75, 1.7499, 1.9375, 1.0])])
    for a, s in zip(amax.tolist(), formats.e8m0_of(amax, element).tolist(), strict=True):
        m, e = math.frexp(a)
        rounded = math.floor(m * 2 ** (mantissa + 1) + 0.5) / 2 ** (mantissa + 1)
        carry = rounded == 1.0
        assert s - 127 == e - 1 + carry - top, a
    extremes = torch.tensor([0.0, torch.finfo(torch.float32).max, 2.0**-126])
    assert formats.e8m0_of(extremes, element).tolist() == [0, min(254, 255 - top), 0]
    assert formats.e8m0_value(torch.tensor([0, 1, 127, 254], dtype=torch.uint8)).tolist() == [
        2.0**-127, 2.0**-126, 1.0, 2.0**127]  # fmt: skip


def test_nibbles():
    codes = torch.arange(2 * 6 * 4, dtype=torch.uint8).view(2, 6, 4) % 16
    for axis in (1, 2):
        packed = formats.join_nibbles(codes, axis)
        even, odd = (
            codes.index_select(axis, torch.arange(i, codes.shape[axis], 2)) for i in (0, 1)
        )
        assert torch.equal(packed, even + 16 * odd)
        assert torch.equal(formats.split_nibbles(packed, axis), codes)


def step(q, quant, n, k):
    """The largest distance of neighbouring numbers, for each weight."""
    widest = {"fp8": 32.0, "fp4": 2.0, "fp6_e2m3": 0.5, "fp6_e3m2": 4.0}
    steps = spread_scale(rounding.scale_value(q.scale), quant, n, k) * widest.get(
        quant.element.name, 1.0
    )
    return steps * halves(q.global_scale, n) if quant.global_scale else steps


@given(
    name=st.sampled_from([*QUANTIZED, *MORE]),
    shape=st.sampled_from([(1, 8, 32), (2, 130, 258), (3, 7, 144), (2, 66, 16)]),
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float16)),
    seed=st.integers(0, 100),
)
def test_back_within_half_a_step(name, shape, dtype, seed):
    w, quant = weight(shape, dtype, seed), get_scheme(name).weight
    q = quantize_weight(w, name)
    assert q.scale.shape == quant.weight_scale_shape(*shape) and q.data.dtype == quant.dtype
    assert q.data.shape == (*shape[:2], shape[2] // quant.element.values_per_byte)
    assert all(t is None or t.is_contiguous() for t in q)
    back = dequantize_weight(q, name)
    # A scale in the weight's dtype is off by its own rounding, and the ends of the range with it.
    rounded = 2**quant.element.bits * torch.finfo(dtype).eps
    slack = {"e4m3": 6 / 16, "input": rounded}.get(quant.scale, 1e-4)
    least = rounded * torch.finfo(dtype).smallest_normal  # that of a subnormal scale
    error = (back - w.float()).abs()
    assert (error <= step(q, quant, *shape[1:]) * (0.5 + slack) + least).all()
    assert torch.equal(dequantize_weight(q, name, dtype), back.to(dtype))


def plain_int4(group, dtype):
    """Codes and scale of one group, in plain Python floats that are float32 values."""
    f32 = lambda v: torch.tensor(v, dtype=torch.float32).item()  # noqa: E731
    scale = max(f32(max(*group, 0.0) / 7), f32(-min(*group, 0.0) / 8))
    scale = torch.tensor(scale).to(dtype).float().item()
    return [min(7, max(-8, round(f32(v / scale)))) + 8 for v in group], scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int4_to_the_bit(dtype):
    w = weight((1, 2, 40), dtype)
    q = quantize_weight(w, "int4_w4a16_g32")
    codes = formats.split_nibbles(q.data, 2)
    for row in range(2):
        for group, piece in enumerate(w[0, row].float().split(32)):
            expected, scale = plain_int4(piece.tolist(), dtype)
            assert codes[0, row, 32 * group :][: len(expected)].tolist() == expected
            assert q.scale[0, row, group].item() == scale


@pytest.mark.parametrize("name", ["int4_w4a16_g32_zp", "int8_w8a16_g32_zp"])
def test_zero_points(name):
    """Ranges of both signs as vLLM has them; of one sign with zero inside the range."""
    steps = 15 if name.startswith("int4") else 255
    w = torch.stack(
        [torch.linspace(-1, 2, 32), torch.linspace(5, 6, 32), -torch.linspace(5, 6, 32)]
    )
    q = quantize_weight(w[None], name)
    scale = torch.tensor([3.0, 6.0, 6.0]) / steps
    assert torch.equal(q.scale.flatten(), scale)
    zero = q.zero_point if steps == 255 else formats.split_nibbles(q.zero_point, 1)[:, :3]
    expected = [round((1 / scale[0]).item()), 0, steps]
    assert zero.flatten().tolist() == expected
    assert q.zero_point.shape == ((1, 2, 1) if steps == 15 else (1, 3, 1))
    assert ((dequantize_weight(q, name)[0] - w).abs() <= 0.5001 * scale[:, None]).all()


def test_nvfp4_to_the_bit():
    w = weight((2, 3, 40))
    w[1, 1, :16] = 1e-7  # its block scale is 0
    q = quantize_weight(w, "nvfp4_w4a16")
    gs = 448 * 6 / w.abs().amax((1, 2))
    assert torch.equal(q.global_scale, 1 / gs)
    grid = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    codes = formats.split_nibbles(q.data, 2)
    for e in range(2):
        for n in range(3):
            for block, x in enumerate((w[e, n] * gs[e]).split(16)):
                scale = (x.abs().amax() / 6).clamp(max=448).to(torch.float8_e4m3fn)
                assert q.scale[e, n, block].float() == scale.float()
                mine = codes[e, n, 16 * block :][: len(x)].tolist()
                if scale.float() == 0:
                    assert set(mine) == {0}
                    continue
                ratio = (x / scale.float()).clamp(-6, 6).tolist()
                assert mine == [nearest_even(abs(v), grid) + 8 * (v < 0) for v in ratio]
    assert (q.scale[1, 1, 0].float() == 0) and (
        dequantize_weight(q, "nvfp4_w4a16")[1, 1, :16] == 0
    ).all()


@every_row("name", [*QUANTIZED, *MORE])
@every_row("dtype", [torch.float32, torch.float16])
def test_zeros_stay_zeros(name, dtype):
    w = torch.zeros(2, 4, 64, dtype=dtype)
    assert (dequantize_weight(quantize_weight(w, name), name) == 0).all()


@pytest.mark.parametrize("name", ["fp8_w8a16", "int8_w8a16", "fp8_tensor"])
def test_scales_of_a_tensor_and_of_halves(name):
    w = weight((2, 6, 32))
    q = quantize_weight(w, name)
    data = q.data.float()
    whole, half = torch.tensor([0.5, 2.0]), torch.tensor([[0.5, 2.0], [3.0, 4.0]])
    assert torch.equal(
        dequantize_weight(q._replace(scale=whole), name), data * whole[:, None, None]
    )
    expected = data * half.repeat_interleave(3, 1)[:, :, None]
    assert torch.equal(dequantize_weight(q._replace(scale=half), name), expected)


def test_halves_of_a_global_scale():
    w = weight((2, 6, 32))
    q = quantize_weight(w, "nvfp4_w4a16")
    both = torch.stack([q.global_scale, 2 * q.global_scale], 1)
    plain, back = (dequantize_weight(x, "nvfp4_w4a16") for x in (q, q._replace(global_scale=both)))
    assert torch.equal(back[:, :3], plain[:, :3]) and torch.equal(back[:, 3:], 2 * plain[:, 3:])


def test_errors():
    with pytest.raises(ValueError, match=r"w.shape\[2\] must be even .* got 33"):
        quantize_weight(torch.zeros(1, 2, 33), "mxfp4_w4a16")
    q = quantize_weight(weight((1, 4, 32)), "int4_w4a16_g32_zp")
    for field in ("scale", "zero_point"):
        with pytest.raises(ValueError, match=f"q.{field} must be a Tensor"):
            dequantize_weight(q._replace(**{field: None}), "int4_w4a16_g32_zp")
    with pytest.raises(ValueError, match="q.scale must be a Tensor"):
        dequantize_weight(QTensor(q.data), "mxfp4_w4a16")


def test_configs_take_what_schemes_have():
    for name in ("int4_w4a16_g128_zp", "nvfp4_w4a16", "mxfp4_w4a16"):
        w1, w2 = (quantize_weight(weight(s), name) for s in ((2, 8, 32), (2, 32, 4)))
        config = FusedMoEQuantConfig.from_weights(name, w1, w2)
        assert config.w1_zp is w1.zero_point and config.w2_gscale is w2.global_scale
    with pytest.raises(ValueError, match="w1_zp must be None"):
        FusedMoEQuantConfig("int4_w4a16_g128", w1_zp=w1.scale)


def test_schemes_that_cannot_be_computed_are_refused():
    """Whatever their names; `tests/test_own_schemes.py` has the rules."""
    known = get_scheme("fp8_channel")
    other = Scheme("fp8_channel", get_scheme("fp8_block128").activation, known.weight)
    w = weight((2, 8, 32))
    for scheme in (other, replace(known, name="mine", weight=None)):
        for call in (
            lambda scheme=scheme: quantize_weight(w, scheme),
            lambda scheme=scheme: dequantize_weight(QTensor(w), scheme),
            lambda scheme=scheme: FusedMoEQuantConfig(scheme),
            lambda scheme=scheme: moe_ops.FusedMoE(4, 2, 32, 32, scheme=scheme),
        ):
            with pytest.raises(NotImplementedError, match=f"scheme.weight.*'{scheme.name}'"):
                call()
    for name in ("fp8_channel", "int4_w4a16_g64"):
        equal = replace(get_scheme(name), name="mine")
        assert FusedMoEQuantConfig(equal).scheme == get_scheme(name)


def test_bits_of_a_weight():
    assert get_scheme("int4_w4a16_g128").weight_bits(256, 256) == 4 + 16 / 128
    assert get_scheme("int4_w4a16_g128_zp").weight_bits(256, 256) == 4 + 20 / 128
    assert get_scheme("mxfp4_w4a16").weight_bits(256, 256) == 4 + 8 / 32
    assert get_scheme("mxfp6_e2m3").weight_bits(256, 256) == 8 + 8 / 32
    assert get_scheme("int4_w4a8_g128").weight_bits(256, 256) == 4 + 8 / 128 + 32 / 256
