"""Hopper's kernel of weight gradients on the CPU, against float64.

On a GPU `test_expert_wgrad` runs it.
"""

import pytest
import torch
from conftest import INTERPRETED

if not INTERPRETED:
    pytest.skip("runs kernels in the interpreter", allow_module_level=True)

from gluon_interpreter import interpreted  # noqa: E402
from plans import ids_of, partly_full, planned, row_tile  # noqa: E402

from moe_ops.kernels.expert_wgrad import launch_on_hopper  # noqa: E402
from moe_ops.reference import expert_wgrad as reference  # noqa: E402
from moe_ops.reference.slots import local_experts  # noqa: E402
from moe_ops.testing import assert_matches_reference  # noqa: E402

pytestmark = pytest.mark.kernel


def rows(count, width, dtype, seed):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(ids, num_experts, n, k, tile, dtype=torch.bfloat16, out_dtype=None, by_token=(False, True)):
    """The gradients are within the budget of the reference; rows that nobody needs are NaN."""
    slots = ids.numel()
    count = [len(ids) if shared else slots for shared in by_token]
    dy, x = rows(count[0], n, dtype, 0), rows(count[1], k, dtype, 1)
    expert = local_experts(ids, None, num_experts).flatten()
    for each in (dy, x):
        used = torch.zeros(len(each), dtype=torch.bool)
        used[torch.arange(slots)[expert >= 0] // (slots // len(each))] = True
        each[~used] = torch.nan
    out = torch.full((num_experts, n, k), torch.nan, dtype=out_dtype or dtype)
    with row_tile(tile):
        plan = planned(ids, None, num_experts).plan
        with interpreted(3):
            launch_on_hopper(out, dy, x, plan, slots, tile)
        near = reference.expert_wgrad(
            dy, x, None, [plan, ids, None], num_experts, "unquantized", out.dtype
        )
    d, r = (each.double().repeat_interleave(slots // len(each), 0) for each in (dy, x))
    exact = torch.stack([d[expert == e].t() @ r[expert == e] for e in range(num_experts)])
    assert not out[torch.bincount(expert[expert >= 0], minlength=num_experts) == 0].any()
    as_rows = (num_experts, -1)
    assert_matches_reference(out.view(as_rows), exact.view(as_rows), near.view(as_rows))


@pytest.mark.parametrize("tile", [64, 128, 192])
def test_every_row_tile(tile):
    """Experts without rows, with one, and with each part of two tiles; several turns of the ring."""
    counts = [0, 700, *partly_full(tile), 0]
    check(ids_of(counts, 2), len(counts), 128, 256, tile)
