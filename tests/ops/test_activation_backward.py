"""Derivatives of every activation, with gradients of router weights, against autograd."""

import pytest
import torch
from activation_formulas import FORMULAS, halves
from hypothesis import given
from hypothesis import strategies as st
from strategies import ACTIVATIONS, DTYPES

from moe_ops import ops
from moe_ops.activation import formula
from moe_ops.reference.activation import derivative
from moe_ops.reference.activation import moe_activation_backward as reference
from moe_ops.reference.slots import local_experts
from moe_ops.testing import assert_matches_reference


def random(*shape, seed=0, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def exact_gradients(grad, x, weights, ids, expert_map, num_experts, key, activated):
    """Gradients by autograd, in float64; zeros for skipped slots."""
    x = x.double().requires_grad_()
    value = FORMULAS[key](*halves(x, key))
    weight = 1.0 if weights is None else weights.double().view(-1, 1)
    (slopes,) = torch.autograd.grad(value, x, grad.double() * weight)
    skipped = (local_experts(ids, expert_map, num_experts) < 0)[:, None]
    products = (grad.double() * value).masked_fill(skipped, 0.0).sum(1)
    rows = (value * weight).masked_fill(skipped, 0.0)[: len(x) if activated else 0]
    return slopes.masked_fill(skipped, 0.0), rows.detach(), products.detach().view(ids.shape)


@pytest.mark.parametrize("key", FORMULAS)
def test_the_reference_has_the_derivative(key):
    """`gradcheck` in float64, away from the bounds of clamps; at these the derivative is 1."""
    rule = formula(key)

    class Ours(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return derivative(x, torch.zeros(()), rule)[0]

        @staticmethod
        def backward(ctx, grad):
            return derivative(ctx.saved_tensors[0], grad, rule)[1]

    x = random(6, 10, scale=3.0).double()
    x = x + 0.05 * x.sign()  # no kink of relu2 within a step
    assert torch.autograd.gradcheck(Ours.apply, (x.requires_grad_(),), eps=1e-6)
    edges = torch.tensor([-7.0, 7.0, 2.0, -2.0, 1.5, 0.0, 30.0, -30.0]).double()
    x = torch.stack([edges, edges.flip(0)]).requires_grad_()
    (expected,) = torch.autograd.grad(FORMULAS[key](*halves(x, key)).sum(), x)
    (actual,) = torch.autograd.grad(Ours.apply(x).sum(), x)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_reference_rounds_once(dtype):
    """Gradients and rows times the router's weights, computed in float32."""
    ids = torch.tensor([[0, 2], [1, 1]])
    grad, x, weights = random(4, 70).to(dtype), random(4, 140, seed=1).to(dtype), random(2, 2)
    arguments = (grad, x, weights, ids, None, 3, "silu", True)
    rounded = {"rtol": torch.finfo(dtype).eps / 2, "atol": torch.finfo(torch.float16).tiny}
    for actual, exact in zip(reference(*arguments)[:2], exact_gradients(*arguments), strict=False):
        torch.testing.assert_close(actual.double(), exact, **rounded)


@pytest.mark.kernel
@given(
    key=st.sampled_from(ACTIVATIONS),
    dtype=st.sampled_from(DTYPES),
    width=st.sampled_from((1, 8, 70, 1100)),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
def test_gradients(key, dtype, width, flags, device):
    """Rows of skipped slots are not read; widths beyond a block."""
    weighted, mapped, activated = flags
    ids = torch.tensor([[0, 2], [-1, 1], [3, 0], [2**31 - 1, 2]], dtype=torch.int32)
    expert_map = torch.tensor([1, 0, -1], dtype=torch.int32) if mapped else None
    columns = 2 * width if formula(key).gated else width
    grad, x = random(8, width).to(dtype), random(8, columns, seed=1, scale=4.0).to(dtype)
    weights = random(4, 2, seed=2).abs() if weighted else None
    skipped = local_experts(ids, expert_map, 3) < 0
    arguments = (grad, x, weights, ids, expert_map, 3, key, activated)
    exact, near = exact_gradients(*arguments), reference(*arguments)
    hidden = [t.masked_fill(skipped[:, None], torch.nan) for t in (grad, x)]
    moved = [t.to(device) if torch.is_tensor(t) else t for t in (*hidden, *arguments[2:])]
    found = ops.moe_activation_backward(*moved)
    for actual, within, expected in zip(found[:2], exact, near, strict=False):
        actual, used = actual.cpu(), ~skipped[: len(actual)]
        assert actual.shape == expected.shape
        compared = (x[used] for x in (actual, within, expected))
        if width == 1:  # the budget of a single number would be luck
            compared = (x.view(1, -1) for x in compared)
        assert_matches_reference(*compared)
    products = found[2].cpu().view(1, -1)
    assert not products[0, skipped].any()
    assert_matches_reference(products, exact[2].view(1, -1), near[2].view(1, -1))


@pytest.mark.kernel
def test_no_rows(device):
    ids = torch.zeros(0, 2, dtype=torch.int32, device=device)
    x = torch.zeros(0, 8, device=device)
    found = ops.moe_activation_backward(x[:, :4], x, None, ids, None, 3, "silu", True)
    assert [t.shape for t in found] == [(0, 8), (0, 4), (0, 2)]


def test_wrong_sizes():
    ids, x = torch.zeros(2, 1, dtype=torch.int32), torch.zeros(2, 8)
    how = (ids, None, 3, "silu", True)
    with pytest.raises(ValueError, match=r"grad.shape\[1\] must be 4, got 8"):
        ops.moe_activation_backward(x, x, None, *how)
    with pytest.raises(ValueError, match=r"x.shape\[0\] must be 2, got 1"):
        ops.moe_activation_backward(x[:1, :4], x[:1], None, *how)
    with pytest.raises(ValueError, match="topk_weights must have 2 entries"):
        ops.moe_activation_backward(x[:, :4], x, torch.ones(3, 1), *how)
