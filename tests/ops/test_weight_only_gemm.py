"""Expert GEMMs of which only the weights are quantized, against float64 on dequantized weights."""

import plans
import pytest
import torch
from conftest import INTERPRETED
from gemm_rows import exact_rows, gemm_problem
from hypothesis import given
from hypothesis import strategies as st
from pairwise import half_exhaustive
from plans import bias_of, planned, row_tile, whole_numbers
from products import stored_product, stored_sum
from strategies import ACTIVATIONS, DTYPES

from moe_ops import SCHEMES, dequantize_weight, get_scheme, ops, quantize_weight
from moe_ops.activation import formula
from moe_ops.dispatch.tiles import ROW_TILES
from moe_ops.reference import expert_product as reference
from moe_ops.reference.slots import local_experts
from moe_ops.tensors import QTensor, Tiles
from moe_ops.testing import Problem, assert_matches_reference, make_inputs

pytestmark = pytest.mark.kernel

NAMED = [n for n, s in SCHEMES.items() if s.weight is not None and s.activation is None]
MORE = ["int4_w4a16_g16", "int4_w4a16_g64_zp", "int8_w8a16_g32_zp", "fp8_w8a16_block16x32"]


def check(problem, q, scheme, device, activation=None, scaled=False, tile=None):
    """The operator (with an activation, or without) is within the budget of its reference.

    ``tile``: the row tile; None: as the load asks for.
    """
    x, w, _, weights, ids, expert_map, bias, _ = make_inputs(problem)
    local, k = w.shape[0], problem.top_k
    weights = weights if scaled else None

    def on(t):
        return None if t is None else t.to(device)

    head, tail = (x, *q, bias, weights), (k, scheme)
    rows = exact_rows(x, dequantize_weight(q, scheme), bias, weights, ids, k, expert_map, x.dtype)
    if activation is not None:
        tail = (*tail, activation)
        rows = rows.activated(formula(activation))
    with row_tile(tile, portable_only=tile is not None):
        plan = planned(on(ids), on(expert_map), local, scheme)
        actual = stored_product(ops, *map(on, head), [*plan], *tail)
        expected = stored_product(reference, *head, plans.on(plan, "cpu"), *tail)
    mine = local_experts(ids, expert_map, local) >= 0
    rows = rows.rounded(x.dtype)
    assert_matches_reference(actual.cpu()[mine], rows[mine], expected[mine])
    return actual


@given(
    scheme=st.sampled_from([*NAMED, *MORE]),
    tokens=st.sampled_from((0, 1, 5, 40)),
    k=st.integers(1, 3),
    n=st.sampled_from((8, 49, 130)),
    kk=st.sampled_from((16, 40, 130, 258)),
    dtype=st.sampled_from(DTYPES),
    tile=st.sampled_from(ROW_TILES),
    has_bias=st.booleans(),
    scaled=st.booleans(),
    local=st.sampled_from((None, 3)),
    routing=st.sampled_from(("uniform", "skewed", "holes")),
)
def test_gemm(scheme, tokens, k, n, kk, dtype, tile, has_bias, scaled, local, routing, device):
    problem = gemm_problem(tokens, k, kk, n, dtype, has_bias=has_bias, routing=routing,
                           num_local_experts=local)  # fmt: skip
    q = quantize_weight(make_inputs(problem).w1, scheme)
    actual = check(problem, q, scheme, device, scaled=scaled, tile=tile)
    assert actual.shape == (tokens * k, n) and actual.dtype == dtype


@pytest.mark.parametrize(
    ("scheme", "dtype"), half_exhaustive([*NAMED, *MORE], DTYPES, where=INTERPRETED)
)
def test_every_scheme_with_a_gate(scheme, dtype, device):
    problem = Problem(9, 4, 2, 144, 34, dtype, "silu", has_bias=True)
    q = quantize_weight(make_inputs(problem).w1, scheme)
    check(problem, q, scheme, device, "silu", scaled=True)


@pytest.mark.parametrize(
    ("activation", "scheme"),
    half_exhaustive(ACTIVATIONS, ["int4_w4a16_g32_zp", "mxfp4_w4a16"], where=INTERPRETED),
)
def test_fused_activation(activation, scheme, device):
    problem = Problem(20, 4, 2, 72, 70, torch.bfloat16, activation, has_bias=True)
    q = quantize_weight(make_inputs(problem).w1, scheme)
    check(problem, q, scheme, device, activation)


