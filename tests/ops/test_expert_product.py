"""The expert GEMMs by themselves: plans, biases, router weights, and the fused activation."""

import plans
import pytest
import torch
from conftest import INTERPRETED
from gemm_rows import compare, exact_rows
from hypothesis import given
from hypothesis import strategies as st
from pairwise import half_exhaustive
from plans import bias_of, planned, row_tile, whole_numbers
from products import plain_product
from strategies import ACTIVATIONS, DTYPES

from moe_ops import ops
from moe_ops.activation import formula
from moe_ops.dispatch.tiles import KNOWN_ROW_TILES, direct_slots
from moe_ops.reference import expert_product as reference
from moe_ops.reference.align import plan_slots
from moe_ops.scheme import quantize_weight
from moe_ops.tensors import ExpertWeight, Tiles
from moe_ops.testing import Problem, assert_matches_reference, make_inputs

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

    with row_tile(tile):
        plan = planned(on(ids), None, 5)
        actual = plain_product(ops, on(x), on(w), on(bias), on(weights), [*plan], k)
        expected = plain_product(reference, x, w, bias, weights, plans.on(plan, "cpu"), k)
    assert actual.shape == (tokens * k, n) and actual.dtype == dtype
    exact = exact_rows(x, w, bias, weights, ids, k)
    compare(actual, exact, expected, ids, 5)


@given(
    tokens=st.sampled_from((0, 1, 5, 40)),
    k=st.integers(1, 3),
    n=st.sampled_from((8, 48, 130)),
    rank=st.sampled_from((1, 4, 16, 40)),
    dtype=st.sampled_from(DTYPES),
    tile=st.sampled_from((None, *KNOWN_ROW_TILES)),
    weighted=st.booleans(),
    turned=st.booleans(),
    invariant=st.booleans(),
    routing=st.sampled_from(("uniform", "skewed", "holes")),
    place=st.sampled_from(((0, 1), (5, 1), (0, 2), (1, 2))),
)
def test_added(
    tokens, k, n, rank, dtype, tile, weighted, turned, invariant, routing, place, device
):
    """One rounding of the sum in float32; skipped slots and other columns keep their bits."""
    problem = Problem(tokens, 5, k, rank, n, dtype, "silu_no_mul", routing=routing)
    x, w, _, weights, ids, *_ = (
        t.to(device) if torch.is_tensor(t) else t for t in make_inputs(problem)
    )
    w = w.mT.contiguous().mT if turned else w
    weights, rows = weights if weighted else None, x.repeat_interleave(k, 0)
    before = torch.randn(tokens * k, n, generator=torch.Generator().manual_seed(1)).to(
        device, dtype
    )
    with row_tile(tile):
        tiles = Tiles(None, ids)
        if tile is not None:
            tiles = planned(ids, None, 5, batch_invariant=invariant)
        elif tokens * k > direct_slots(5):
            tiles = tiles._replace(plan=plan_slots(ids, None, 5, "unquantized", dtype, invariant))
        first, step = place
        out = before.new_full((len(before), first + step * n), 7.0)
        out[:, first::step] = before
        ops.expert_product_out(rows, [w], weights, [*tiles], 1, invariant, *place, out=out)
    others = torch.ones(out.shape[1], dtype=torch.bool)
    others[first::step] = False
    assert (out[:, others.to(device)] == 7).all()
    out = out[:, first::step].contiguous()
    product = exact_rows(
        x.cpu(), w.cpu(), None, None if weights is None else weights.cpu(), ids.cpu(), k
    )
    known = ((ids >= 0) & (ids < 5)).flatten().cpu()
    exact = before.cpu().double() + torch.where(known[:, None], product.value, 0.0)
    assert torch.equal(out.cpu()[~known], before.cpu()[~known])
    near = (before.cpu().float() + torch.where(known[:, None], product.value, 0.0).float()).to(
        dtype
    )
    assert_matches_reference(out.cpu(), exact, near)


def test_what_is_refused(device):
    """Rows in expert order with a quantized weight, and lists that are no weight."""
    x, q = torch.zeros(4, 8, device=device), quantize_weight(torch.ones(3, 16, 8), "int8_w8a16")
    tiles = [*planned(torch.zeros(4, 1, dtype=torch.int32, device=device), None, 3)]
    w = ExpertWeight(q.data.to(device), None, q.scale.to(device))
    how = (None, tiles, 1, "int8_w8a16", x.dtype)
    with pytest.raises(ValueError, match="expert_order must be False for scheme int8_w8a16, whose"):
        ops.expert_product(x, None, w, *how, "", True)
    for wrong, rule in (
        ([], r"weight must be \[data, bias, scale, .*, host\], got 0 entries"),
        ([*w, None], r"weight must be \[data, .*\], got 7 entries"),
        ([None, *w[1:]], r"weight\[0\] must be the stored values, got None"),
    ):
        with pytest.raises(ValueError, match=rule):
            ops.expert_product(x, None, wrong, *how)


