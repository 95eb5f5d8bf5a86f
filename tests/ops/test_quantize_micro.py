"""Quantization with a scale of one byte for 16 or 32 numbers: MXFP8, MXFP6, MXFP4, NVFP4."""

import importlib
import math
from fractions import Fraction

import pytest
import torch
from conftest import INTERPRETED
from hypothesis import given
from hypothesis import strategies as st
from quantize_oracle import FP8_VALUES, assert_bits, random_rows, to
from strategies import ACTIVATIONS, DTYPES, topk_ids

import moe_ops
from moe_ops import ops
from moe_ops.reference.slots import local_experts
from moe_ops.scheme import dequantize_rows, get_scheme, parse_quant
from moe_ops.scheme.formats import join_nibbles, split_codes

pytestmark = pytest.mark.kernel
reference = importlib.import_module("moe_ops.reference.quantize")
batched_reference = importlib.import_module("moe_ops.reference.batched")

MXFP8, MXFP4, NVFP4 = (
    parse_quant(key) for key in ("fp8:1x32:e8m0", "fp4:1x32:e8m0", "fp4:1x16:e4m3:global_scale")
)
MXFP6 = tuple(parse_quant(f"fp6_{name}:1x32:e8m0") for name in ("e2m3", "e3m2"))
QUANTS = (MXFP8, MXFP4, NVFP4, *MXFP6)
GLOBAL = 0.0123
quants = st.sampled_from(QUANTS)
GRIDS = {
    "fp8": [Fraction(float(v)) for v in FP8_VALUES],
    "fp4": [Fraction(v) for v in (0, 0.5, 1, 1.5, 2, 3, 4, 6)],
    "fp6_e2m3": [Fraction(m, 8) for m in range(8)]
    + [Fraction(8 + m, 8) * 2**e for e in range(3) for m in range(8)],
    "fp6_e3m2": [Fraction(m, 16) for m in range(4)]
    + [Fraction(4 + m, 16) * 2**e for e in range(7) for m in range(4)],
}


def by_name(quant):
    return quant.key


def given_scale(quant, device="cpu"):
    return torch.tensor([GLOBAL], device=device) if quant.global_scale else None


def nearest(x, grid):
    """Index of the nearest number, the even one of two, the last one for what is larger."""
    best = min(range(len(grid)), key=lambda i: (abs(grid[i] - x), i % 2))
    return best


def code_of(x: Fraction, negative, grid):
    return nearest(abs(x), grid) + len(grid) * negative


def f32(x) -> Fraction:
    return Fraction(torch.tensor(float(x), dtype=torch.float64).float().item())


def scale_of(amax: Fraction, quant):
    """The stored scale of a group, and what it stands for; the rules of the formats, in words."""
    if quant is NVFP4:
        code = nearest(f32(amax / 6), GRIDS["fp8"])
        return code, GRIDS["fp8"][code]
    if amax == 0:
        return 0, Fraction(2) ** -127
    if quant is MXFP8:  # the least power of two under which nothing is above 448
        exponent = math.ceil(math.log2(f32(amax / 448)))
        assert Fraction(2) ** (exponent - 1) < f32(amax / 448) <= Fraction(2) ** exponent
    else:  # the exponent of amax rounded to the element's significand, half away from zero; less
        bits, top = {"fp4": (2, 2), "fp6_e2m3": (4, 2), "fp6_e3m2": (3, 4)}[quant.element.name]
        mantissa, exponent = math.frexp(amax)  # the exponent of the element's largest
        rounded = math.floor(mantissa * 2**bits + 0.5) / 2**bits
        exponent += (rounded == 1.0) - 1 - top
    code = min(max(exponent + 127, 0), 254)
    return code, Fraction(2) ** (code - 127)


