"""Routing with alignment: bit by bit what the two operators return."""

import pytest
import torch
from conftest import INTERPRETED
from hypothesis import given
from hypothesis import strategies as st
from routing_oracle import topk_calls

import moe_ops
from moe_ops import ops
from moe_ops.dispatch.tiles import ROW_TILES

pytestmark = pytest.mark.kernel


def in_two(logits, how, expert_map, row_tiles, local):
    weights, ids = ops.fused_topk(logits, *how)
    return weights, ids, ops.plan_slots(ids, expert_map, row_tiles, local)


@given(
    sample=topk_calls(),
    row_tiles=st.sampled_from(((4,), (16,), ROW_TILES)),
    local=st.none() | st.integers(1, 300),
)
def test_any_logits(sample, row_tiles, local, device):
    """With and without a map; on both sides of what one launch does."""
    logits, call = sample
    experts, expert_map = logits.shape[1], None
    if local is not None:
        local = min(local, experts)
        expert_map = torch.full((experts,), -1, dtype=torch.int32)
        expert_map[experts - local :] = torch.arange(local, dtype=torch.int32)
        expert_map = expert_map.to(device)
    how, sizes = call.arguments(device), (expert_map, row_tiles, local or experts)
    logits = logits.to(device)
    together = ops.topk_plan(logits, *how, *sizes)
    for one, two in zip(together, in_two(logits, how, *sizes), strict=True):
        assert one.dtype == two.dtype and one.is_contiguous() and torch.equal(one, two)


FEW = [(1, 1), (1, 512), (3, 64), (8, 32), (5, 128)]
if not INTERPRETED:
    FEW += [(3, 128), (4, 128), (8, 64), (9, 64), (8, 128), (9, 128)]


@pytest.mark.parametrize(("tokens", "experts"), FEW)
def test_few_tokens(tokens, experts, device):
    """Rows of a wider tensor, a token that has no finite logit, ids that repeat among tokens."""
    g = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(tokens, experts + 5, generator=g)).round()
    logits[-1] = torch.nan
    logits = logits.to(device)[:, :experts]
    how, sizes = (None, min(8, experts), True, "softmax", 1.0), (None, [1], experts)
    together = ops.topk_plan(logits, *how, *sizes)
    for one, two in zip(together, in_two(logits, how, *sizes), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("tokens", [1, 5])
def test_few_tokens_with_a_map(tokens, device):
    """In one launch, too, tiles are those of local experts."""
    logits = torch.randn(tokens, 16, generator=torch.Generator().manual_seed(1)).to(device)
    expert_map = (torch.arange(16, dtype=torch.int32, device=device) * 5 % 16 - 10).clamp(min=-1)
    how, sizes = (None, 6, True, "softmax", 1.0), (expert_map, [4], 6)
    together = ops.topk_plan(logits, *how, *sizes)
    for one, two in zip(together, in_two(logits, how, *sizes), strict=True):
        assert torch.equal(one, two)
    local = moe_ops.count_expert_num_tokens(together[1], 6, expert_map)
    assert 0 < int(local.sum()) < 6 * tokens
    assert int(together[2][0]) == 4 * int(((local + 3) // 4).sum())
