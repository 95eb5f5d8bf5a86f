"""Few slots of many experts, of which one program of alignment places two or four."""

import pytest
import torch
from looped_plan import assert_plan, looped
from plans import ids_of

from moe_ops import ops
from moe_ops.kernels._sort.plan import plan_programs
from moe_ops.reference.align import plan_slots

pytestmark = pytest.mark.kernel


def skewed_ids(num_experts):
    """One expert has 500 slots, those beside it none, one and three, the others up to two."""
    counts = [e % 3 for e in range(num_experts)]
    counts[4:8] = 0, 500, 1, 3
    return ids_of(counts, top_k=10)


@pytest.mark.parametrize("tile", [1, 16, 192])
@pytest.mark.parametrize(("num_experts", "each"), [(250, 2), (300, 4)])
def test_a_large_expert_between_small_ones(num_experts, each, tile, device):
    """More rows of padding, and more tiles, than are written at once."""
    assert plan_programs(num_experts) == -(-num_experts // each)
    ids = skewed_ids(num_experts)
    plan = ops.plan_slots(ids.to(device), None, [tile], num_experts)
    assert torch.equal(plan.cpu(), plan_slots(ids, None, [tile], num_experts))


@pytest.mark.parametrize("ignore", [False, True])
def test_names_of_tiles(ignore, device):
    """Tiles are called as the map says: by slots that are mapped, or by experts that are."""
    num_experts, g = 300, torch.Generator().manual_seed(0)
    ids = skewed_ids(num_experts)
    expert_map = torch.randperm(num_experts, generator=g, dtype=torch.int32)
    expert_map[::3] = -1
    plan = ops.moe_align_block_size(
        ids.to(device), expert_map.to(device), [16], num_experts, False, ignore
    )
    assert_plan(plan, looped(ids, 16, num_experts, expert_map.tolist(), ignore))