def quantize(rows, quant):
    """Codes and stored scales, number by number in rational arithmetic (divisions in float32)."""
    x, cols = rows.float(), quant.group.cols
    if quant.global_scale:
        x = x / torch.tensor([GLOBAL])
    grid, groups = GRIDS[quant.element.name], -(-x.shape[1] // cols)
    codes = torch.zeros(x.shape, dtype=torch.uint8)
    scales = torch.zeros(len(x), groups, dtype=torch.uint8)
    for i, row in enumerate(x.tolist()):
        for j in range(groups):
            piece = row[j * cols : (j + 1) * cols]
            scales[i, j], scale = scale_of(max(abs(Fraction(v)) for v in piece), quant)
            for n, v in enumerate(piece):
                ratio = f32(Fraction(v) / scale) if scale else Fraction(0)
                negative = math.copysign(1, v) < 0 and scale != 0
                codes[i, j * cols + n] = code_of(ratio, negative, grid)
    if quant.element.name == "fp8":
        sign = codes >= len(grid)
        codes = torch.where(sign, codes - len(grid) + 128, codes)
    return codes, scales


def codes_of(q, quant):
    q = q.cpu()
    return split_codes(q.view(torch.uint8), q.dim() - 1, quant.element)


@given(
    rows=st.sampled_from((1, 2, 5)), width=st.sampled_from((16, 40, 130)), quant=quants,
    dtype=st.sampled_from(DTYPES), seed=st.integers(0, 99),
)  # fmt: skip
def test_to_the_bit(rows, width, quant, dtype, seed, device):
    x = random_rows(seed, rows, width, dtype)
    scale = given_scale(quant, device)
    q, stored = ops.moe_quantize(x.to(device), scale, None, None, None, 0, quant.key)
    codes, scales = quantize(x, quant)
    assert q.dtype == quant.dtype and q.shape == (rows, quant.data_width(width))
    assert stored.dtype == quant.scale_dtype
    assert torch.equal(stored.cpu().view(torch.uint8), scales)
    assert torch.equal(codes_of(q, quant), codes)


@pytest.mark.parametrize("quant", (MXFP8, MXFP4, *MXFP6), ids=by_name)
def test_scales_of_every_exponent(quant, device):
    """Groups of one number each, between powers of two and on them."""
    exponents = torch.arange(-116, 128, 9 if INTERPRETED else 1).double()  # both ends
    x = torch.cat([torch.exp2(exponents) * m for m in (1.0, 1.4999, 1.5, 1.75, 1.75001, 1.9999)])
    x = x[x < 3.4e38].float()
    rows = torch.zeros(len(x), 32)
    rows[:, 3] = -x
    q, stored = ops.moe_quantize(rows.to(device), None, None, None, None, 0, quant.key)
    expected = [scale_of(Fraction(v), quant)[0] for v in x.tolist()]
    assert stored.flatten().tolist() == expected
    back = dequantize_rows(q.cpu(), stored.cpu(), quant)
    normal = (x > 2.0**-100) & (x < 2.0**127)
    step = 2.0**-3 if quant.element.name == "fp6_e3m2" else 2.0**-4
    step = 0.25 if quant is MXFP4 else step
    assert ((back[:, 3] + x).abs() <= step * x)[normal].all()


@pytest.mark.parametrize("quant", MXFP6, ids=by_name)
def test_every_number_of_six_bits(quant, device):
    """All 64 codes, what is halfway between two of them and just beside that; saturation."""
    grid = torch.tensor([float(v) for v in GRIDS[quant.element.name]])
    middle = (grid[1:] + grid[:-1]) / 2
    down, up = middle.nextafter(grid[:-1]), middle.nextafter(grid[1:])
    x = torch.cat([grid, middle, down, up])
    expected = torch.tensor([nearest(Fraction(v), GRIDS[quant.element.name]) for v in x.tolist()])
    rows = torch.zeros(2 * len(x), 32)
    rows[:, 0], rows[:, 9] = grid[-1], torch.cat([x, -x])
    q, scale = ops.moe_quantize(rows.to(device), None, None, None, None, 0, quant.key)
    assert (scale == 127).all()
    assert torch.equal(q[:, 9].cpu().long(), torch.cat([expected, expected + 32]))


def test_the_fp4_table(device):
    """Ties to the even code, saturation, and the sign of what becomes zero."""
    edges = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 0.26, 0.74, 1.26, 1.74, 2.51, 3.49, 5.01]
    rounded = [0, 1, 1, 2, 2, 4, 4, 6, 0.5, 0.5, 1.5, 1.5, 3, 3, 6]
    x = torch.tensor([[6.0, *edges], [-6.0, *(-e for e in edges)]])
    q, scale = ops.moe_quantize(x.to(device), None, None, None, None, 0, MXFP4.key)
    back = dequantize_rows(q.cpu(), scale.cpu(), MXFP4)
    assert scale.flatten().tolist() == [127, 127]
    assert torch.equal(back[:, 1:], torch.tensor([rounded, [-r for r in rounded]]))
    assert codes_of(q, MXFP4)[1, 1] == 8


@given(
    case=topk_ids(max_tokens=9), quant=quants, weighted=st.booleans(), dtype=st.sampled_from(DTYPES)
)
def test_slots_equal_the_reference(case, quant, weighted, dtype, device):
    """Byte by byte; rows of skipped slots are NaN, are not read, and become zeros."""
    ids, num_experts = case
    tokens, k = ids.shape
    x, weights = random_rows(3, tokens, 130, dtype), torch.rand(ids.shape) if weighted else None
    used = (local_experts(ids, None, num_experts) >= 0).view(tokens, k)
    x[~used.any(1)] = torch.nan
    arguments = (x, given_scale(quant), weights, ids, None, num_experts, quant.key)
    actual = ops.moe_quantize(*to(device, *arguments))
    for a, b in zip(actual, reference.moe_quantize(*arguments), strict=True):
        assert_bits(a, b)
    skipped = ~(used.flatten() if weighted else used.any(1))
    assert not codes_of(actual[0], quant)[skipped].any()
    assert not actual[1].cpu().view(torch.uint8)[skipped].any()


