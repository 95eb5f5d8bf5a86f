"""Few slots without a plan, whose experts come in the order of their slots."""

import functools

import torch

import moe_ops
from moe_ops.reference import grouped


def test_two_tokens_share_an_expert():
    """Each token has the result that it has alone; together the slots are not in order.

    All sums are whole quarters that float32 holds, so that the bits are equal whatever the order
    in which BLAS sums.
    """
    shapes = (32, 64, 16), (32, 16, 32), (2, 16)
    w1, w2, x = (torch.randint(-1, 2, shape).float() for shape in shapes)
    weights, ids = torch.randint(1, 5, (2, 2)) / 4, torch.tensor([[7, 3], [7, 1]])
    call = functools.partial(moe_ops.fused_experts, activation="relu2")
    alone = [call(x[[t]], w1, w2, weights[[t]], ids[[t]]) for t in range(len(x))]
    together = call(x, w1, w2, weights, ids)
    assert together.count_nonzero() and torch.equal(together, torch.cat(alone))


def test_bits_are_those_by_expert(monkeypatch):
    """BLAS sums by where a row begins, so rows that begin anywhere stay in the order of experts."""
    calls = []
    for hidden, width in [(211, 103)] * 8 + [(64, 32)]:
        w1, w2 = torch.randn(8, 2 * width, hidden), torch.randn(8, hidden, width)
        x, weights, ids = torch.randn(1, hidden), torch.rand(1, 2), torch.tensor([[7, 3]])
        calls.append((x, w1, w2, weights, ids))
    found = [moe_ops.fused_experts(*call) for call in calls]
    monkeypatch.setattr(grouped, "_begin_lines", lambda *_: False)
    for call, out in zip(calls, found, strict=True):
        assert torch.equal(moe_ops.fused_experts(*call), out)
