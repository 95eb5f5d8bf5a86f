"""The choices of weighting and summing: what each returns, and that none changes its arguments."""

import pytest
import torch

import moe_ops
from moe_ops.pipeline import (
    TopKWeightAndReduceContiguous,
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNaiveBatched,
    TopKWeightAndReduceNoOP,
)
from moe_ops.testing import assert_matches_reference

pytestmark = pytest.mark.kernel
T, K, H, E = 7, 3, 40, 4
DTYPES = (torch.float32, torch.bfloat16)


def routing(device, holes=True):
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(0, E, (T, K), generator=g, dtype=torch.int32)
    if holes:
        ids[0], ids[1, 1] = -1, -1
    return torch.rand(T, K, generator=g).to(device), ids.to(device)


def normal(*shape, dtype=torch.float32, device="cpu"):
    g = torch.Generator().manual_seed(1)
    return torch.randn(*shape, generator=g).to(dtype).to(device)


def in_order(rows, weights, ids, dtype=torch.float32):
    """The definition: slot by slot, rounded once; skipped slots are not read."""
    total = torch.zeros(T, rows.shape[-1], device=rows.device, dtype=dtype)
    for j in range(K):
        term = rows[:, j].to(dtype) * weights[:, j, None].to(dtype)
        total += torch.where(ids[:, j, None] >= 0, term, 0)
    return total


def outputs(device, dtype):
    """None, a fresh tensor, and rows of a wider one."""
    fresh = torch.full((T, H), torch.nan, dtype=dtype, device=device)
    wide = torch.full((T, 2 * H), torch.nan, dtype=dtype, device=device)
    return None, fresh, wide[:, :H]


def check(reduce, rows, weights, ids, on_input):
    """The same whatever it is written to; returned as a whole, and for comparison."""
    kept = rows.clone(), weights.clone(), ids.clone()
    results = []
    for output in outputs(rows.device, rows.dtype):
        results.append(reduce.apply(output, rows, weights, ids, on_input))
        assert output is None or results[-1] is output
    assert all(torch.equal(r, results[0]) for r in results)
    for before, after in zip(kept, (rows, weights, ids), strict=True):
        assert torch.equal(before.nan_to_num(7.0), after.nan_to_num(7.0))
    return results[0]


def check_sum(reduce, given, values, weights, ids, routed, on_input):
    """Against float64; ``values`` are in slot order, ``routed`` says which of them count."""
    factors = torch.ones_like(weights) if on_input else weights
    actual = check(reduce, given, weights, ids, on_input)
    exact = in_order(values, factors, routed, torch.float64)
    assert_matches_reference(actual, exact, in_order(values, factors, routed).to(values.dtype))
    assert (actual[(routed < 0).all(1)] == 0).all()


@pytest.mark.parametrize("on_input", [False, True])
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_contiguous(dtype, flat, on_input, device):
    weights, ids = routing(device)
    rows = normal(T, K, H, dtype=dtype, device=device)
    rows[ids < 0] = torch.nan
    given = rows.view(T * K, H) if flat else rows
    check_sum(TopKWeightAndReduceContiguous(), given, rows, weights, ids, ids, on_input)


