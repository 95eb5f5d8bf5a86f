"""MXFP4 as exact fp8: every number and every bit comes back, and what is not exact is refused."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from packed_weights import assert_same_bits

from moe_ops import SCHEMES, QTensor, get_scheme, quantize_weight
from moe_ops.scheme import (
    as_fp8,
    dequantize_weight,
    exact_fp8_scheme,
    exact_rows,
    formats,
    from_fp8,
)
from moe_ops.scheme.exact_fp8 import BINADES, NAN

NAME = "mxfp4_w4a8_token"
WIDE = "fp8:1x*:float32|fp4:1x64:e8m0"
FP4 = get_scheme(NAME).weight.element


@st.composite
def weights(draw, spans, scheme=None):
    """A weight of random bytes, some groups of which are zeros, and some scales not numbers."""
    scheme = scheme or draw(st.sampled_from((NAME, "mxfp4_w4a8", WIDE)))
    experts, n = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    k, span = draw(st.sampled_from((2, 32, 40, 96, 130, 704, 2880))), draw(spans)
    low = draw(st.integers(0, 254 - span))
    g = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    shape = get_scheme(scheme).weight.weight_scale_shape(experts, n, k)
    data = torch.randint(0, 256, (experts, n, k // 2), generator=g, dtype=torch.uint8)
    scale = low + torch.randint(0, span + 1, shape, generator=g, dtype=torch.uint8)
    bytes_of = get_scheme(scheme).weight.group.cols // 2
    if draw(st.booleans()):  # zeros of both signs, below scales that mean nothing
        zero = torch.rand(shape, generator=g) < 0.3
        data &= torch.where(zero, 0x88, 0xFF).repeat_interleave(bytes_of, 2)[..., : k // 2].byte()
        scale = torch.where(zero, torch.randint(0, NAN, shape, generator=g), scale).byte()
    if draw(st.booleans()):
        scale[torch.rand(shape, generator=g) < 0.05] = NAN
    return QTensor(data, scale), scheme


def numbers(q, scheme):
    """In float64, which holds all of them."""
    cols, k = get_scheme(scheme).weight.group.cols, 2 * q.data.shape[2]
    powers = torch.where(q.scale == NAN, torch.nan, (q.scale.double() - 127).exp2())
    codes = formats.code_values(formats.split_nibbles(q.data, 2), FP4).double()
    return codes * powers.repeat_interleave(cols, 2)[..., :k]


def fits(row):
    """Whether any power of two makes a row e4m3 numbers."""
    powers = torch.arange(-140.0, 131.0, dtype=torch.float64).exp2()[:, None]
    scaled = row / powers
    stored = scaled.clamp(-448, 448).to(torch.float8_e4m3fn).double()
    return bool((stored == scaled).all(1).any())


@given(weights(st.integers(0, 20)))
def test_rows_are_exact_or_refused(drawn):
    q, scheme = drawn
    exact, target = exact_rows(q, scheme), exact_fp8_scheme(get_scheme(scheme))
    assert exact.dtype == torch.bool and exact.shape == q.data.shape[:2]
    assert not exact[(q.scale == NAN).any(2)].any()
    if not exact.all():
        expert, row = (~exact).nonzero()[0].tolist()
        with pytest.raises(ValueError, match=f"binades.* in row {row} of expert {expert}"):
            as_fp8(q, scheme)
        q = QTensor(*(x[exact][None] for x in q[:2]))
    if exact.any():
        held = as_fp8(q, scheme)
        shape = target.weight.weight_scale_shape(*held.data.shape)
        assert held.data.dtype == torch.float8_e4m3fn and held.data.shape[2] == 2 * q.data.shape[2]
        assert held.scale.dtype == torch.float32 and held.scale.shape == shape
        assert (held.scale >= 2.0**-126).all() and (held.scale.frexp().mantissa == 0.5).all()
        expected = numbers(q, scheme)
        assert_same_bits([held.data.double() * held.scale.double()], [expected])
        assert_same_bits([dequantize_weight(held, target)], [dequantize_weight(q, scheme)])
        assert_same_bits(from_fp8(held, q.scale, scheme), q)


@pytest.mark.parametrize("low", [0, 1, 7, 100, 230])
def test_no_other_power_of_two_would_do(low):
    """A row each with two groups, which hold 0.5 and -6, 0 to 20 binades apart."""
    spans = torch.arange(21)
    codes = torch.zeros(1, 21, 64, dtype=torch.uint8)
    codes[..., 0::32], codes[..., 5::32] = 1, 15
    scale = torch.stack((low + spans, torch.full((21,), low)), 1)[None].byte()
    for q in (
        QTensor(formats.join_nibbles(codes, 2), x.contiguous()) for x in (scale, scale.flip(2))
    ):
        exact = exact_rows(q, NAME)[0]
        assert exact.tolist() == (spans < BINADES).tolist()
        assert exact.tolist() == [fits(row) for row in numbers(q, NAME)[0]]


@pytest.mark.parametrize("zero", [0x00, 0x88, 0x80])
@pytest.mark.parametrize("other", [0, 254])
def test_zeros_have_no_scale(zero, other):
    """Zeros of both signs, in a group of its own; a number of 0.5 there would count."""
    data = torch.full((1, 2, 32), zero, dtype=torch.uint8)
    data[..., :16] = 0x1F  # -6 and 0.5
    data[0, 1, 20] = 0x10
    q = QTensor(data, torch.tensor([[[127, other]] * 2], dtype=torch.uint8))
    assert exact_rows(q, NAME).tolist() == [[True, False]]
    q = QTensor(*(torch.stack([x[0, :1]]) for x in q[:2]))
    held = as_fp8(q, NAME)
    assert_same_bits([held.data.double() * held.scale.double()], [numbers(q, NAME)])
    assert_same_bits(from_fp8(held, q.scale, NAME), q)


def test_weights_that_were_quantized():
    """Rows of normal numbers are exact, and so are those of zeros."""
    w = torch.randn(2, 96, 2880, generator=torch.Generator().manual_seed(0)) / 50
    q = quantize_weight(w, NAME)
    assert exact_rows(q, NAME).all()
    assert_same_bits(from_fp8(as_fp8(q, NAME), q.scale, NAME), q)
    assert exact_rows(quantize_weight(torch.zeros(1, 3, 64), NAME), NAME).all()


def test_schemes_that_have_the_form():
    found = {name: exact_fp8_scheme(scheme) for name, scheme in SCHEMES.items()}
    assert {name for name, scheme in found.items() if scheme} == {NAME, "mxfp4_w4a8"}
    assert found[NAME] == get_scheme("fp8_channel")
    assert found["mxfp4_w4a8"].quants == (
        get_scheme("fp8_tensor_static").activation, get_scheme("fp8_channel").weight,
    )  # fmt: skip
    assert exact_fp8_scheme(get_scheme(WIDE)) == get_scheme("fp8_channel")


def test_strides():
    q = quantize_weight(torch.randn(2, 64, 96), NAME)
    strided = QTensor(q.data.mT.contiguous().mT, q.scale.mT.contiguous().mT)
    held = as_fp8(strided, NAME)
    assert_same_bits(held, as_fp8(q, NAME))
    held = held._replace(data=held.data.mT.contiguous().mT)
    assert_same_bits(from_fp8(held, strided.scale, NAME)[:1], q[:1])


def test_errors():
    q = quantize_weight(torch.randn(2, 4, 64), NAME)
    held = as_fp8(q, NAME)
    with pytest.raises(NotImplementedError, match="e2m1 weights.*got mxfp4_w4a16"):
        as_fp8(q, "mxfp4_w4a16")
    with pytest.raises(TypeError, match="q must be a QTensor"):
        exact_rows(q.data, NAME)
    with pytest.raises(TypeError, match="q.data"):
        exact_rows(held, NAME)
    with pytest.raises(ValueError, match=r"q.scale must have shape \(2, 4, 2\)"):
        as_fp8(q._replace(scale=q.scale[..., :1]), NAME)
    with pytest.raises(ValueError, match=r"exponents must have shape \(2, 4, 2\)"):
        from_fp8(held, q.scale[:1], NAME)
    with pytest.raises(TypeError, match="q.data"):
        from_fp8(q, q.scale, NAME)
    other = held.data.view(torch.uint8).clone()
    other[1, 2, 3] ^= 1  # more significant bits than e2m1 has
    with pytest.raises(ValueError, match="got others in expert 1"):
        from_fp8(held._replace(data=other.view(torch.float8_e4m3fn)), q.scale, NAME)
    for factor in (1.25, -1):
        scale = held.scale.clone()
        scale[1, 2] *= factor
        with pytest.raises(ValueError, match="powers of two .*got -?[0-9.]+ in row 2 of expert 1"):
            from_fp8(held._replace(scale=scale), q.scale, NAME)
