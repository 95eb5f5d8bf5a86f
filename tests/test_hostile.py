"""Numbers that only the device sees, and that nobody can check before: any of them is safe.

Ids, maps, counts, offsets, orders, plans and floats are anything. In the interpreter every access
is checked (`checked_memory`).
"""

import importlib

import pytest
import torch
from test_ops import keywords, outputs, overload, samples

from moe_ops.ops import STAGES

pytestmark = pytest.mark.kernel

NEAR = [0, 1, 2, 3, 0, 1, 4, 5, 12, -1]
"""Experts, slots, rows and words that there are, or nearly."""
FAR = [-2, 16, 2**16, 2**31 - 1, -(2**31)]
FARTHER = [2**32, 2**32 + 1, -(2**32), 2**40, 2**62, -(2**63)]
"""Some of these are experts once they are cut to 32 bits."""
FLOATS = [torch.nan, torch.inf, -torch.inf, 3e38, -3e38, 0.0, 1.0, -1.0]


def hostile(x, seed):
    """Any numbers in a tensor like ``x``."""
    if not torch.is_tensor(x):
        return x
    g, flat = torch.Generator().manual_seed(seed), torch.empty(x.shape)
    if x.dtype in (torch.int32, torch.int64):
        values = NEAR + FAR + (FARTHER if x.dtype == torch.int64 else [])
    elif x.dtype.is_floating_point and x.itemsize > 1:
        values = FLOATS
    else:
        filled = torch.randint(256, x.shape, generator=g).to(torch.uint8)
        return (filled > 127 if x.dtype == torch.bool else filled.view(x.dtype)).to(x.device)
    chosen = torch.randint(len(values), flat.shape, generator=g)
    filled = torch.tensor(values, dtype=x.dtype if x.dtype == torch.int64 else None)[chosen]
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(filled)


def calls(qualified, device):
    """The samples of an operator with other numbers in all of their tensors, or in integers."""
    for number, arguments in enumerate(samples(device)[qualified]):
        for seed in range(2):
            yield tuple(hostile(x, 10 * seed + number + at) for at, x in enumerate(arguments))


@pytest.mark.parametrize("qualified", STAGES)
def test_any_numbers_stay_inside(qualified, device):
    for arguments in calls(qualified, device):
        overload(qualified)(*arguments, **keywords(qualified, arguments))
        if device == "cuda":
            torch.cuda.synchronize()
