"""Losses of routers and the update of the bias."""

from itertools import product

import pytest
import torch

import moe_ops
from moe_ops.functional import count_expert_num_tokens
from moe_ops.training import load_balance_loss, router_z_loss, update_expert_bias

T, E, K = 40, 8, 2


@pytest.fixture
def logits(device):
    g = torch.Generator().manual_seed(0)
    return torch.randn(T, E, generator=g).to(device).requires_grad_()


def test_load_balance_is_transformers(logits, device):
    """Value and gradient, with padding and without, for two layers at once."""
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    ids = logits.topk(K, -1).indices
    mask = (torch.arange(T, device=device) % 20 < 14).view(2, 20)
    for padding, attention in ((None, None), (~mask.flatten(), mask)):
        ours = load_balance_loss(logits, ids, is_padding=padding)
        theirs = mixtral.load_balancing_loss_func((logits,), E, K, attention)
        torch.testing.assert_close(ours, theirs)
        a, b = (torch.autograd.grad(loss, logits)[0] for loss in (ours, theirs))
        torch.testing.assert_close(a, b)


def test_an_even_load_is_best():
    even = torch.zeros(T, E)
    ids = torch.arange(T * K).view(T, K) % E
    assert load_balance_loss(even, ids).item() == pytest.approx(K)
    skewed = even.clone()
    skewed[:, :K] = 3.0
    assert load_balance_loss(skewed, torch.arange(K).expand(T, K).contiguous()) > K


def test_z_loss(logits, device):
    padding = torch.arange(T, device=device) % 3 == 0
    expected = torch.logsumexp(logits[~padding].double(), -1).square().mean()
    ours = router_z_loss(logits, is_padding=padding)
    torch.testing.assert_close(ours, expected.float())
    a, b = (torch.autograd.grad(loss, logits)[0] for loss in (ours, expected))
    torch.testing.assert_close(a, b)
    assert not a[padding].any()


def test_padding_is_left_out_whatever_it_holds(device):
    """Values and gradients have the bits of zeros in its rows; its own gradient is zero."""
    g = torch.Generator().manual_seed(1)
    some, every = torch.arange(T) % 3 == 0, torch.ones(T, dtype=torch.bool)
    ids = torch.randint(0, E, (T, K), generator=g).to(device)
    for dtype, padding in product((torch.float32, torch.bfloat16, torch.float16), (some, every)):
        padding = padding.to(device)
        clean = torch.randn(T, E, generator=g).to(device, dtype).masked_fill(padding[:, None], 0)
        for loss in (lambda z, p: load_balance_loss(z, ids, is_padding=p), z_loss):
            expected = loss_and_gradient(loss, clean, padding)
            assert not expected[1][padding].any()
            for bad in (torch.nan, torch.inf, -torch.inf):
                for columns in (slice(None), slice(1)):
                    logits = clean.clone()
                    logits[padding, columns] = bad
                    found = loss_and_gradient(loss, logits, padding)
                    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def z_loss(logits, padding):
    return router_z_loss(logits, is_padding=padding)


def loss_and_gradient(loss, logits, padding):
    leaf = logits.clone().requires_grad_()
    value = loss(leaf, padding)
    return value, torch.autograd.grad(value.double(), leaf)[0]


def test_no_tokens(device):
    logits = torch.zeros(0, E, device=device, requires_grad=True)
    ids = torch.zeros(0, K, dtype=torch.int64, device=device)
    for loss in (load_balance_loss(logits, ids), router_z_loss(logits)):
        loss.backward()
        assert loss.item() == 0


def test_the_bias_balances(device):
    """A skewed router is even after some hundred updates, without a loss."""
    g = torch.Generator().manual_seed(1)
    logits = (torch.randn(2000, E, generator=g) + torch.linspace(-1, 1, E)).to(device)
    x, bias, spread = torch.zeros(2000, 1, device=device), torch.zeros(E, device=device), []
    for _ in range(300):
        _, ids = moe_ops.fused_topk(x, logits, K, True, None, "sigmoid", bias)
        counts = count_expert_num_tokens(ids, E)
        update_expert_bias(bias, counts, 0.005)
        spread.append((counts.max() / counts.float().mean()).item())
    assert spread[0] > 2 and spread[-1] < 1.1


def test_a_step_of_the_bias():
    """Towards the mean, which is not the median; large numbers are compared exactly."""
    for counts, signs in (
        ([10, 0, 1, 1, 3], [-1, 1, 1, 1, 0]),
        ([2**24, 2**24 + 2, 2**24 + 1, 2**24 + 1], [1, -1, 0, 0]),
    ):
        bias = torch.zeros(len(counts))
        update_expert_bias(bias, torch.tensor(counts))
        torch.testing.assert_close(bias, 0.001 * torch.tensor(signs))


def test_losses_of_half_precision_and_of_ids_that_are_not_counted(logits, device):
    """Logits are widened first; tokens without an expert count as tokens."""
    half, ids = logits.detach().bfloat16(), logits.topk(K, -1).indices
    assert torch.equal(router_z_loss(half), router_z_loss(half.float()))
    loss = load_balance_loss(half, ids)
    assert torch.equal(loss, load_balance_loss(half.float(), ids))
    skipped = load_balance_loss(half, torch.cat((ids[:, :1], torch.full_like(ids[:, :1], E)), 1))
    torch.testing.assert_close(skipped, load_balance_loss(half, ids[:, :1]))


def test_errors(logits):
    ids = torch.zeros(T - 1, K, dtype=torch.int64)
    with pytest.raises(ValueError, match="topk_ids must have the 40 tokens of router_logits"):
        load_balance_loss(logits.cpu(), ids)
    with pytest.raises(TypeError, match="is_padding must have a dtype"):
        router_z_loss(logits.cpu(), is_padding=torch.zeros(T))
    with pytest.raises(ValueError, match=r"expert_num_tokens.shape\[0\] must be the number of"):
        update_expert_bias(torch.zeros(E), torch.zeros(E - 1))
    with pytest.raises(TypeError, match="expert_num_tokens must have a dtype"):
        update_expert_bias(torch.zeros(E), torch.zeros(E, dtype=torch.complex64))
