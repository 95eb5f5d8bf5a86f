"""Numbers that only the device sees, and that nobody can check before: any of them is safe.

Ids, maps, counts, offsets, orders, plans and floats are anything. In the interpreter every access
is checked (`checked_memory`). What is specified of them is what the reference makes of them.
"""

import importlib

import pytest
import torch
from conftest import HAS_CUDA, INTERPRETED
from operator_samples import COPIED, called, keywords, outputs, overload
from plans import row_tile
from products import plain_product

from moe_ops import ops
from moe_ops.dispatch.tiles import PLAN_HEADER
from moe_ops.ops import STAGES
from moe_ops.scheme import parse_quant

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


def hostile_calls(qualified, device):
    """All integers and bits are others, then floats, too; a plan keeps its header once."""
    for number, call in enumerate(called(qualified, device)):
        for seed in range(2):
            changed = {
                name: hostile(x, 10 * number + seed + at)
                for at, (name, x) in enumerate(call.items())
                if torch.is_tensor(x)
                and name != "state"  # which holds an address
                and (seed or not x.dtype.is_floating_point)
            }
            if "tiles" in call:
                changed["tiles"] = hostile_tiles(call["tiles"], 10 * number + seed)
                if seed and call["tiles"][0] is not None:
                    changed["tiles"][0][:PLAN_HEADER] = call["tiles"][0][:PLAN_HEADER]
            yield {**call, **changed}


def hostile_tiles(tiles, seed):
    """A plan, ids and a map of any numbers, as far as they are given."""
    return [None if x is None else hostile(x, seed + at) for at, x in enumerate(tiles)]


def check(qualified, call, device):
    """Integers, and floats that are only moved, are those of the reference."""
    module = importlib.import_module(f"moe_ops.reference.{STAGES[qualified]}")
    load, inputs = call.get("expert_load_view"), tuple(call.values())
    again = call if load is None else {**call, "expert_load_view": load.clone()}
    result = outputs(overload(qualified)(**call, **keywords(qualified, inputs)))
    if device == "cuda":
        torch.cuda.synchronize()
    elif not INTERPRETED:
        return
    reference = getattr(module, qualified.replace(".", "_"))
    expected = outputs(reference(**again, **keywords(qualified, inputs)))
    if load is not None:
        assert torch.equal(load, again["expert_load_view"])
    for actual, wanted in zip(result, expected, strict=True):
        if wanted.dtype in INDICES:
            assert torch.equal(actual, wanted)
        elif STAGES[qualified] in MOVED:
            torch.testing.assert_close(actual, wanted, equal_nan=True)


@pytest.mark.parametrize("qualified", COPIED)
def test_any_numbers(qualified, device):
    for call in hostile_calls(qualified, device):
        check(qualified, call, device)


COUNTED = [
    (qualified, name)
    for qualified in STAGES
    for name in ("expert_num_tokens", "expert_first_token_offset", "num_valid_tokens")
    if name in [argument.name for argument in overload(qualified)._schema.arguments]
]


@pytest.mark.parametrize(("qualified", "name"), COUNTED)
def test_counts_and_offsets_that_are_all_one_number(qualified, name, device):
    calls = [call for call in called(qualified, device) if call[name] is not None]
    for call in calls[-2:]:
        for number in (-(2**31), 2**31 - 1, -(2**31) - 5, 2**62):
            if call[name].dtype == torch.int64 or abs(number) <= 2**31:
                counts = torch.full_like(call[name], number)
                check(qualified, {**call, name: counts}, device)


HEADERS = [
    (16, 37, 40),
    (48, 37, 40),
    (-16, 37, 40),
    (16, 3, 40),
    (16, -(2**31), 40),
    (16, -(2**31), -1),
    (16, 37, 37),
    (16, 37, 43),
    (16, 10**6, 2 * 10**6),
    (16, 37, -(2**31)),
    (2**31 - 1, 2**31 - 1, 2**31 - 1),
]
"""Rows in use, where experts and where first rows begin: the first is right."""


def planned_problem(device):
    """18 slots of one expert, tiles of 16 rows: a plan of 4 + 33 + 3 + 3 entries."""
    ids = torch.zeros(18, 1, dtype=torch.int32, device=device)
    with row_tile(16):
        plan = ops.plan_slots(ids, None, 1, "unquantized", torch.float32)
    assert plan.tolist()[1:3] == [37, 40] and len(plan) == 43
    return plan, torch.ones(18, 16, device=device)


def multiply(x, plan, device):
    """Both GEMMs with permuted rows between them."""
    with row_tile(16):
        for activation in ("silu_no_mul", ""):
            rest = ([plan, None, None], 1, activation, True)
            plain_product(ops, x, x[None, :16], None, None, *rest)
    if device == "cuda":
        torch.cuda.synchronize()


@pytest.mark.parametrize("header", HEADERS)
def test_headers_of_plans(header, device):
    """A plan whose parts do not lie in it, one after the other, has no tiles."""
    plan, x = planned_problem(device)
    plan[:3], plan[37:40] = torch.tensor(header), 0
    multiply(x, plan, device)


@pytest.mark.parametrize("first", [-(2**31), -5, 17, 30, 2**31 - 1])
def test_rows_in_expert_order_that_begin_anywhere(first, device):
    plan, x = planned_problem(device)
    plan[40:] = first
    multiply(x, plan, device)


@pytest.mark.skipif(not (INTERPRETED or HAS_CUDA), reason="runs kernels")
@pytest.mark.parametrize("entries", [HEADERS[0], (2**31 - 1, 37, 40), (-1, 37, 40)])
@pytest.mark.parametrize("slot", [-(2**31), -1, 18, 2**31 - 1])
def test_rows_are_packed_inside_their_tensors(entries, slot, device):
    from moe_ops.kernels._hopper.pack import pack_rows, quantize_rows

    plan, x = planned_problem(device)
    plan[:3], plan[4:20:2] = torch.tensor(entries), slot
    pack_rows(x, x[:, :1].contiguous(), plan, 18, 36, 1)
    quantize_rows(x, None, parse_quant("fp8:1x16:float32"), plan, 18, 36, 1)
    if device == "cuda":
        torch.cuda.synchronize()