@given(
    quant=quants, key=st.sampled_from(ACTIVATIONS), dtype=st.sampled_from(DTYPES),
    width=st.sampled_from((16, 44, 130)), seed=st.integers(0, 99),
)  # fmt: skip
def test_activation_quantize_is_the_pair(quant, key, dtype, width, seed, device):
    gated = moe_ops.activation.formula(key).gated
    x = torch.randn(6, width * (2 if gated else 1), generator=torch.Generator().manual_seed(seed))
    x, scale = (x * 3).to(dtype).to(device), given_scale(quant, device)
    fused = ops.activation_quantize(x, scale, None, None, 3, key, quant.key)
    pair = ops.moe_quantize(ops.activation(x, key), scale, None, None, None, 3, quant.key)
    for a, b in zip(fused, pair, strict=True):
        assert_bits(a, b)


@given(case=topk_ids(max_tokens=9), quant=quants, weighted=st.booleans(), rows=st.integers(1, 5))
def test_batched_equals_the_reference(case, quant, weighted, rows, device):
    ids, num_experts = case
    x, weights = random_rows(4, len(ids), 72, torch.bfloat16), torch.rand(ids.shape)
    arguments = (
        x, given_scale(quant), weights if weighted else None, ids, 0, num_experts, rows, quant.key
    )  # fmt: skip
    actual = ops.batched_dispatch(*to(device, *arguments))
    for a, b in zip(actual, batched_reference.batched_dispatch(*arguments), strict=True):
        assert_bits(a, b)
    x, counts = (
        random_rows(5, 3 * rows, 144, torch.bfloat16).view(3, rows, 144),
        torch.tensor([0, 1, rows]),
    )
    arguments = (x, given_scale(quant), counts.int())
    for name, more in (("batched_quantize", ()), ("batched_activation_quantize", ("silu",))):
        actual = getattr(ops, name)(*to(device, *arguments), *more, quant.key)
        expected = getattr(batched_reference, name)(*arguments, *more, quant.key)
        for a, b in zip(actual, expected, strict=True):
            assert_bits(a, b)


@pytest.mark.parametrize("quant", QUANTS, ids=by_name)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.filterwarnings("ignore:invalid value")
def test_what_is_not_finite_is_seen_in_its_group_only(quant, bad, device):
    x = torch.ones(3, 64, device=device)
    x[1, 40] = bad
    q, scale = ops.moe_quantize(x, given_scale(quant, device), None, None, None, 0, quant.key)
    back = dequantize_rows(q.cpu(), scale.cpu(), quant)
    if quant is NVFP4 and bad == torch.inf:
        return  # saturates: the largest scale there is
    first = 40 // quant.group.cols * quant.group.cols
    expected = torch.zeros(3, 64, dtype=torch.bool)
    expected[1, first : first + quant.group.cols] = True
    assert torch.equal(~back.isfinite(), expected)


def test_global_scales_divide(device):
    """A product with the reciprocal is another number now and then, and so another code."""
    factor = next(
        g for g in torch.arange(3.0, 999, 2) if (2.5 * g) * (1 / g) > 2.5 and 6 * g / g == 6
    )
    x = torch.zeros(1, 16, device=device)
    x[0, :2] = torch.stack((6 * factor, 2.5 * factor))
    q, scale = ops.moe_quantize(x, factor.view(1).to(device), None, None, None, 0, NVFP4.key)
    assert scale.float().tolist() == [[1.0]]
    assert dequantize_rows(q.cpu(), scale.cpu(), NVFP4)[0, :2].tolist() == [6.0, 2.0]


@pytest.mark.parametrize("quant", (MXFP4, NVFP4), ids=by_name)
def test_odd_rows_do_not_fill_their_bytes(quant, device):
    x = torch.ones(2, 33, device=device)
    with pytest.raises(ValueError, match="even number of columns"):
        ops.moe_quantize(x, given_scale(quant, device), None, None, None, 0, quant.key)


@given(quant=quants, seed=st.integers(0, 99))
def test_numbers_are_exact_in_bf16(quant, seed):
    """A stored value times its group's scale: what the GEMMs rely on."""
    x = random_rows(seed, 4, 128, torch.float32)
    back = dequantize_rows(
        *reference.moe_quantize(x, given_scale(quant), *[None] * 3, 0, quant.key), quant
    )
    assert torch.equal(back.bfloat16().float(), back)


def test_packing():
    codes = torch.arange(16, dtype=torch.uint8).view(1, 16)
    assert join_nibbles(codes, 1).tolist() == [[i + 16 * (i + 1) for i in range(0, 16, 2)]]
    for name in ("mxfp4", "mxfp8", "nvfp4"):
        assert get_scheme(name).activation in QUANTS