@pytest.mark.parametrize("on_input", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_naive_batched(dtype, rank, on_input, device):
    """A token that chose an expert twice has two rows there; padding may be NaN."""
    weights, ids = routing(device)
    ids[2] = 2 * rank
    rows = torch.full((2, T * K, H), torch.nan, dtype=dtype, device=device)
    values = normal(T, K, H, dtype=dtype, device=device)
    mine = torch.full_like(ids, -1)
    used = [0, 0]
    for slot, e in enumerate(ids.flatten().tolist()):
        if 2 * rank <= e < 2 * rank + 2:
            rows[e - 2 * rank, used[e - 2 * rank]] = values.view(-1, H)[slot]
            used[e - 2 * rank] += 1
            mine.view(-1)[slot] = e
    reduce = TopKWeightAndReduceNaiveBatched(rank)
    check_sum(reduce, rows, values, weights, ids, mine, on_input)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_op(dtype, device):
    """The result itself, or a copy of it in the output."""
    weights, ids = routing(device)
    done = normal(T, H, dtype=dtype, device=device)
    assert torch.equal(check(TopKWeightAndReduceNoOP(), done, weights, ids, False), done)
    assert TopKWeightAndReduceNoOP().apply(None, done, weights, ids, False) is done
    assert TopKWeightAndReduceNoOP().apply(done, done, weights, ids, False) is done


def test_delegate_does_not_sum():
    x = torch.zeros(T, K, H)
    with pytest.raises(RuntimeError, match="caller is expected to choose the appropriate"):
        TopKWeightAndReduceDelegate().apply(None, x, *routing("cpu"), False)


def test_delegating_to_prepare_finalize(device):
    """The Standard format sums slots in order, the Batched one the rows of its experts."""
    weights, ids = routing(device)
    rows = normal(T, K, H, device=device)
    expected = TopKWeightAndReduceContiguous().apply(None, rows, weights, ids, False)
    delegate = TopKWeightAndReduceDelegate()
    part = moe_ops.pipeline.MoEPrepareAndFinalizeNoEP()
    assert torch.equal(part.finalize(rows, weights, ids, False, delegate), expected)
    batched = moe_ops.pipeline.BatchedPrepareAndFinalize(T * K, 2, 2, 1)
    given = normal(2, T * K, H, device=device)
    mine = TopKWeightAndReduceNaiveBatched(1).apply(None, given, weights, ids, False)
    assert torch.equal(batched.finalize(given, weights, ids, False, delegate), mine)
    other = TopKWeightAndReduceNaiveBatched(0)
    assert torch.equal(
        batched.finalize(given, weights, ids, False, other),
        other.apply(None, given, weights, ids, False),
    )


def test_equality_is_by_type_and_rank():
    kinds = (
        TopKWeightAndReduceDelegate, TopKWeightAndReduceNoOP, TopKWeightAndReduceContiguous
    )  # fmt: skip
    values = [kind() for kind in kinds] + [TopKWeightAndReduceNaiveBatched(r) for r in (0, 1)]
    again = [kind() for kind in kinds] + [TopKWeightAndReduceNaiveBatched(r) for r in (0, 1)]
    for i, a in enumerate(values):
        assert [a == b for b in again] == [i == j for j in range(len(again))]
    assert len({*values, *again}) == 5


@pytest.mark.parametrize(
    ("reduce", "shape", "output", "message"),
    [
        (TopKWeightAndReduceNoOP(), (T, H), (T, H + 1), "output must have the shape of the result"),
        (TopKWeightAndReduceContiguous(), (T,), None, r"must be \(T \* k, H\) or \(T, k, H\)"),
        (TopKWeightAndReduceContiguous(), (T * K, H), (T, H + 1), r"outputs.shape\[1\] must be"),
        (TopKWeightAndReduceContiguous(), (T * K + 1, H), None, r"\(T \* k, H\) or \(T, k, H\)"),
        (TopKWeightAndReduceContiguous(), (T, K + 1, H), None, r"\(T \* k, H\) or \(T, k, H\)"),
        (TopKWeightAndReduceNaiveBatched(0), (T, H), None, "must have 3 axes"),
        (TopKWeightAndReduceNaiveBatched(0), (2, T, H), (T + 1, H), "output must have the shape"),
    ],
)
def test_errors(reduce, shape, output, message):
    out = None if output is None else torch.zeros(output)
    with pytest.raises(ValueError, match=message):
        reduce.apply(out, torch.zeros(shape), *routing("cpu"), False)


@pytest.mark.parametrize("on_input", [False, True])
def test_gradients_of_rows_in_slot_order(on_input, device):
    """Small whole numbers, whose products and sums are exact."""
    weights, ids = routing(device)
    weights, grad = (8 * weights).round(), normal(T, H, device=device).round()
    rows = normal(T * K, H, device=device).round()
    leaves = [x.requires_grad_() for x in (rows, weights)]
    reduce = TopKWeightAndReduceContiguous()
    for shape in ((T * K, H), (T, K, H)):
        out = reduce.apply(None, rows.view(shape), weights, ids, on_input)
        used = torch.ones_like(weights) if on_input else weights
        plain = in_order(rows.view(T, K, H), used, ids)
        assert torch.equal(out, plain)
        drows, dweights = torch.autograd.grad(out, leaves, grad, allow_unused=on_input)
        near_rows, near_weights = torch.autograd.grad(plain, leaves, grad, allow_unused=on_input)
        assert torch.equal(drows, near_rows)
        assert dweights is near_weights is None or torch.equal(dweights, near_weights)