@pytest.mark.parametrize("tile", ROW_TILES)
@pytest.mark.parametrize("scheme", ["int4_w4a16_g128", "nvfp4_w4a16", "fp8_w8a16", "int8_w8a16"])
def test_every_row_tile(scheme, tile, device):
    problem = gemm_problem(40 if INTERPRETED else 300, 1, 256, 128, torch.bfloat16)
    q = quantize_weight(make_inputs(problem).w1, scheme)
    check(problem, q, scheme, device, tile=tile)


@pytest.mark.parametrize("activation", [None, "silu", "swigluoai"])
@pytest.mark.parametrize("scheme", ["fp8_w8a16", "int8_w8a16", "nvfp4_w4a16"])
def test_scales_of_experts_and_of_halves(scheme, activation, device):
    problem = Problem(20, 4, 2, 80, 24, torch.bfloat16, activation or "silu")
    q = quantize_weight(make_inputs(problem).w1, scheme)
    for shape in ((4,), (4, 2)):
        some = torch.rand(shape) / 8 + 0.01
        field = "global_scale" if get_scheme(scheme).weight.global_scale else "scale"
        check(problem, q._replace(**{field: some}), scheme, device, activation)


@pytest.mark.parametrize("scheme", ["int4_w4a16_g32_zp", "fp8_w8a16_block128", "int8_w8a16"])
def test_strided_weights_and_rows(scheme, device):
    """Unit stride along rows instead of K, experts that lie apart, and an odd first byte."""
    problem = gemm_problem(6, 2, 64, 48, torch.bfloat16)
    q = quantize_weight(make_inputs(problem).w1, scheme)
    data = q.data.view(torch.uint8)
    apart = torch.cat([data, data])[: len(data)]
    odd = torch.cat([data.new_zeros(1), data.flatten()])[1:].view(data.shape)
    for other in (data.transpose(1, 2).contiguous().transpose(1, 2), apart, odd):
        other = other.view(q.data.dtype)
        check(problem, q._replace(data=other), scheme, device)


@pytest.mark.parametrize("magnitude", [1e-4, 1.0, 300.0])
@pytest.mark.parametrize("scheme", NAMED)
def test_small_and_large_weights(scheme, magnitude, device):
    """Scales far from one: no factor overflows or vanishes on the way."""
    problem = gemm_problem(5, 2, 64, 32, torch.bfloat16)
    q = quantize_weight(make_inputs(problem).w1 * magnitude, scheme)
    check(problem, q, scheme, device)


