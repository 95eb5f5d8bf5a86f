"""Gradients of expert weights, biases and router weights, by slot, against float64."""

import pytest
import torch
from conftest import HAS_CUDA, INTERPRETED
from hypothesis import given
from hypothesis import strategies as st
from plans import ids_of, planned, row_tile
from strategies import DTYPES, topk_ids
from table_items import every_row

from moe_ops import ops
from moe_ops.dispatch.device import assumed, device_facts
from moe_ops.dispatch.row_tiles import BY_EXPERT
from moe_ops.reference import expert_wgrad as reference
from moe_ops.reference.slots import local_experts
from moe_ops.tensors import Tiles
from moe_ops.testing import Bounded, assert_matches_reference

pytestmark = pytest.mark.kernel


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def per_slot(rows, slots):
    return rows.double().repeat_interleave(slots // max(1, len(rows)), 0)


def exact_sums(dy, x, weights, expert, num_experts):
    """float64; ``x`` None: the sums of ``dy``."""
    d = per_slot(dy, len(expert)) * (1 if weights is None else weights.double().view(-1, 1))
    r = torch.ones(len(expert), 1).double() if x is None else per_slot(x, len(expert))
    parts = [d[expert == e].t() @ r[expert == e] for e in range(num_experts)]
    return torch.stack(parts)


def check(ids, num_experts, n, k, dtype, dy_by_token, x_by_token, weighted, device):
    """Both gradients of random rows, with a plan of the ids that any device reads."""
    facts = device_facts(torch.device(device))
    with assumed(facts._replace(arch=BY_EXPERT)):
        check_here(ids, num_experts, n, k, dtype, dy_by_token, x_by_token, weighted, device)


def check_here(ids, num_experts, n, k, dtype, dy_by_token, x_by_token, weighted, device):
    tokens, slots = len(ids), ids.numel()
    dy = random(tokens if dy_by_token else slots, n, dtype=dtype)
    x = random(tokens if x_by_token else slots, k, dtype=dtype, seed=1)
    weights = random(*ids.shape, seed=2) if weighted else None
    expert = local_experts(ids, None, num_experts)
    tiles = Tiles(planned(ids, None, num_experts).plan, ids) if slots else Tiles(None, ids)
    how = (num_experts, "unquantized")

    def on(value):
        return None if value is None else value.to(device)

    moved = [on(t) for t in tiles]
    for operator, mine, rest in (
        ("expert_wgrad", (dy, x), (dtype,)),
        ("expert_bias_grad", (dy,), ()),
    ):
        arguments = (*map(on, mine), on(weights), moved, *how, *rest)
        actual = getattr(ops, operator)(*arguments)
        near = getattr(reference, operator)(*mine, weights, [*tiles], *how, *rest)
        exact = exact_sums(dy, x if len(mine) == 2 else None, weights, expert, num_experts)
        empty = torch.bincount(expert[expert >= 0], minlength=num_experts) == 0
        assert not actual.cpu()[empty].any()
        rows = (num_experts, -1)
        assert actual.is_contiguous() and actual.shape == near.shape
        assert_matches_reference(actual.cpu().view(rows), exact.view(rows), near.view(rows))
    check_added(on(dy), on(x), on(weights), moved, num_experts, empty.to(device))


def check_added(dy, x, weights, tiles, num_experts, empty):
    """Two calls add the float32 sums, each with one rounding; experts without slots keep bits.

    The second one's sums are twice the first's, bit for bit. For that x is doubled: gradients times
    router weights are rounded to their dtype, and float16 has few bits for the smallest ones.
    """
    sums = ops.expert_wgrad(dy, x, weights, tiles, num_experts, "unquantized", torch.float32)
    total, expected = torch.zeros_like(sums), torch.zeros_like(sums)
    for start in (total, expected):
        start[empty] = -0.0
        start[empty, :, ::2] = torch.nan
    for number in (1, 2):
        ops.expert_wgrad_out(dy, number * x, weights, tiles, num_experts, out=total)
        expected[~empty] += number * sums[~empty]
        assert torch.equal(total.view(torch.int32), expected.view(torch.int32))


@given(
    routed=topk_ids(max_tokens=20),
    sizes=st.tuples(st.sampled_from((1, 16, 40)), st.sampled_from((3, 16, 72))),
    dtype=st.sampled_from(DTYPES),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
def test_sums_by_expert(routed, sizes, dtype, flags, device):
    """Few slots without a plan and more with one; -1, too large ids, experts without rows."""
    ids, num_experts = routed
    check(ids, num_experts, *sizes, dtype, *flags, device)


@pytest.mark.parametrize("tile", [16, 64, 192])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_several_tiles_of_an_expert(tile, dtype, device):
    """Row tiles that the step of the kernel divides and that it does not; two columns of blocks."""
    with row_tile(tile):
        ids = ids_of([0, 70, 1, 0, 200], 1)
        check(ids, 5, 130, 40, dtype, False, True, True, device)


@pytest.mark.skipif(INTERPRETED, reason="no interpreter for Gluon kernels: see their own test")
@pytest.mark.parametrize("tile", [64, 128, 192])
@pytest.mark.parametrize("by_token", [(False, True), (True, False), (True, True)])
def test_many_rows(tile, by_token, device):
    """On Hopper its own kernel; sizes that its tiles do not divide."""
    with row_tile(tile, portable_only=False):
        ids = ids_of([700, 0, 1, 130, 64], 2)
        check_here(ids, 5, 264, 520, torch.bfloat16, *by_token, False, device)
        rows = (random(len(ids), 264, dtype=torch.float16), random(len(ids), 520).half())
        tiles = Tiles(planned(ids, None, 5).plan, ids)
        call = (*rows, None, [*tiles], 5, "unquantized", torch.float32)
        call = [x.to(device) if torch.is_tensor(x) else x for x in call]
        call[3] = [None if x is None else x.to(device) for x in tiles]
        first, again = ops.expert_wgrad(*call), ops.expert_wgrad(*call)
        assert torch.equal(first, again)


@pytest.mark.skipif(INTERPRETED, reason="sizes for a processor")
@pytest.mark.parametrize(
    ("n", "k", "experts"),
    [
        (2 * 704, 2880, 2),
        pytest.param(2880, 1408, 3, marks=[pytest.mark.exhaustive] * (not HAS_CUDA)),
    ],
)
def test_real_sizes(n, k, experts, device):
    ids = ids_of([120, 0, 300, 7][:experts], 4)
    check(ids, experts, n, k, torch.bfloat16, True, False, True, device)


def test_many_experts(device):
    counts = [0] * 257
    counts[3], counts[200], counts[256] = 5, 40, 33
    check(ids_of(counts, 2), 257, 16, 16, torch.float32, True, True, False, device)


@pytest.mark.parametrize("by_expert", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_slot_products(by_expert, dtype, device):
    """Rows of skipped slots hold NaN and are not read."""
    ids = torch.tensor([[0, 3], [-1, 1], [5, 2**31 - 1]], dtype=torch.int32)
    expert_map = torch.tensor([1, -1, 0, 0], dtype=torch.int32)
    expert = local_experts(ids, expert_map, 2)
    x = random(3, 1100, dtype=dtype)
    y = random(2 if by_expert else 6, 1100, dtype=dtype, seed=1)
    if not by_expert:
        y[expert < 0] = torch.nan
    actual = ops.slot_products(
        x.to(device), y.to(device), ids.to(device), expert_map.to(device), 2, by_expert
    )
    near = reference.slot_products(x, y, ids, expert_map, 2, by_expert)
    rows = y[expert.clamp(min=0)] if by_expert else y
    products = x.double().repeat_interleave(2, 0) * rows.double()
    products = products.masked_fill(expert[:, None] < 0, 0.0)
    exact, sizes = products.sum(1).view(1, -1), products.abs().sum(1).view(1, -1)
    bounded = Bounded(exact, torch.zeros_like(exact), x.shape[1] * 2.0**-24 * sizes)
    assert_matches_reference(actual.cpu().view(1, -1), bounded, near.view(1, -1))
    assert not actual.cpu().flatten()[expert < 0].any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dy": torch.zeros(5, 4)}, "rows must be one per token = 3 or one per slot = 6, got 5"),
        ({"topk_weights": torch.zeros(5)}, "topk_weights must have 6 entries"),
        ({"num_experts": 0}, "num_experts must be in 1..4096, got 0"),
        ({"x": torch.zeros(3, 0)}, r"rows.shape\[1\] must be in 1"),
    ],
)
def test_wrong_sizes(change, message, device):
    ids = torch.zeros(3, 2, dtype=torch.int32, device=device)
    call = {"dy": torch.zeros(3, 4), "x": torch.zeros(6, 4), "topk_weights": None}
    call = {**call, "tiles": [None, ids, None], "num_experts": 8, "scheme": "unquantized"}
    call = {**call, "out_dtype": torch.float32, **change}
    call = {k: v.to(device) if torch.is_tensor(v) else v for k, v in call.items()}
    with pytest.raises(ValueError, match=message):
        torch.ops.moe_ops.expert_wgrad(**call)


@every_row(
    ("out", "error", "message"),
    [
        (
            torch.zeros(8, 4, 4, dtype=torch.bfloat16),
            TypeError,
            "out must have the dtype of sums, torch.f",
        ),
        (torch.zeros(8, 4, 5), ValueError, r"out.shape\[2\] must be 4, got 5"),
        (torch.zeros(9, 4, 4), ValueError, r"out.shape\[0\] must be 8, got 9"),
        (torch.zeros(8, 4, 4).mT, ValueError, "out must be contiguous, got strides"),
    ],
)
def test_gradients_that_nothing_is_added_to(out, error, message, device):
    refused(out.to(device), error, message)


@pytest.mark.skipif(INTERPRETED, reason="operators are their kernels")
def test_gradients_that_are_trained(device):
    out = torch.zeros(8, 4, 4, device=device, requires_grad=True)
    refused(out, NotImplementedError, "gradients of expert_wgrad_out are not implemented")


def refused(out, error, message):
    ids = torch.zeros(3, 2, dtype=torch.int32, device=out.device)
    rows = torch.ones(3, 4, device=out.device), torch.ones(6, 4, device=out.device)
    with pytest.raises(error, match=message):
        ops.expert_wgrad_out(*rows, None, [None, ids, None], 8, out=out)
    assert not out.any()
