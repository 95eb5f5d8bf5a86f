"""NaN and negative numbers in e4m3, as the references have them: in rows, weights and scales."""

import pytest
import torch
from conftest import HAS_CUDA, INTERPRETED
from decoded_gemms import quantized_rows
from e4m3_numbers import NANS, assert_same_nans, negated, with_byte
from gemm_rows import exact_rows
from plans import planned, row_tile
from products import weight_of

from moe_ops import dequantize_weight, get_scheme, ops, quantize_weight
from moe_ops.pipeline.row_spaces import depends_on_batch
from moe_ops.reference import expert_product as reference
from moe_ops.reference.expert_dgrad import expert_dgrad as dgrad_reference
from moe_ops.scheme import SCHEMES, dequantize_rows

if INTERPRETED:
    from moe_ops.kernels._gemm import dequantize

pytestmark = pytest.mark.kernel

CONVERTS = not HAS_CUDA or torch.cuda.get_device_capability() >= (8, 9)
"""Whether the GPU has conversions from e4m3; the interpreter has them."""
EXPERTS, N, K, TOKENS = 3, 40, 96, 7
WITH_ROWS = [
    name
    for name, scheme in SCHEMES.items()
    if scheme.activation is not None
    and torch.float8_e4m3fn in (scheme.activation.dtype, scheme.activation.scale_dtype)
    and not depends_on_batch(scheme.activation)
]
WITH_SCALES = ["nvfp4_w4a16", "nvfp4", "int4_w4a8_g32"]
"""Schemes whose weights have e4m3 scales."""
WITH_WEIGHTS = ["fp8_w8a16", "fp8_w8a16_block128", "mxfp8"]
"""Schemes whose weights are e4m3 numbers that kernels dequantize by their bits."""


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def operands(scheme, dtype=torch.bfloat16):
    """Rows as the scheme stores them, their scales, a weight and the experts of the rows."""
    x, quant = random(TOKENS, K).to(dtype), get_scheme(scheme).activation
    rows = (x, None) if quant is None else quantized_rows(x, quant)[:2]
    ids = torch.arange(TOKENS, dtype=torch.int32)[:, None] % EXPERTS
    return rows, quantize_weight(random(EXPERTS, N, K, seed=1).to(dtype), scheme), ids


def products(rows, q, ids, scheme, device, tile=None):
    """What the operator returns, and what the reference does."""
    dtype = torch.bfloat16 if get_scheme(scheme).activation else rows[0].dtype

    def on(tensors, where):
        return (None if t is None else t.to(where) for t in tensors)

    with row_tile(tile):
        plan = planned(ids.to(device), None, EXPERTS, scheme)
        results = []
        for leg, where in ((ops, device), (reference, "cpu")):
            weight, tiles = weight_of(type(q)(*on(q, where))), [*on(plan, where)]
            call = (*on(rows, where), weight, None, tiles, 1, scheme, dtype)
            results.append(leg.expert_product(*call).cpu())
    return results


def check(rows, q, ids, scheme, actual, expected):
    """NaN where the reference has it; the other numbers are within the reference's budget."""
    data, scale = rows
    numbers = data if scale is None else dequantize_rows(data, scale, get_scheme(scheme).activation)
    stored = data.dtype if scale is None else None  # the dtype that weights are rounded to
    weight = dequantize_weight(q, scheme).double().nan_to_num()
    exact = exact_rows(numbers.double().nan_to_num(), weight, None, None, ids, 1, stored=stored)
    assert_same_nans(actual, exact.rounded(actual.dtype), expected)


@pytest.mark.parametrize("tile", [16, 128])
@pytest.mark.parametrize("scheme", WITH_ROWS)
def test_a_nan_or_an_infinity_stays_in_its_row(scheme, tile, device):
    rows, q, ids = operands(scheme)
    plain, _ = products(rows, q, ids, scheme, device, tile)
    x = random(TOKENS, K).bfloat16()
    x[1, 37], x[2, 5], x[4, 90] = torch.nan, torch.inf, -torch.nan
    rows = quantized_rows(x, get_scheme(scheme).activation)[:2]
    actual, expected = products(rows, q, ids, scheme, device, tile)
    assert actual[[1, 4]].isnan().all() and not plain.isnan().any()
    check(rows, q, ids, scheme, actual, expected)
    others = [0, 3, 5, 6]
    assert torch.equal(actual[others], plain[others])


OLDER = pytest.param(
    False, marks=pytest.mark.skipif(not INTERPRETED, reason="of other GPUs"), id="older"
)


@pytest.fixture(params=[pytest.param(True, id="newer"), OLDER])
def converts(request, monkeypatch):
    """Whether kernels convert e4m3 numbers as GPUs that have instructions for it."""
    if not request.param:
        monkeypatch.setattr(dequantize, "converts_e4m3", lambda: False)
    return request.param and CONVERTS


