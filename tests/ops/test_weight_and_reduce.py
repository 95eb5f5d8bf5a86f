"""The weighted sum: order, skipping, and writing into a given tensor."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import DTYPES

import moe_ops
from moe_ops import ops
from moe_ops.reference.weight_and_reduce import moe_fused_mul_sum as reference
from moe_ops.testing import Bounded, assert_matches_reference

ANY = 2**31 - 1


@pytest.mark.kernel
@given(
    tokens=st.integers(0, 20),
    k=st.integers(1, 10),
    width=st.sampled_from((1, 16, 100, 1030)),
    dtype=st.sampled_from(DTYPES),
    weight_dtype=st.sampled_from(DTYPES),
    skipping=st.sampled_from(("none", "ids", "map")),
)
def test_any_rows(tokens, k, width, dtype, weight_dtype, skipping, device):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, k, width, generator=g).to(dtype)
    weights = torch.rand(tokens, k, generator=g).to(weight_dtype)
    ids = torch.randint(-1, 6, (tokens, k), generator=g) if skipping != "none" else None
    expert_map = torch.tensor([0, -1, 1, -1], dtype=torch.int32) if skipping == "map" else None
    keep = torch.ones(tokens, k, dtype=torch.bool)
    if skipping == "ids":
        keep = ids >= 0
    elif skipping == "map":
        keep = (ids == 0) | (ids == 2)
    exact = Bounded.exactly(x).weighted_sum(weights * keep).rounded(dtype)
    x[~keep], weights[~keep] = torch.nan, torch.nan
    on = [None if t is None else t.to(device) for t in (ids, expert_map)]
    actual = moe_ops.moe_fused_mul_sum(x.to(device), weights.to(device), None, *on)
    expected = reference(x, weights, ids, expert_map, None, ANY)
    assert_matches_reference(actual.cpu(), exact, expected)
    if on[0] is not None:
        rows = (x.flatten(0, 1).to(device), weights.to(device), *on, None, ANY)
        assert torch.equal(ops.moe_fused_mul_sum(*rows), actual), "rows without the axis of slots"
    if skipping == "ids":  # those of other ranks may be too large, in place of negative
        rows = (x.flatten(0, 1).to(device), weights.to(device))
        ids = torch.where(ids < 0, 6, ids).to(device)
        assert torch.equal(ops.moe_fused_mul_sum(*rows, ids, None, None, 6), actual)
    if skipping == "map":  # an entry that is no local expert may be too large, too
        rows = (x.flatten(0, 1).to(device), weights.to(device), on[0])
        too_large = torch.where(expert_map < 0, 2, expert_map).to(device)
        assert torch.equal(ops.moe_fused_mul_sum(*rows, too_large, None, 2), actual)


@pytest.mark.kernel
def test_rows_past_the_valid_tokens_are_zero(device):
    x = torch.ones(4, 2, 8, device=device)
    weights = torch.ones(4, 2, device=device)
    x[2:], weights[2:] = torch.nan, torch.nan
    valid = torch.tensor([2], dtype=torch.int32, device=device)
    actual = moe_ops.moe_fused_mul_sum(x, weights, num_valid_tokens=valid)
    assert actual[:, 0].tolist() == [2.0, 2.0, 0.0, 0.0]
    ids = torch.tensor([[0, -1], [-1, -1], [0, 0], [0, 0]], device=device)
    actual = moe_ops.moe_fused_mul_sum(x, weights, None, ids, num_valid_tokens=valid)
    assert actual[:, 0].tolist() == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_outputs_is_written_and_returned(dtype, device):
    x = torch.randn(5, 3, 40, device=device, dtype=torch.bfloat16)
    weights = torch.rand(5, 3, device=device)
    wide = torch.zeros(5, 64, device=device, dtype=dtype)
    outputs = wide[:, :40]
    returned = moe_ops.moe_fused_mul_sum(x, weights, outputs)
    assert returned.data_ptr() == outputs.data_ptr()
    assert (wide[:, 40:] == 0).all()
    if dtype == x.dtype:
        assert torch.equal(outputs, moe_ops.moe_fused_mul_sum(x, weights))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"inputs": torch.zeros(4, 8)}, ValueError, "inputs must have 3 axes"),
        ({"inputs": torch.zeros(4, 8, 2).transpose(1, 2)}, ValueError, "inputs must be contiguous"),
        ({"inputs": torch.zeros(4, 2, 8).int()}, TypeError, "inputs must have a dtype"),
        ({"topk_weights": torch.zeros(4, 3)}, ValueError, r"topk_weights.shape\[1\] must be"),
        ({"topk_weights": torch.zeros(3, 2)}, ValueError, "must have the 4 tokens of inputs"),
        ({"outputs": torch.zeros(4, 7)}, ValueError, r"outputs.shape\[1\] must be"),
        ({"expert_map": torch.zeros(3).int()}, ValueError, "topk_ids must be given"),
        (
            {"num_valid_tokens": torch.zeros(1, dtype=torch.int32, device="meta")},
            ValueError,
            "num_valid_tokens must be on the device of inputs",
        ),
        ({"outputs": torch.zeros(3, 8)}, ValueError, "outputs must have the 4 tokens of inputs"),
        ({"outputs": torch.zeros(4, 8).int()}, TypeError, "outputs must have a dtype"),
        ({"outputs": torch.zeros(4, 8, device="meta")}, ValueError, "outputs must be on the dev"),
        ({"outputs": torch.zeros(4, 16)[:, ::2]}, ValueError, "outputs must have contiguous rows"),
        ({"outputs": torch.zeros(1, 8).expand(4, 8)}, ValueError, "outputs must .* lie apart"),
        ({"topk_weights": torch.zeros(2, 4).t()}, ValueError, "topk_weights must be contiguous"),
        ({"topk_ids": torch.zeros(4, 2)}, TypeError, "topk_ids must have a dtype"),
        (
            {"topk_ids": torch.zeros(4, 2).int(), "expert_map": torch.zeros(3)},
            TypeError,
            "expert_map must have a dtype",
        ),
    ],
)
def test_errors(changes, error, message):
    arguments = {"inputs": torch.zeros(4, 2, 8), "topk_weights": torch.zeros(4, 2), **changes}
    with pytest.raises(error, match=message):
        moe_ops.moe_fused_mul_sum(**arguments)


def test_a_backward_pass_names_the_function():
    x = torch.ones(4, 2, 8, requires_grad=True)
    out = moe_ops.moe_fused_mul_sum(x, torch.ones(4, 2))
    with pytest.raises(NotImplementedError, match="gradients of moe_fused_mul_sum are not"):
        out.sum().backward()


@pytest.mark.kernel
def test_the_operator_refuses_rows_that_share_memory(device):
    """`moe_fused_mul_sum` has checked before; whoever calls the operator itself has not."""
    x, weights = torch.zeros(4, 2, 8, device=device), torch.zeros(4, 2, device=device)
    out = torch.zeros(1, 8, device=device).expand(4, 8)
    with pytest.raises(ValueError, match="out must have contiguous rows that lie apart"):
        torch.ops.moe_ops.moe_fused_mul_sum.out(x, weights, None, None, None, 1, out=out)


@pytest.mark.kernel
def test_slots_are_added_in_their_order(device):
    """float32 shows it: 1 is lost beside 1e8."""
    x = torch.tensor([[[1e8], [-1e8], [1.0]], [[1.0], [1e8], [-1e8]]], device=device)
    ones = torch.ones(2, 3, device=device)
    assert moe_ops.moe_fused_mul_sum(x, ones).tolist() == [[1.0], [0.0]]
    inverse = torch.arange(6, dtype=torch.int32, device=device).view(2, 3)
    for weights in (ones, None):
        assert moe_ops.moe_unpermute(x.view(6, 1), weights, inverse).tolist() == [[1.0], [0.0]]
