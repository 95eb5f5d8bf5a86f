"""The expert GEMMs by themselves: plans, biases, router weights, and the fused activation."""

import plans
import pytest
import torch
from gemm_rows import compare, exact_rows
from hypothesis import given
from hypothesis import strategies as st
from plans import bias_of, planned, whole_numbers
from strategies import ACTIVATIONS, DTYPES

from moe_ops import ops
from moe_ops.activation import formula
from moe_ops.dispatch.tiles import KNOWN_ROW_TILES, ROW_TILES
from moe_ops.reference import expert_gemm as reference
from moe_ops.tensors import Tiles
from moe_ops.testing import Problem, make_inputs

pytestmark = pytest.mark.kernel


@given(
    tokens=st.sampled_from((0, 1, 5, 40)),
    k=st.integers(1, 3),
    n=st.sampled_from((8, 48, 130)),
    kk=st.sampled_from((16, 40, 130)),
    dtype=st.sampled_from(DTYPES),
    tile=st.sampled_from(KNOWN_ROW_TILES),
    has_bias=st.booleans(),
    weighted=st.booleans(),
    routing=st.sampled_from(("uniform", "skewed", "holes")),
)
def test_gemm(tokens, k, n, kk, dtype, tile, has_bias, weighted, routing, device):
    problem = Problem(tokens, 5, k, kk, n, dtype, "silu_no_mul", has_bias, routing=routing)
    x, w, _, weights, ids, _, bias, _ = make_inputs(problem)
    weights = weights if weighted else None

    def on(t):
        return None if t is None else t.to(device)

    plan = planned(on(ids), None, [tile], 5)
    actual = ops.expert_matmul(on(x), on(w), on(bias), on(weights), *plan, [tile], k)
    assert actual.shape == (tokens * k, n) and actual.dtype == dtype
    exact = exact_rows(x, w, bias, weights, ids, k)
    cpu_plan = plans.on(plan, "cpu")
    expected = reference.expert_matmul(x, w, bias, weights, *cpu_plan, [tile], k)
    compare(actual, exact, expected, ids, 5)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_activation(activation, dtype, device):
    """Within the budget of the oracle, and never less accurate than the unfused pair.

    In float32 the two round alike: they may differ by what one rounding of all values makes.
    """
    problem = Problem(40, 4, 2, 72, 70, dtype, activation, has_bias=True)
    x, w, _, weights, ids, _, bias, _ = make_inputs(problem)
    on = [t.to(device) for t in (x, w, bias, weights, ids)]
    plan = planned(on[4], None, ROW_TILES, 4)
    fused = ops.expert_matmul(*on[:4], *plan, ROW_TILES, 2, activation)
    exact = exact_rows(x, w, bias, weights, ids, 2).activated(formula(activation))
    cpu_plan = plans.on(plan, "cpu")
    expected = reference.expert_matmul(x, w, bias, weights, *cpu_plan, ROW_TILES, 2, activation)
    compare(fused, exact, expected, ids, 4)
    pair = ops.activation(ops.expert_matmul(*on[:4], *plan, ROW_TILES, 2), activation)
    error, unfused = ((t.cpu().double() - exact.value).norm() for t in (fused, pair))
    assert error <= unfused + torch.finfo(torch.float32).eps * exact.value.norm()


@pytest.mark.parametrize("shape", [(2880, 1408), (704, 352), (257, 129)])
def test_shapes_that_no_tile_divides(shape, device):
    if device == "cpu" and shape[0] > 2000:
        shape = (300, 150)
    hidden, width = shape
    problem = Problem(3, 3, 2, hidden, width, torch.bfloat16)
    x, w, _, _, ids, *_ = make_inputs(problem)
    on = [t.to(device) for t in (x, w, ids)]
    plan = planned(on[2], None, ROW_TILES, 3)
    actual = ops.expert_matmul(*on[:2], None, None, *plan, ROW_TILES, 2, "silu")
    exact = exact_rows(x, w, None, None, ids, 2).activated(formula("silu"))
    cpu_plan = plans.on(plan, "cpu")
    expected = reference.expert_matmul(x, w, None, None, *cpu_plan, ROW_TILES, 2, "silu")
    compare(actual, exact, expected, ids, 3)


@pytest.mark.parametrize("activation", ["", "relu2_no_mul", "relu2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_whole_numbers_are_rounded_once(activation, dtype, device):
    """Sums are exact, so every bit is known, whoever adds: what is rounded before shows.

    bf16 holds neither the sums nor the biases, and TF32 not the rows of float32. Rows, biases and
    weights are strided.
    """
    most = 5000 if dtype == torch.float32 else 16
    x, w = whole_numbers(6, 24, most=most), whole_numbers(3, 20, 24, most=3, seed=1)
    bias, ids = bias_of(3, 20), torch.tensor([[0, 2], [1, 0], [2, 1]]).repeat(2, 1).int()
    fraction = 5.0 if dtype == torch.float32 else 1 + 2.0**-9  # more bits than bf16 has
    weights = torch.tensor([1.0, 2.0, 3.0, fraction]).repeat(3).view(6, 2)
    x, w = x.to(dtype), w.to(dtype)
    product = exact_rows(x, w, bias, weights, ids, 2).value.float()
    expected = product
    if activation:
        g, u = product.chunk(2, -1) if activation == "relu2" else (product, 1)
        expected = g.clamp(min=0).square() * u
    strided = (x.t().contiguous().t(), w, torch.stack((bias, bias), 2)[..., 0])
    a, w, bias, weights, ids = (t.to(device) for t in (*strided, weights.repeat(1, 2)[:, :2], ids))

    def multiply(a, weights, tiles):
        return ops.expert_matmul(a, w, bias, weights, *tiles, ROW_TILES, 2, activation)

    actual = multiply(a, weights, planned(ids, None, ROW_TILES, 3))
    assert torch.equal(actual.cpu(), expected.to(dtype))
    for token in range(6):  # few slots need no plan
        one, tiles = slice(token, token + 1), Tiles(None, ids[token : token + 1])
        slots = expected[2 * token : 2 * token + 2]
        assert torch.equal(multiply(a[one], weights[one], tiles).cpu(), slots.to(dtype))


def test_bias_may_have_another_dtype(device):
    problem = Problem(5, 3, 2, 32, 32, torch.bfloat16, "silu_no_mul", has_bias=True)
    x, w, _, _, ids, _, bias, _ = make_inputs(problem, device)
    plan = planned(ids, None, ROW_TILES, 3)
    narrow = ops.expert_matmul(x, w, bias, None, *plan, ROW_TILES, 2)
    wide = ops.expert_matmul(x, w, bias.float(), None, *plan, ROW_TILES, 2)
    assert torch.equal(narrow, wide)
