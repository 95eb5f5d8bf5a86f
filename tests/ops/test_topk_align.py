"""Routing with alignment: bit by bit what the two operators return."""

import pytest
import torch
from conftest import INTERPRETED
from hypothesis import given
from hypothesis import strategies as st
from plans import row_tile
from routing_oracle import topk_calls

import moe_ops
from moe_ops import ops

pytestmark = pytest.mark.kernel


DENSE = ("unquantized", torch.bfloat16)


def check(logits, how, tile, *plan):
    """Returns what both ways made, with plans of a row tile, or (None) of the load's."""
    with row_tile(tile):
        together = ops.topk_plan(logits, *how, *plan)
        weights, ids = ops.fused_topk(logits, *how)
        in_two = weights, ids, ops.plan_slots(ids, *plan)
    for one, two in zip(together, in_two, strict=True):
        assert one.dtype == two.dtype and one.is_contiguous() and torch.equal(one, two)
    return together


@given(
    sample=topk_calls(),
    tile=st.sampled_from((4, 16, None)),
    rule=st.sampled_from((DENSE, ("fp8_channel", torch.float16), (*DENSE, True))),
    local=st.none() | st.integers(1, 300),
)
def test_any_logits(sample, tile, rule, local, device):
    """With and without a map; on both sides of what one launch does."""
    logits, call = sample
    experts, expert_map = logits.shape[1], None
    if local is not None:
        local = min(local, experts)
        expert_map = torch.full((experts,), -1, dtype=torch.int32)
        expert_map[experts - local :] = torch.arange(local, dtype=torch.int32)
        expert_map = expert_map.to(device)
    how = call.arguments(device)
    check(logits.to(device), how, tile, expert_map, local or experts, *rule)


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
    check(logits, (None, min(8, experts), True, "softmax", 1.0), 1, None, experts, *DENSE)


@pytest.mark.parametrize("tokens", [1, 5])
def test_few_tokens_with_a_map(tokens, device):
    """In one launch, too, tiles are those of local experts."""
    logits = torch.randn(tokens, 16, generator=torch.Generator().manual_seed(1)).to(device)
    expert_map = (torch.arange(16, dtype=torch.int32, device=device) * 5 % 16 - 10).clamp(min=-1)
    how = (None, 6, True, "softmax", 1.0)
    together = check(logits, how, 4, expert_map, 6, *DENSE)
    local = moe_ops.functional.count_expert_num_tokens(together[1], 6, expert_map)
    assert 0 < int(local.sum()) < 6 * tokens
    assert int(together[2][0]) == 4 * int(((local + 3) // 4).sum())