def every_code(scheme):
    """A weight (1, 256 / step, 16) that stores every code, with scales of one."""
    quant = get_scheme(scheme).weight
    codes = torch.arange(256).view(16, 16).to(torch.uint8)
    if quant.element.name == "fp8":
        codes[codes & 0x7F == 0x7F] = 0  # NaN
    if quant.element.bits == 6:
        codes %= 64
    scale = torch.ones(quant.weight_scale_shape(1, 16, 16 * quant.element.values_per_byte))
    return QTensor(codes[None].view(quant.dtype), scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "scheme",
    [
        "fp8_w8a16",
        "int8_w8a16",
        "int4_w4a16_channel",
        "int8_w8a16_g64",
        "mxfp4_w4a16",
        "mxfp6_e2m3",
        "mxfp6_e3m2",
    ],
)
def test_every_code_is_exact(scheme, dtype, device):
    """One token for each column of K, with a single one: the product is the weight itself."""
    q, quant = every_code(scheme), get_scheme(scheme).weight
    if quant.scale == "e8m0":
        q = q._replace(scale=torch.full_like(q.scale, 127, dtype=torch.uint8))
    k = q.data.shape[2] * quant.element.values_per_byte
    x, ids = (
        torch.eye(k, dtype=dtype).to(device),
        torch.zeros(k, 1, dtype=torch.int32, device=device),
    )
    plan = planned(ids, None, 1, scheme)
    stored = (t if t is None else t.to(device) for t in q)
    rows = stored_product(ops, x, *stored, None, None, [*plan], 1, scheme)
    assert torch.equal(rows.cpu().float().t(), dequantize_weight(q, scheme)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scheme", ["int8_w8a16", "int4_w4a16_g32", "mxfp4_w4a16"])
def test_whole_numbers_are_rounded_once(scheme, dtype, device):
    """Sums are exact, so every bit is known: see the test of this name of the plain GEMM."""
    most = 2100 if dtype == torch.float32 else 16
    x, bias = whole_numbers(64, 6, most=most).to(dtype).t(), bias_of(3, 20)
    ids = torch.tensor([[0, 2], [1, 0], [2, 1]]).repeat(2, 1).int()
    fraction = 5.0 if dtype == torch.float32 else 1 + 2.0**-9  # more bits than bf16 has
    weights = torch.tensor([1.0, 2.0, 3.0, fraction]).repeat(3).view(6, 2)
    q = quantize_weight(whole_numbers(3, 20, 64, most=6, seed=1), scheme)
    if scheme == "int8_w8a16":
        q = q._replace(data=q.data // 8)
    if q.scale.is_floating_point():
        q = q._replace(scale=2.0 ** whole_numbers(*q.scale.shape, most=2, seed=2))
    weight = dequantize_weight(q, scheme).double()
    rows = exact_rows(x, weight, bias, weights, ids, 2, stored=x.dtype).value
    plan = planned(ids.to(device), None, 3, scheme)
    given = (t if t is None else t.to(device) for t in (x, *q, bias, weights))
    actual = stored_product(ops, *given, [*plan], 2, scheme)
    assert torch.equal(actual.cpu(), rows.float().to(dtype))


def test_errors(device):
    problem = gemm_problem(3, 1, 32, 8, torch.bfloat16)
    x, w, _, _, ids, *_ = make_inputs(problem, device)
    plan = planned(ids, None, 5)
    q = quantize_weight(w, "int4_w4a16_g32")
    rest = (None, None, [*plan], 1)
    with pytest.raises(ValueError, match="w_scale must be a Tensor"):
        stored_product(ops, x, q.data, None, None, None, *rest, "int4_w4a16_g32")
    with pytest.raises(ValueError, match="w_zero_point must be None"):
        stored_product(ops, x, q.data, q.scale, q.data, None, *rest, "int4_w4a16_g32")
    with pytest.raises(ValueError, match="w_global_scale must be None"):
        stored_product(ops, x, q.data, q.scale, None, q.scale, *rest, "int4_w4a16_g32")
    with pytest.raises(ValueError, match="w_global_scale must be a Tensor"):
        stored_product(ops, x, q.data, q.scale, None, None, *rest, "nvfp4_w4a16")
    with pytest.raises(ValueError, match="w_zero_point must be a Tensor"):
        stored_product(ops, x, q.data, q.scale, None, None, *rest, "int4_w4a16_g32_zp")
    with pytest.raises(TypeError, match="w must have dtype torch.uint8 for scheme int4_w4a16_g32"):
        stored_product(ops, x, q.data.view(torch.int8), *q[1:], *rest, "int4_w4a16_g32")
    q, weights = quantize_weight(w, "fp8_channel"), torch.ones(3, 1, device=device)
    with pytest.raises(ValueError, match="topk_weights must be None for scheme fp8_channel, whose"):
        stored_product(ops, x, *q, None, weights, *rest[2:], "fp8_channel")


def one_of_each(scheme, tokens, device, dtype=torch.bfloat16):
    """Arguments of `stored_sum`."""
    x, w, _, weights, ids, expert_map, bias, _ = make_inputs(
        gemm_problem(tokens, 2, 128, 96, dtype, has_bias=True, routing="holes", num_local_experts=3)
    )
    q = quantize_weight(w, scheme)
    plan = ops.plan_slots(ids, expert_map, len(w), scheme, dtype)
    h = x.repeat_interleave(2, 0)
    tiles = plans.on(Tiles(plan, ids, expert_map), device)
    given = (None if t is None else t.to(device) for t in (h, *q, bias, weights))
    return (*given, [*tiles], scheme)


@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize("scheme", NAMED)
def test_sum_is_that_of_the_products(scheme, tokens, device):
    """Bit by bit: plain weights have no kernel that also sums."""
    h, *q, bias, weights, tiles, _ = given = one_of_each(scheme, tokens, device)
    rows = stored_product(ops, h, *q, bias, None, tiles, 1, scheme)
    expected = ops.moe_fused_mul_sum(rows, weights, *tiles[1:], None, len(q[0]))
    actual = stored_sum(ops, *given)
    assert actual.shape == (tokens, 96) and torch.equal(actual, expected)


def test_errors_of_the_sum():
    h, *q, bias, weights, tiles, scheme = one_of_each("int8_w8a16", 1, "cpu")
    with pytest.raises(ValueError, match=r"tiles\[1\] must be topk_ids, got None"):
        stored_sum(ops, h, *q, bias, weights, [tiles[0], None, None], scheme)
    with pytest.raises(ValueError, match="w_scale must be a Tensor for scheme int8_w8a16"):
        stored_sum(ops, h, q[0], None, *q[2:], bias, weights, tiles, scheme)
    with pytest.raises(TypeError, match="w must have dtype torch.float8_e4m3fn for scheme fp8_ch"):
        stored_sum(ops, h, *q, bias, weights, tiles, "fp8_channel")
    with pytest.raises(ValueError, match="topk_weights"):
        stored_sum(ops, h, *q, bias, weights[:, :1], tiles, scheme)
