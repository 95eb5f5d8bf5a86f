"""Expert GEMMs that dequantize both operands, against float64 on the numbers they stand for."""

import pytest
import torch
from decoded_gemms import GIVEN, check_decoded, check_one_scale_for_each_expert
from gemm_rows import exact_rows, gemm_problem
from hypothesis import given
from hypothesis import strategies as st
from plans import bias_of, planned, whole_numbers
from products import scaled_product
from strategies import ACTIVATIONS, DTYPES

from moe_ops import dequantize_weight, get_scheme, ops, quantize_weight
from moe_ops.activation import formula
from moe_ops.dispatch.tiles import ROW_TILES
from moe_ops.reference.slots import local_experts
from moe_ops.scheme import dequantize_rows

pytestmark = pytest.mark.kernel

NAMED = (
    "mxfp8",
    "mxfp4",
    "mxfp4_mxfp8",
    "mxfp4_w4a8",
    "mxfp4_w4a8_token",
    "nvfp4",
    "int4_w4a8_g128",
)
MORE = ("int4_w4a8_g32",)


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
    check_decoded(gemm_problem(tokens, k, kk, n, dtype, **more), scheme, device, tile=tile)


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
    check_decoded(problem, scheme, device, activation, halves and rule.gated)


@pytest.mark.parametrize("scheme", NAMED)
@pytest.mark.parametrize("tile", [16, 128])
def test_every_scheme(scheme, tile, device):
    check_decoded(gemm_problem(20, 2, 290, 72, torch.bfloat16), scheme, device, tile=tile)


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
    exact = exact_rows(numbers, dequantize_weight(q, scheme).double(), None, None, ids, 2).value
    experts = local_experts(ids, None, 3)
    exact = (exact * factor[experts, None] + bias[experts]).float()
    if activation is not None:
        exact = exact[:, :10].clamp(min=0).square() * exact[:, 10:]
    plan = planned(ids.to(device), None, 3, scheme)
    weight = (t if t is None else t.to(device) for t in (q.data, q.scale, q.global_scale, bias))
    call = (rows, scale, *weight, [*plan], 2, scheme, dtype)
    if activation is None:
        actual = scaled_product(ops, *call)
    else:
        actual = scaled_product(ops, *call, activation)
    assert torch.equal(actual.cpu(), exact.to(dtype))


def test_one_scale_for_each_expert(device):
    check_one_scale_for_each_expert(device)


def test_rows_must_be_stored(device):
    """The operator quantizes rows only of schemes whose stored values are multiplied."""
    x = torch.ones(2, 32, device=device)
    counts = torch.tensor([2], dtype=torch.int32, device=device)
    for scheme, message in (
        ("mxfp4_w4a16", "a_scale must be None for scheme mxfp4_w4a16"),
        ("mxfp8", "a must be rows as scheme mxfp8 stores them"),
    ):
        q = quantize_weight(torch.ones(1, 8, 32, device=device), scheme)
        plan = [ops.plan_batched(counts, 2, scheme), None, None]
        call = (x, x[:, :1], q.data, q.scale, None, None, plan, 1, scheme, x.dtype)
        with pytest.raises(ValueError, match=message):
            scaled_product(ops, *call)


@pytest.mark.parametrize(("scheme", "rule"), [("nvfp4", "be a Tensor"), ("mxfp4", "be None")])
def test_global_scales_that_are_not_the_schemes(scheme, rule, device):
    x, q = torch.ones(2, 16, device=device).byte(), quantize_weight(torch.ones(1, 8, 32), scheme)
    plan = planned(torch.zeros(2, 1, device=device, dtype=torch.int32), None, 1, scheme)
    wrong = None if q.global_scale is not None else torch.ones(1, device=device)
    call = (x, x[:, :1], q.data.to(device), q.scale.to(device), wrong, None, [*plan], 1, scheme)
    with pytest.raises(ValueError, match=f"w_global_scale must {rule}"):
        scaled_product(ops, *call, torch.bfloat16)


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
        plan = [ops.plan_slots(ids, None, 8, scheme, dtype), ids, None]
        rows = ops.moe_quantize(x, given_scale, None, None, None, 0, quant.activation.key)
        weight = (q.data, q.scale, q.global_scale, None)
        return scaled_product(ops, *rows, *weight, plan, 2, scheme, dtype)

    layer()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer()
    for _ in range(2):
        x.normal_()
        ids.random_(0, 8)
        graph.replay()
        assert torch.equal(out, layer())
