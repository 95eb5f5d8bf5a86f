"""Expert GEMMs whose calls look alike are checked and planned once; those that do not, again."""

import pytest
import torch
from conftest import HAS_CUDA, INTERPRETED
from plans import row_tile
from products import plain_product, scaled_product, stored_product

from moe_ops import ops
from moe_ops.scheme import quantize_weight

pytestmark = pytest.mark.kernel
T, E, K, N, TOP_K = 12, 4, 64, 32, 2


def arguments(device, dtype=torch.bfloat16, tokens=T, width=N):
    g = torch.Generator().manual_seed(0)
    a, w = torch.randn(tokens, K, generator=g), torch.randn(E, width, K, generator=g) / 8
    ids = torch.randint(E, (tokens, TOP_K), generator=g).to(torch.int32)
    return a.to(device, dtype), w.to(device, dtype), ids.to(device)


def multiply(a, w, ids, bias=None, **options):
    plan = ops.plan_slots(
        ids, None, E, "unquantized", a.dtype, options.get("batch_invariant", False)
    )
    return plain_product(ops, a, w, bias, None, [plan, ids, None], TOP_K, **options)


def expected(a, w, ids, bias=None):
    rows = a.double().repeat_interleave(TOP_K, 0)
    product = torch.einsum("sk,snk->sn", rows, w.double()[ids.flatten().long()])
    return product if bias is None else product + bias.double()[ids.flatten().long()]


def check(actual, wanted):
    assert torch.allclose(actual.double(), wanted, atol=0.05, rtol=0.02)


def test_calls_that_differ_in_one_fact(device):
    """Each is right after another that looks nearly alike, and so is the first one again."""
    a, w, ids = arguments(device)
    calls = [
        (a, w, ids),
        tuple(arguments(device, torch.float16)),
        tuple(arguments(device, tokens=T + 1)),
        tuple(arguments(device, width=2 * N)),
        (a.t().contiguous().t(), w, ids),
        (a, w.transpose(1, 2).contiguous().transpose(1, 2), ids),
        (torch.cat([a, a], 1)[:, 1 : K + 1], w, ids),
        (a, w, ids, torch.ones(E, N, device=device)),
        (a, w, ids),
    ]
    for call in calls:
        actual = multiply(*call)
        assert actual.dtype == call[0].dtype and actual.shape == (call[2].numel(), call[1].shape[1])
        check(actual, expected(*call))


def test_other_settings(device):
    a, w, ids = arguments(device)
    gated = multiply(a, w, ids, activation="silu")
    assert gated.shape == (T * TOP_K, N // 2)
    check(multiply(a, w, ids), expected(a, w, ids))
    with row_tile(64):
        check(multiply(a, w, ids), expected(a, w, ids))
    check(multiply(a, w, ids, batch_invariant=True), expected(a, w, ids))


def test_what_is_refused_is_refused_after_a_call_too(device):
    a, w, ids = arguments(device)
    multiply(a, w, ids)
    plan = ops.plan_slots(ids, None, E, "unquantized", a.dtype)
    for wrong, rule in (
        ((a[:, :-1], w, None, None, [plan, ids, None], TOP_K), r"a\.shape\[1\]"),
        ((a, w[:, :, :-1], None, None, [plan, ids, None], TOP_K), r"a\.shape\[1\]"),
        ((a, w, None, None, [plan[:-1], ids, None], TOP_K), r"plan\.numel\(\)"),
        ((a, w, None, None, [plan, ids[1:], None], TOP_K), r"topk_ids\.numel\(\)"),
        ((a, w, w[0], None, [plan, ids, None], TOP_K), r"bias\.shape\[0\]"),
        ((a, w, None, None, [plan, ids], TOP_K), "tiles"),
    ):
        with pytest.raises(ValueError, match=f"^{rule} must"):
            plain_product(ops, *wrong)


def test_rows_of_another_dtype(device):
    """By weights that are stored alike."""
    a, w, ids = arguments(device)
    q = quantize_weight(w.float(), "int8_w8a16")
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        tiles = [ops.plan_slots(ids, None, E, "int8_w8a16", dtype), ids, None]
        rows = (a.to(dtype), *q, None, None)
        actual = stored_product(ops, *rows, tiles, TOP_K, "int8_w8a16")
        assert actual.dtype == dtype
        check(actual, expected(a, w, ids))


@pytest.mark.skipif(not (HAS_CUDA or INTERPRETED), reason="a reference prepares nothing")
def test_dtypes_of_results_and_scales(device):
    """Rows that are not quantized, by one operator: two dtypes of the result, and stored rows."""
    a, w, ids = arguments(device)
    q = quantize_weight(w, "int8_channel")
    plan = ops.plan_slots(ids, None, E, "int8_channel", a.dtype)
    rest = ([plan, ids, None], TOP_K, "int8_channel")
    stored = ops.moe_quantize(a, None, None, None, None, 0, "int8:1x*:float32")
    results = [
        scaled_product(ops, *rows, q.data, q.scale, None, None, *rest, dtype)
        for rows in ((a, None), stored)
        for dtype in (torch.bfloat16, torch.float32)
    ]
    for result, dtype in zip(results, (torch.bfloat16, torch.float32) * 2, strict=True):
        assert result.dtype == dtype
        check(result, expected(a, w, ids))
    assert torch.equal(results[1], results[3])