@pytest.mark.skipif(INTERPRETED, reason="operators are their kernels")
def test_a_weight_that_requires_grad(device):
    """A gradient is never missing silently: also not that of one tensor among others in a list."""
    x, w = torch.zeros(4, 8, device=device), torch.zeros(3, 16, 8, device=device)
    tiles = [*planned(torch.zeros(4, 1, dtype=torch.int32, device=device), None, 3)]
    for weight in (
        ExpertWeight(w.clone().requires_grad_()),
        [w, w[..., 0].clone().requires_grad_()],
    ):
        y = ops.expert_product(x, None, weight, None, tiles, 1, "unquantized", x.dtype)
        with pytest.raises(NotImplementedError, match="gradients of expert_product"):
            y.sum().backward()


def test_added_where_it_cannot_be(device):
    x, w = torch.zeros(4, 8, device=device), torch.zeros(3, 16, 8, device=device)
    ids = torch.zeros(4, 1, dtype=torch.int32, device=device)
    tiles, out = [*planned(ids, None, 3)], torch.zeros(4, 16, device=device)
    for other, error, text in (
        (out.half(), TypeError, "out must have the dtype of a"),
        (out.t().contiguous().t(), ValueError, "out must be contiguous"),
        (out[:3], ValueError, "out must have shape|out.shape"),
        (out[:, :15].clone(), ValueError, "for each of the 16 columns c .* got 0, 1 and shape"),
    ):
        with pytest.raises(error, match=text):
            ops.expert_product_out(x, [w], None, tiles, 1, out=other)
    for place in ((1, 1), (0, 2), (-1, 1)):
        with pytest.raises(ValueError, match=f"out must have column .* got {place[0]}, {place[1]}"):
            ops.expert_product_out(x, [w], None, tiles, 1, False, *place, out=out)
    if INTERPRETED:
        return  # operators are their kernels
    with pytest.raises(ValueError, match="bias must be None where products are added"):
        ops.expert_product_out(x, [w, w[..., 0]], None, tiles, 1, out=out)
    with pytest.raises(NotImplementedError, match="gradients of expert_product_out"):
        ops.expert_product_out(x.requires_grad_(), [w], None, tiles, 1, out=out)


@pytest.mark.parametrize(
    ("dtype", "activation"), half_exhaustive(DTYPES, ACTIVATIONS, where=INTERPRETED)
)
def test_fused_activation(activation, dtype, device):
    """Within the budget of the oracle, and never less accurate than the unfused pair.

    In float32 the two round alike: they may differ by what one rounding of all values makes.
    """
    problem = Problem(40, 4, 2, 72, 70, dtype, activation, has_bias=True)
    x, w, _, weights, ids, _, bias, _ = make_inputs(problem)
    on = [t.to(device) for t in (x, w, bias, weights, ids)]
    plan = planned(on[4], None, 4)
    fused = plain_product(ops, *on[:4], [*plan], 2, activation)
    exact = exact_rows(x, w, bias, weights, ids, 2).activated(formula(activation))
    cpu_plan = plans.on(plan, "cpu")
    expected = plain_product(reference, x, w, bias, weights, cpu_plan, 2, activation)
    compare(fused, exact, expected, ids, 4)
    pair = ops.activation(plain_product(ops, *on[:4], [*plan], 2), activation)
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
    plan = planned(on[2], None, 3)
    actual = plain_product(ops, *on[:2], None, None, [*plan], 2, "silu")
    exact = exact_rows(x, w, None, None, ids, 2).activated(formula("silu"))
    cpu_plan = plans.on(plan, "cpu")
    expected = plain_product(reference, x, w, None, None, cpu_plan, 2, "silu")
    compare(actual, exact, expected, ids, 3)


@pytest.mark.parametrize("activation", ["", "relu2_no_mul", "relu2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_whole_numbers_are_rounded_once(activation, dtype, device):
    """Sums are exact, so every bit is known, whoever adds: what is rounded before shows.

    bf16 holds neither the sums nor the biases, and TF32 not the rows of float32. Rows, biases,
    weights and the plan are strided.
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
        return plain_product(ops, a, w, bias, weights, [*tiles], 2, activation)

    plan = planned(ids, None, 3).plan
    actual = multiply(a, weights, Tiles(torch.stack((plan, plan), 1)[:, 0]))
    assert torch.equal(actual.cpu(), expected.to(dtype))
    for token in range(6):  # few slots need no plan
        one, tiles = slice(token, token + 1), Tiles(None, ids[token : token + 1])
        slots = expected[2 * token : 2 * token + 2]
        assert torch.equal(multiply(a[one], weights[one], tiles).cpu(), slots.to(dtype))


def test_bias_may_have_another_dtype(device):
    problem = Problem(5, 3, 2, 32, 32, torch.bfloat16, "silu_no_mul", has_bias=True)
    x, w, _, _, ids, _, bias, _ = make_inputs(problem, device)
    plan = planned(ids, None, 3)
    narrow = plain_product(ops, x, w, bias, None, [*plan], 2)
    wide = plain_product(ops, x, w, bias.float(), None, [*plan], 2)
    assert torch.equal(narrow, wide)
