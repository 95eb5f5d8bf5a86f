"""Gradients of router logits: against autograd in float64, and through the routers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import DTYPES

import moe_ops
from moe_ops import ops
from moe_ops.reference.routing import topk_backward as reference
from moe_ops.routing import SCORING_FUNCS
from moe_ops.testing import assert_matches_reference

NOT_FINITE = (torch.nan, torch.inf, -torch.inf)


def exact_weights(logits, ids, renormalize, scoring, factor):
    """The weights of given experts in plain PyTorch."""
    if scoring == "softmax":
        score = logits.softmax(-1)
    elif scoring == "sigmoid":
        score = logits.sigmoid()
    else:
        score = torch.nn.functional.softplus(logits).sqrt()
    weights = score.gather(1, ids.long())
    return factor * (weights / weights.sum(-1, keepdim=True) if renormalize else weights)


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exact_gradient(grad, logits, ids, *how):
    logits = logits.double().requires_grad_()
    out = exact_weights(logits, ids, *how)
    return torch.autograd.grad(out, logits, grad.double())[0]


@pytest.mark.kernel
@given(
    sizes=st.tuples(st.integers(0, 9), st.sampled_from((1, 5, 60, 257))),
    k=st.integers(1, 10),
    how=st.tuples(st.booleans(), st.sampled_from(SCORING_FUNCS), st.sampled_from((1.0, 2.5))),
    dtype=st.sampled_from(DTYPES),
    wide=st.booleans(),
)
def test_gradient(sizes, k, how, dtype, wide, device):
    """Any choice of experts: a bias or groups may have made it."""
    tokens, experts = sizes
    k = min(k, experts)
    logits = random(tokens, experts, dtype=dtype) * 3
    ids = random(tokens, experts, seed=1).argsort(1)[:, :k].to(torch.int64 if wide else torch.int32)
    grad = random(tokens, k, seed=2)
    actual = ops.topk_backward(grad.to(device), logits.to(device), ids.to(device), *how).cpu()
    near = reference(grad, logits, ids, *how)
    assert_matches_reference(actual, exact_gradient(grad, logits, ids, *how), near)


@pytest.mark.kernel
@pytest.mark.parametrize("scoring", SCORING_FUNCS)
@pytest.mark.parametrize("renormalize", [False, True])
def test_what_has_no_gradient(scoring, renormalize, device):
    """Logits that are not finite, slots without an expert, tokens whose scores are all zero."""
    logits = random(4, 6)
    logits[0, :3] = torch.tensor(NOT_FINITE)
    logits[2] = torch.nan
    logits[3] = -1e4 if scoring != "softmax" else -torch.inf
    ids = torch.tensor([[0, 4], [-1, 2], [1, 2], [7, 3]], dtype=torch.int32)
    grad = random(4, 2, seed=1)
    grad[1, 0] = torch.nan  # of a slot that is skipped
    how = (renormalize, scoring, 1.0)
    actual = ops.topk_backward(grad.to(device), logits.to(device), ids.to(device), *how).cpu()
    near = reference(grad, logits, ids, *how)
    assert actual.isfinite().all() and not actual[~logits.isfinite()].any()
    torch.testing.assert_close(actual, near)
    only = ops.topk_backward(
        grad[1:2, 1:].to(device), logits[1:2].to(device), ids[1:2, 1:].to(device), *how
    )
    assert torch.equal(actual[1:2], only.cpu())


ROUTERS = {
    "topk": lambda x, logits, bias: moe_ops.fused_topk(x, logits, 3, True, None, "sigmoid", bias),
    "softmax": lambda x, logits, bias: moe_ops.fused_topk(x, logits, 3, False),
    "groups": lambda x, logits, bias: moe_ops.grouped_topk(
        x, logits, 3, True, 4, 2, "sigmoid", 2.5, bias
    ),
    "one group": lambda x, logits, bias: moe_ops.grouped_topk(x, logits, 3, True, 1, 1),
    "select": lambda x, logits, bias: moe_ops.select_experts(x, logits, 3, False, True)[:2],
}
HOW = {
    "topk": (True, "sigmoid", 1.0),
    "softmax": (False, "softmax", 1.0),
    "groups": (True, "sigmoid", 2.5),
    "one group": (True, "softmax", 1.0),
    "select": (True, "softmax", 1.0),
}


@pytest.mark.kernel
@pytest.mark.parametrize("name", ROUTERS)
def test_routers(name, device):
    """The same choice in grad mode; the bias has no gradient."""
    x, bias = torch.zeros(7, 4, device=device), random(16, seed=3).to(device).requires_grad_()
    logits, grad = random(7, 16), random(7, 3, seed=2)
    given = logits.to(device).requires_grad_()
    weights, ids = ROUTERS[name](x, given, bias)
    with torch.no_grad():
        expected = ROUTERS[name](x, given, bias)
    assert torch.equal(weights, expected[0]) and torch.equal(ids, expected[1])
    assert not ids.requires_grad
    weights.backward(grad.to(device))
    assert bias.grad is None
    exact = exact_gradient(grad, logits, ids.cpu(), *HOW[name])
    near = reference(grad, logits, ids.cpu(), *HOW[name])
    assert_matches_reference(given.grad.cpu(), exact, near)


def test_wrong_sizes():
    logits, ids = torch.zeros(3, 4), torch.zeros(3, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"grad.shape\[1\] must be 2, got 4"):
        ops.topk_backward(logits, logits, ids, True, "softmax", 1.0)
    with pytest.raises(ValueError, match=r"topk_ids.shape\[0\] must be 3, got 2"):
        ops.topk_backward(logits[:2, :2], logits, ids[:2], True, "softmax", 1.0)
