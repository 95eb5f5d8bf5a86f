"""Few slots without a plan, whose experts come in the order of their slots."""

import torch

import moe_ops


def test_two_tokens_share_an_expert():
    """Each token has the result that it has alone; together the slots are not in order."""
    w1, w2 = torch.randn(32, 64, 16), torch.randn(32, 16, 32)
    x, weights, ids = torch.randn(2, 16), torch.rand(2, 2), torch.tensor([[7, 3], [7, 1]])
    alone = [moe_ops.fused_experts(x[[t]], w1, w2, weights[[t]], ids[[t]]) for t in range(len(x))]
    together = moe_ops.fused_experts(x, w1, w2, weights, ids)
    torch.testing.assert_close(together, torch.cat(alone))