@pytest.mark.usefixtures("converts")
@pytest.mark.parametrize("byte", NANS)
def test_scales_of_rows(byte, device):
    """Negative ones, and one that is NaN."""
    (rows, scale), q, ids = operands("nvfp4")
    scale = with_byte(negated(scale), (3, 2), byte)
    actual, expected = products((rows, scale), q, ids, "nvfp4", device)
    check((rows, scale), q, ids, "nvfp4", actual, expected)
    assert expected.isnan().sum() == N


@pytest.mark.parametrize("tile", [16, 64])
@pytest.mark.parametrize("scheme", WITH_SCALES)
def test_scales_of_weights(scheme, tile, converts, device):
    """Negative ones, and two that are NaN: in a column of an expert each.

    Where no instruction converts them, NaN is read as 480.
    """
    rows, q, ids = operands(scheme)
    scale = with_byte(with_byte(negated(q.scale), (0, 5, 1), NANS[0]), (1, 9, 0), NANS[1])
    q = q._replace(scale=scale)
    actual, expected = products(rows, q, ids, scheme, device, tile)
    if not converts:
        assert actual.isfinite().all()
        actual = torch.where(expected.isnan(), torch.nan, actual)
    check(rows, q, ids, scheme, actual, expected)
    assert expected.isnan().nonzero().tolist() == [
        [row, 5 if row % EXPERTS == 0 else 9] for row in range(TOKENS) if row % EXPERTS != 2
    ]


def test_negative_scales_are_negative_numbers(device):
    """To the bit: the same product has numbers of other signs and positive scales."""
    rows, q, ids = operands("nvfp4_w4a16")
    flipped = q._replace(scale=negated(q.scale))
    sign = (flipped.scale.view(torch.uint8) ^ q.scale.view(torch.uint8)).repeat_interleave(8, 2)
    data = q.data ^ (sign | sign >> 4)
    actual, _ = products(rows, flipped, ids, "nvfp4_w4a16", device)
    expected, _ = products(rows, q._replace(data=data), ids, "nvfp4_w4a16", device)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("scheme", WITH_WEIGHTS)
def test_weights_that_are_nan(scheme, dtype, device):
    """Kernels read them as 480, which spoils their own column alone."""
    rows, q, ids = operands(scheme, dtype)
    data = with_byte(with_byte(q.data, (0, 5, 40), NANS[0]), (1, 9, 41), NANS[1])
    q = q._replace(data=data)
    actual, expected = products(rows, q, ids, scheme, device)
    assert expected.isnan().any(0).nonzero().flatten().tolist() == [5, 9]
    assert actual.isfinite().all() == (HAS_CUDA or INTERPRETED)
    check(rows, q, ids, scheme, torch.where(expected.isnan(), torch.nan, actual), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_number_is_exact(dtype, device):
    """One token for each column of K, with a single one: the product is the weight itself."""
    scheme, codes = "fp8_w8a16", torch.arange(256).view(1, 16, 16).to(torch.uint8)
    codes[codes & 0x7F == 0x7F] = 0
    q = quantize_weight(torch.ones(1, 16, 16, dtype=dtype), scheme)
    q = q._replace(data=codes.view(q.data.dtype), scale=torch.ones_like(q.scale))
    x, ids = torch.eye(16, dtype=dtype), torch.zeros(16, 1, dtype=torch.int32)
    plan = planned(ids.to(device), None, 1, scheme)
    weight = weight_of(type(q)(*(None if t is None else t.to(device) for t in q)))
    call = (x.to(device), None, weight, None, [*plan], 1, scheme, dtype)
    actual = ops.expert_product(*call).cpu()
    assert torch.equal(actual.float().t(), dequantize_weight(q, scheme)[0])


def test_gradients_of_rows(converts, device):
    """The transposed product reads the same scales."""
    scheme = "nvfp4_w4a16"
    _, q, ids = operands(scheme)
    q = q._replace(scale=with_byte(negated(q.scale), (1, 9, 2), NANS[0]))
    dy, plan = random(TOKENS, N, seed=3).bfloat16(), planned(ids, None, EXPERTS, scheme).plan
    moved = (None if t is None else t.to(device) for t in (dy, *q))
    actual = ops.expert_dgrad(*moved, [plan.to(device), None, None], 1, scheme).cpu()
    expected = dgrad_reference(dy, *q, [plan, None, None], 1, scheme)
    weight = dequantize_weight(q, scheme).double().nan_to_num()
    exact = torch.stack([d @ weight[e] for d, e in zip(dy.double(), ids[:, 0], strict=True)])
    if not converts:
        actual = torch.where(expected.isnan(), torch.nan, actual)
    assert_same_nans(actual, exact, expected)
    assert expected.isnan().sum() == 16 * len(range(1, TOKENS, EXPERTS))
