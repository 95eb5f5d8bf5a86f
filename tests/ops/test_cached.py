"""Products through a buffer: those of the weight itself, whatever its size and layout."""

import pytest
import torch

from moe_ops.reference import cached
from moe_ops.reference.cached import plain_product

EXPERTS = 3


def product(w, x, dtype):
    """The rows times the weight of the last expert, after those of the others."""
    multiply = plain_product(w, dtype, False)
    for expert in range(EXPERTS):
        out = torch.full((len(x), w.shape[1]), torch.nan, dtype=dtype)
        multiply(expert, (x,), out)
    return out


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_bits_of_the_weight_itself(monkeypatch, stored, turned):
    """Pieces of 64 rows, the last of which has fewer, in either layout."""
    monkeypatch.setattr(cached, "WIDENED", 64 * 48 + 5)
    w, x = torch.randn(EXPERTS, 144, 48), torch.randn(5, 48)
    w = (w.mT.contiguous().mT if turned else w).to(stored)
    expected = x @ w[-1].float().t()
    assert torch.equal(product(w, x, torch.float32), expected)


@pytest.mark.parametrize(("n", "k", "most"), [(32, 16, 32 * 16 * 4 - 1), (31, 15, 2**20)])
def test_read_where_it_is(monkeypatch, n, k, most):
    """A weight that the cache does not hold, or whose experts do not begin at cache lines."""
    w, x = torch.randn(EXPERTS, n, k), torch.randn(2, k)
    monkeypatch.setattr(cached, "CACHED", most)
    monkeypatch.setattr(torch, "empty_like", None)
    assert torch.equal(product(w, x, torch.float32), x @ w[-1].t())
