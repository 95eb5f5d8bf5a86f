"""Expert GEMMs that dequantize both operands, against float64 on the numbers they stand for."""

import plans
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plans import bias_of, planned, whole_numbers
from strategies import ACTIVATIONS, DTYPES

from moe_ops import dequantize_weight, get_scheme, ops, quantize_weight
from moe_ops.activation import formula
from moe_ops.dispatch.tiles import ROW_TILES
from moe_ops.reference import scaled_gemm as reference
from moe_ops.reference.slots import local_experts
from moe_ops.scheme import dequantize_rows
from moe_ops.tensors import Tiles
from moe_ops.testing import Bounded, Problem, assert_matches_reference, make_inputs

pytestmark = pytest.mark.kernel

NAMED = ("mxfp8", "mxfp4", "mxfp4_mxfp8", "mxfp4_w4a8", "nvfp4", "int4_w4a8_g128")
MORE = ("int4_w4a8_g32",)
GIVEN = torch.tensor([0.0123])


def exact_rows(x, w, bias, ids, k, expert_map):
    """``x @ w[e].T + bias`` in float64 for each slot; zeros where it is skipped."""
    expert = local_experts(ids, expert_map, w.shape[0])
    rows = Bounded.exactly(x.repeat_interleave(k, 0)).products(w, expert)
    return rows if bias is None else rows.plus(bias[expert])


def quantized_rows(x, quant):
    """Rows as they are stored, their scales, and in float64 what they stand for."""
    given_scale = GIVEN.to(x.device) if quant.static or quant.global_scale else None
    q, scale = ops.moe_quantize(x, given_scale, None, None, None, 0, quant.key)
    number = dequantize_rows(q.cpu(), scale.cpu(), quant).double()
    return q, scale, number


def check(problem, scheme, tiles, device, activation=None, halves=False):
    """The operator (with an activation, or without) is within the budget of its reference."""
    x, w, _, _, ids, expert_map, bias, _ = make_inputs(problem)
    local, k, quant = w.shape[0], problem.top_k, get_scheme(scheme)
    q = quantize_weight(w, scheme)
    if halves and quant.weight.global_scale and not quant.weight.channel_scale:
        q = q._replace(global_scale=torch.stack((q.global_scale, 2 * q.global_scale), 1))
    rows, scale, numbers = quantized_rows(x.to(device), quant.activation)

    def on(t):
        return None if t is None else t.to(device)

    plan = planned(on(ids), on(expert_map), tiles, local)
    head, tail = (q.data, q.scale, q.global_scale, bias), (tiles, k, scheme, x.dtype)
    weight = dequantize_weight(q, scheme).double()
    exact = exact_rows(numbers, weight, bias, ids, k, expert_map)
    if activation is not None:
        tail = (*tail, activation)
        exact = exact.activated(formula(activation))
    actual = ops.scaled_matmul(rows, scale, *map(on, head), *plan, *tail)
    there = (rows.cpu(), scale.cpu(), *head, *plans.on(plan, "cpu"), *tail)
    expected = reference.scaled_matmul(*there)
    mine = local_experts(ids, expert_map, local) >= 0
    exact = exact.rounded(x.dtype)
    assert_matches_reference(actual.cpu()[mine], exact[mine], expected[mine])
    return actual


def gemm_problem(tokens, k, kk, n, dtype, **more):
    return Problem(tokens, 5, k, kk, n, dtype, "silu_no_mul", **more)


@given(
    scheme=st.sampled_from((*NAMED, *MORE)),
    tokens=st.sampled_from((0, 1, 5, 40)),
    k=st.integers(1, 3),
    n=st.sampled_from((8, 49, 130)),
    kk=st.sampled_from((16, 40, 130, 258)),
    dtype=st.sampled_from(DTYPES),
    tile=st.sampled_from(ROW_TILES),
    has_bias=st.booleans(),
    local=st.sampled_from((None, 3)),
    routing=st.sampled_from(("uniform", "skewed", "holes")),
)
def test_gemm(scheme, tokens, k, n, kk, dtype, tile, has_bias, local, routing, device):
    more = dict(has_bias=has_bias, num_local_experts=local, routing=routing)
    check(gemm_problem(tokens, k, kk, n, dtype, **more), scheme, [tile], device)


@given(
    scheme=st.sampled_from((*NAMED, *MORE)),
    activation=st.sampled_from(ACTIVATIONS),
    tokens=st.sampled_from((1, 5, 40)),
    width=st.sampled_from((8, 49, 130)),
    kk=st.sampled_from((16, 40, 130)),
    dtype=st.sampled_from(DTYPES),
    has_bias=st.booleans(),
    halves=st.booleans(),
)
def test_gemm_act(scheme, activation, tokens, width, kk, dtype, has_bias, halves, device):
    """A gate and an up row have global scales of their own, or share one."""
    rule = formula(activation)
    n = 2 * width if rule.gated else width
    problem = gemm_problem(tokens, 2, kk, n, dtype, has_bias=has_bias)
    check(problem, scheme, list(ROW_TILES), device, activation, halves and rule.gated)


