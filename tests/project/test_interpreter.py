"""The mended interpreter converts and multiplies as the GPU does; on a GPU the same must hold."""

import functools
import operator

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from conftest import INTERPRETED
from triton.runtime import interpreter

pytestmark = pytest.mark.kernel


@triton.jit
def _convert(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i).to(out.dtype.element_ty))


@triton.jit
def _dot(a, b, out, N: tl.constexpr):
    i = tl.arange(0, N)
    at = i[:, None] * N + i[None, :]
    tl.store(out + at, tl.dot(tl.load(a + at), tl.load(b + at)))


@triton.jit
def _dot_ieee(a, b, out, N: tl.constexpr):
    i = tl.arange(0, N)
    at = i[:, None] * N + i[None, :]
    tl.store(out + at, tl.dot(tl.load(a + at), tl.load(b + at), input_precision="ieee"))


@triton.jit
def _arithmetic(a, b, out, N: tl.constexpr):
    i = tl.arange(0, N)
    x, y = tl.load(a + i), tl.load(b + i)
    tl.store(out + i, x * y + x)
    tl.store(out + N + i, tl.where(x > y, x, y))


@triton.jit
def _extremes(a, b, out, N: tl.constexpr):
    i = tl.arange(0, N)
    x, y = tl.load(a + i), tl.load(b + i)
    tl.store(out + i, tl.maximum(x, y))
    tl.store(out + N + i, tl.minimum(x, y))
    tl.store(out + 2 * N + i, tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def _first_largest(a, i, b, j):
    later = (b > a) | ((b == a) & (j < i))
    return tl.where(later, b, a), tl.where(later, j, i)


@triton.jit
def _reductions(x, value, place, bits, everything, A: tl.constexpr, B: tl.constexpr):
    a, b = tl.arange(0, A)[:, None], tl.arange(0, B)[None, :]
    tile = tl.load(x + a * B + b)
    largest, where = tl.reduce((tile, a * B + b), 1, _first_largest)
    tl.store(value + tl.arange(0, A), largest)
    tl.store(place + tl.arange(0, A), where)
    whole = tile.to(tl.int32)
    tl.store(bits + b, tl.xor_sum(whole, 0, keep_dims=True))
    tl.store(everything, tl.xor_sum(whole))


@triton.jit
def _constants_first(out, N: tl.constexpr):
    i = tl.arange(0, N)
    COUNT: tl.constexpr = i.shape[0]
    tl.store(out + i, COUNT - 1 - i)
    tl.store(out + N + i, i, mask=(i < COUNT) & (tl.max(i) > 0))  # a mask of a number too


def numbers(n=1024):
    """Both signs, subnormals of fp8, halfway cases and values past its largest."""
    g = torch.Generator().manual_seed(0)
    spread = torch.exp2(torch.rand(n, generator=g) * 20 - 10)
    value = torch.where(torch.rand(n, generator=g) < 0.5, -spread, spread)
    value[:8] = torch.tensor([0.0, 448.0, 464.0, 500.0, -1e4, 1.9993, 2.0**-9, 1.00390625])
    return value


@triton.jit
def _types(out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.static_assert((i + 3).dtype == tl.int32)
    tl.static_assert((3 + i).dtype == tl.int32)
    tl.static_assert((i.to(tl.int64) + 4294967296).dtype == tl.int64)
    tl.static_assert((i.to(tl.int64) & 3).dtype == tl.int64)
    tl.static_assert((i.to(tl.uint8) + 3).dtype == tl.uint8)
    tl.static_assert((i + i.to(tl.int64)).dtype == tl.int64)
    tl.static_assert((i * 0.5).dtype == tl.float32)
    tl.static_assert((i.to(tl.float16) * 2).dtype == tl.float16)
    tl.static_assert((i.to(tl.float16) / 2).dtype == tl.float32)
    tl.static_assert((i.to(tl.bfloat16) * i.to(tl.float32)).dtype == tl.float32)
    at = i[:, None] * N + i[None, :]
    tl.store(out + at, (at + 1) * (i == 2)[:, None])
    tl.store(out + N * N + at, tl.where(i[None, :] < 3, at - 1, 7))
    tl.store(out + 2 * N * N + at, (1 - i)[:, None] + i[None, :])


@pytest.fixture
def run_device(device):
    if device == "cpu" and not triton.knobs.runtime.interpret:
        pytest.skip("runs kernels: on a GPU or in the interpreter")
    return device


@pytest.mark.parametrize(
    ("dtype", "largest"),
    [
        (torch.bfloat16, None),
        (torch.float16, None),
        (torch.float8_e4m3fn, 448),
        (torch.float8_e5m2, 57344),
    ],
)
def test_conversions(dtype, largest, run_device):
    x = numbers()
    expected = (x if largest is None else x.clamp(-largest, largest)).to(dtype)
    out = torch.empty(1024, dtype=dtype, device=run_device)
    _convert[(1,)](x.to(run_device), out, N=1024)
    assert torch.equal(out.cpu().float(), expected.float())
    back = torch.empty(1024, device=run_device)
    _convert[(1,)](out, back, N=1024)
    assert torch.equal(back.cpu(), expected.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dot(dtype, run_device):
    a, b = (
        torch.randn(32, 32, generator=torch.Generator().manual_seed(s)).to(dtype) for s in (0, 1)
    )
    out = torch.empty(32, 32, device=run_device)
    _dot[(1,)](a.to(run_device), b.to(run_device), out, N=32)
    torch.testing.assert_close(out.cpu(), a.float() @ b.float(), rtol=1e-5, atol=1e-5)


def test_dot_of_float32_is_tf32_unless_it_asks(run_device):
    a = torch.eye(32, device=run_device)
    b = torch.full((32, 32), 1 + 2.0**-20, device=run_device)
    for kernel, expected in ((_dot, torch.ones_like(b)), (_dot_ieee, b)):
        out = torch.empty_like(b)
        kernel[(1,)](a, b, out, N=32)
        assert torch.equal(out, expected)


def test_bf16_arithmetic_and_comparison(run_device):
    a, b = numbers().to(torch.bfloat16), numbers().flip(0).to(torch.bfloat16)
    out = torch.empty(2, 1024, dtype=torch.bfloat16, device=run_device)
    _arithmetic[(1,)](a.to(run_device), b.to(run_device), out, N=1024)
    rounded_once = (a.double() * b.double() + a.double()).to(torch.bfloat16)
    rounded_twice = a * b + a
    result = out.cpu()
    assert ((result[0] == rounded_once) | (result[0] == rounded_twice)).all()
    assert torch.equal(result[1], torch.maximum(a, b))


def test_extremes_of_nan(run_device):
    """Extremes of a NaN and a number are the number, unless NaN is asked for."""
    values = torch.tensor([torch.nan, -torch.nan, torch.inf, -torch.inf, 0.0, 2.5])
    a, b = (x.flatten()[:32] for x in torch.meshgrid(values, values, indexing="ij"))
    out = torch.empty(3, 32, device=run_device)
    _extremes[(1,)](a.to(run_device), b.to(run_device), out, N=32)
    expected = torch.stack([torch.fmax(a, b), torch.fmin(a, b), torch.maximum(a, b)])
    assert torch.equal(out.cpu().nan_to_num(99.0), expected.nan_to_num(99.0))


def test_reductions_by_any_function(run_device):
    """Reductions of one value and of two, along an axis and of everything."""
    x = torch.randint(0, 5, (8, 16), generator=torch.Generator().manual_seed(0)).float()
    value, place, bits, everything = (torch.empty(n) for n in (8, 8, 16, 1))
    found = [value, *(t.int() for t in (place, bits, everything))]
    found = [t.to(run_device) for t in found]
    _reductions[(1,)](x.to(run_device), *found, A=8, B=16)
    value, place, bits, everything = (t.cpu() for t in found)
    assert torch.equal(value, x.amax(1))
    assert torch.equal(place, (x.argmax(1) + torch.arange(8) * 16).int())
    columns = [functools.reduce(operator.xor, column) for column in x.int().T.tolist()]
    assert bits.tolist() == columns
    assert everything.item() == functools.reduce(operator.xor, columns)


def test_a_constant_and_a_tensor_make_a_tensor(run_device):
    out = torch.empty(2, 8, dtype=torch.int32, device=run_device)
    _constants_first[(1,)](out, N=8)
    assert out.tolist() == [[*range(7, -1, -1)], [*range(8)]]


def test_types_of_numbers_and_shapes_of_sums(run_device):
    out = torch.empty(3, 4, 4, dtype=torch.int32, device=run_device)
    _types[(1,)](out, N=4)
    i, at = torch.arange(4), torch.arange(16).view(4, 4)
    assert torch.equal(out[0].cpu(), ((at + 1) * (i == 2)[:, None]).int())
    assert torch.equal(out[1].cpu(), torch.where(i < 3, at - 1, 7).int())
    assert torch.equal(out[2].cpu(), ((1 - i)[:, None] + i).int())


@pytest.mark.skipif(not INTERPRETED, reason="a GPU checks no address")
@pytest.mark.parametrize(
    "x, out",
    [
        (torch.zeros(3), torch.zeros(4)),
        (torch.zeros(8)[::2], torch.zeros(4)),
        (torch.zeros(4), torch.zeros(3)),
        (torch.zeros(5, 0), torch.zeros(4)),
    ],
    ids=["past the end", "between elements", "stored past the end", "of no element"],
)
def test_no_access_leaves_its_tensor(x, out):
    with pytest.raises(Exception, match="leaves its"):
        _convert[(1,)](x, out, N=4)


@pytest.mark.skipif(not INTERPRETED, reason="handles are the interpreter's")
def test_numbers_are_no_wider_than_their_type():
    handle = interpreter.TensorHandle
    types = ((tl.int1, np.int16), (tl.int32, np.int64), (tl.bfloat16, np.float32))
    for dtype, wide in (*types, (tl.float8e4nv, np.float16)):
        with pytest.raises(ValueError, match="exceeds dtype primitive_bitwidth"):
            handle(np.zeros(2, wide), dtype)
    assert handle(np.zeros(2, bool), tl.int1).dtype is tl.int1
