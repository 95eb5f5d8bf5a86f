"""Numbers that only the device sees, and that nobody can check before: any of them is safe.

Ids, maps, counts, offsets, orders, plans and floats are anything. In the interpreter every access
is checked (`checked_memory`). What is specified of them is what the reference makes of them.
"""

import importlib
from functools import cache

import pytest
import torch
from conftest import INTERPRETED
from test_ops import keywords, outputs, overload, samples

from moe_ops.ops import STAGES
from moe_ops.tiles import PLAN_HEADER

pytestmark = pytest.mark.kernel

NEAR = [0, 1, 2, 3, 0, 1, 4, 5, 12, -1]
"""Experts, slots, rows and words that there are, or nearly."""
FAR = [-2, 16, 2**16, 2**31 - 1, -(2**31)]
FARTHER = [2**32, 2**32 + 1, -(2**32), -(2**31) - 5, 2**40, 2**62, -(2**63)]
"""Some of these are experts once they are cut to 32 bits."""
FLOATS = [torch.nan, torch.inf, -torch.inf, 1e15, -1e15, 0.0, 1.0, -1.0]
INDICES = (torch.int32, torch.int64)
MOVED = ("permute", "routing_adjust", "weight_and_reduce")
"""Stages whose floats are those of the reference, too."""


def hostile(x, seed):
    """A tensor like ``x`` of any numbers."""
    g = torch.Generator().manual_seed(seed)
    if x.dtype in INDICES:
        values = NEAR + FAR + (FARTHER if x.dtype == torch.int64 else [])
    elif x.dtype.is_floating_point and x.itemsize > 1:
        values = FLOATS
    else:
        data = torch.randint(256, x.shape, generator=g).to(torch.uint8)
        return (data > 127 if x.dtype == torch.bool else data.view(x.dtype)).to(x.device)
    data = torch.tensor(values)[torch.randint(len(values), x.shape, generator=g)]
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(data)


def two_slots(call):
    """A GEMM of two slots, whose ids tell its tiles: no plan is read."""
    rows, k = 2 // call["top_k"], len(call["a"])
    cut = {name: x[:rows] for name, x in call.items() if name in ("a", "a_scale") and len(x) == k}
    weights = {name: x[:1] for name, x in call.items() if "put_weights" in name and x is not None}
    ids = torch.empty(1, 2, dtype=torch.int32, device=call["a"].device)
    return {**call, **cut, **weights, "plan": None, "topk_ids": ids, "expert_map": ids.new_empty(5)}


@cache
def called(qualified, device):
    """Calls of an operator by argument: its samples, and what else takes another way."""
    names = [argument.name for argument in overload(qualified)._schema.arguments]
    several = [dict(zip(names, call, strict=False)) for call in cached_samples(device)[qualified]]
    if "top_k" in names and "plan" in names:
        several += [two_slots(several[0])]
    if "expert_num_tokens" in names:
        counts = several[0]["expert_num_tokens"].long()
        several += [{**several[0], "expert_num_tokens": counts}]
    return several


cached_samples = cache(samples)


def hostile_calls(qualified, device):
    """All integers and bits are others, then floats, too; a plan keeps its header once."""
    for number, call in enumerate(called(qualified, device)):
        for seed in range(2):
            changed = {
                name: hostile(x, 10 * number + seed + at)
                for at, (name, x) in enumerate(call.items())
                if torch.is_tensor(x) and (seed or not x.dtype.is_floating_point)
            }
            if "plan" in changed and seed:
                changed["plan"][:PLAN_HEADER] = call["plan"][:PLAN_HEADER]
            yield {**call, **changed}


@pytest.mark.parametrize("qualified", STAGES)
def test_any_numbers_are_safe(qualified, device):
    """Integers, and floats that are only moved, are those of the reference."""
    module = importlib.import_module(f"moe_ops.reference.{STAGES[qualified]}")
    reference = getattr(module, qualified.replace(".", "_"))
    for call in hostile_calls(qualified, device):
        extra = keywords(qualified, tuple(call.values()))
        load = call.get("expert_load_view")
        again = call if load is None else {**call, "expert_load_view": load.clone()}
        result = outputs(overload(qualified)(**call, **extra))
        if device == "cuda":
            torch.cuda.synchronize()
        elif not INTERPRETED:
            continue
        expected = outputs(reference(**again, **keywords(qualified, tuple(call.values()))))
        if load is not None:
            assert torch.equal(load, again["expert_load_view"])
        for actual, wanted in zip(result, expected, strict=True):
            if wanted.dtype in INDICES:
                assert torch.equal(actual, wanted)
            elif STAGES[qualified] in MOVED:
                torch.testing.assert_close(actual, wanted, equal_nan=True)