@pytest.mark.parametrize("scheme", NAMED)
@pytest.mark.parametrize("tile", [16, 128])
def test_every_scheme(scheme, tile, device):
    check(gemm_problem(20, 2, 290, 72, torch.bfloat16), scheme, [tile], device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("activation", [None, "relu2"])
@pytest.mark.parametrize("scheme", ["mxfp8", "mxfp4", "mxfp4_mxfp8", "mxfp4_w4a8"])
def test_whole_numbers_are_rounded_once(scheme, activation, dtype, device):
    """All scales are powers of two: sums are exact, so every bit is known, whoever adds."""
    ids, bias = torch.tensor([[0, 2], [1, 0], [2, 1]]).repeat(2, 1).int(), bias_of(3, 20)
    q, quant = quantize_weight(whole_numbers(3, 20, 96, most=6), scheme), get_scheme(scheme)
    given, factor = None, torch.ones(3)
    if quant.activation.static:  # one scale for each expert, as batched rows have them
        given, factor = torch.tensor([0.5], device=device), torch.tensor([1.0, 4.0, 0.5])
    x = whole_numbers(6, 96, most=6, seed=1).to(device, torch.bfloat16)
    rows, scale = ops.moe_quantize(x, given, None, None, None, 0, quant.activation.key)
    numbers = dequantize_rows(rows.cpu(), scale.cpu(), quant.activation).double()
    scale = scale.flatten() * factor.to(device) if quant.activation.static else scale
    exact = exact_rows(numbers, dequantize_weight(q, scheme).double(), None, ids, 2, None).value
    experts = local_experts(ids, None, 3)
    exact = (exact * factor[experts, None] + bias[experts]).float()
    if activation is not None:
        exact = exact[:, :10].clamp(min=0).square() * exact[:, 10:]
    plan = planned(ids.to(device), None, list(ROW_TILES), 3)
    weight = (t if t is None else t.to(device) for t in (q.data, q.scale, q.global_scale, bias))
    call = (rows, scale, *weight, *plan, list(ROW_TILES), 2, scheme, dtype)
    if activation is None:
        actual = ops.scaled_matmul(*call)
    else:
        actual = ops.scaled_matmul(*call, activation)
    assert torch.equal(actual.cpu(), exact.to(dtype))


def test_one_scale_for_each_expert(device):
    """Static scales of the Batched format are one an expert: each multiplies its own rows."""
    quant, local, count = get_scheme("mxfp4_w4a8"), 3, 4
    x, w = torch.randn(local, count, 64), torch.randn(local, 24, 64)
    q = quantize_weight(w, "mxfp4_w4a8")
    counts = torch.tensor([4, 1, 3], dtype=torch.int32, device=device)
    a, scale = ops.batched_quantize(x.to(device), GIVEN.to(device), counts, quant.activation.key)
    scale = scale * torch.tensor([1.0, 2.0, 3.0], device=device)[:, None, None]
    plan = Tiles(ops.plan_batched(counts, count, list(ROW_TILES)))
    weight, tail = (q.data, q.scale, None, None), (list(ROW_TILES), 1, "mxfp4_w4a8", x.dtype)
    call = (a.flatten(0, 1), scale.flatten(0, 1), *weight, *plan)
    y = ops.scaled_matmul(*(None if t is None else t.to(device) for t in call), *tail)
    reference_y = reference.scaled_matmul(*(None if t is None else t.cpu() for t in call), *tail)
    rows = Bounded.exactly((a.cpu().double() * scale.cpu()).flatten(0, 1))
    expert = torch.arange(local).repeat_interleave(count)
    exact = rows.products(dequantize_weight(q, quant), expert).rounded(x.dtype)
    used = (torch.arange(count) < counts.cpu()[:, None]).flatten()
    assert_matches_reference(y.cpu()[used], exact[used], reference_y[used])


def test_rows_must_be_stored(device):
    """The operator quantizes rows only of schemes whose stored values are multiplied."""
    x = torch.ones(2, 32, device=device)
    counts = torch.tensor([2], dtype=torch.int32, device=device)
    plan = Tiles(ops.plan_batched(counts, 2, [16]))
    for scheme, message in (
        ("mxfp4_w4a16", "scheme must quantize activations and weights"),
        ("mxfp8", "a must be rows as scheme mxfp8 stores them"),
    ):
        q = quantize_weight(torch.ones(1, 8, 32, device=device), scheme)
        call = (x, x[:, :1], q.data, q.scale, None, None, *plan, [16], 1, scheme, x.dtype)
        with pytest.raises(ValueError, match=message):
            ops.scaled_matmul(*call)


@pytest.mark.parametrize(("scheme", "rule"), [("nvfp4", "be a Tensor"), ("mxfp4", "be None")])
def test_global_scales_that_are_not_the_schemes(scheme, rule, device):
    x, q = torch.ones(2, 32, device=device), quantize_weight(torch.ones(1, 8, 32), scheme)
    plan = planned(torch.zeros(2, 1, device=device, dtype=torch.int32), None, [16], 1)
    wrong = None if q.global_scale is not None else torch.ones(1, device=device)
    call = (x, x[:, :1], q.data.to(device), q.scale.to(device), wrong, None, *plan, [16], 1, scheme)
    with pytest.raises(ValueError, match=f"w_global_scale must {rule}"):
        ops.scaled_matmul(*call, x.dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", NAMED)
def test_replay(scheme):
    """Captured once; a replay with other rows is bitwise what an eager call gives."""
    quant, dtype = get_scheme(scheme), torch.bfloat16
    w = torch.randn(8, 256, 512, device="cuda", dtype=dtype)
    q, ids = quantize_weight(w, scheme), torch.randint(0, 8, (64, 2), device="cuda").int()
    x = torch.randn(64, 512, device="cuda", dtype=dtype)
    given_scale = GIVEN.cuda() if quant.activation.static or quant.activation.global_scale else None

    def layer():
        plan = Tiles(ops.plan_slots(ids, None, ROW_TILES, 8), ids)
        rows = ops.moe_quantize(x, given_scale, None, None, None, 0, quant.activation.key)
        weight = (q.data, q.scale, q.global_scale, None)
        return ops.scaled_matmul(*rows, *weight, *plan, ROW_TILES, 2, scheme, dtype)

    layer()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer()
    for _ in range(2):
        x.normal_()
        ids.random_(0, 8)
        graph.replay()
        assert torch.equal(out, layer())
