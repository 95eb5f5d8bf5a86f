"""Rows between two expert GEMMs in expert order: where they lie, and that results are the same."""

import pytest
import torch
from conftest import INTERPRETED
from expert_order import check_both_orders, places
from hypothesis import given
from hypothesis import strategies as st
from plans import planned, row_tile
from products import plain_product
from strategies import ACTIVATIONS, DTYPES, topk_ids
from torch.utils._python_dispatch import TorchDispatchMode

import moe_ops
from moe_ops import ops
from moe_ops.dispatch.row_tiles import expert_rule
from moe_ops.dispatch.tile_plan import first_rows, unpack_plan
from moe_ops.dispatch.tiles import is_direct, one_row_tile, plan_sizes
from moe_ops.dispatch.tiles import row_tile as tile_of
from moe_ops.pipeline.gated_experts import gated_experts
from moe_ops.reference import align as reference
from moe_ops.reference.slots import local_experts
from moe_ops.tensors import Tiles
from moe_ops.testing import ROUTINGS, Problem, call, make_inputs

pytestmark = pytest.mark.kernel
DENSE = ("unquantized", torch.bfloat16)


def check_plan(plan, starts, num_slots, num_experts, rule):
    """The header, and tiles that begin where their expert does, or a tile further each time."""
    how = (num_slots, num_experts, rule)
    sizes, tile = plan_sizes(*how), tile_of(rule, num_slots, num_experts)
    _, experts, used = unpack_plan(plan, *how)
    assert plan[:4].tolist() == [int(used), sizes.experts_at, sizes.firsts_at, 0]
    experts = experts[: int(used) // tile].tolist()
    wanted = [starts[e] + tile * experts[:m].count(e) for m, e in enumerate(experts)]
    assert first_rows(plan, *how).tolist() == wanted + [-1] * (sizes.tiles - len(wanted))


@given(case=topk_ids(), local=st.none() | st.integers(1, 40), tile=st.sampled_from((1, 16, 192)))
def test_slots_lie_one_after_another(case, local, tile, device):
    ids, num_experts = case
    expert_map = None
    if local is not None:
        local = min(local, num_experts)
        expert_map = torch.arange(-1, num_experts - 1, dtype=torch.int32)
        expert_map[expert_map >= local] = -1
    mine = local_experts(ids, expert_map, local or num_experts).tolist()
    sizes = (ids.numel(), local or num_experts, one_row_tile(tile))
    starts = [sum(0 <= other < e for other in mine) for e in range(sizes[1])]
    mapped = None if local is None else expert_map.to(device)
    arguments = (ids.to(device), mapped, sizes[1], *DENSE)
    with row_tile(tile):
        check_plan(reference.plan_slots(*arguments), starts, *sizes)
        if not is_direct(*sizes[:2]):  # else kernels leave it as it is
            check_plan(ops.plan_slots(*arguments), starts, *sizes)


@pytest.mark.parametrize("num_tokens", [128, 129, 200 if INTERPRETED else 500])
@pytest.mark.parametrize("tile", [16, 192])
def test_both_sides_of_the_single_launch(num_tokens, tile, device):
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(-1, 7, (num_tokens, 8), generator=g, dtype=torch.int32)
    starts = [int(((ids >= 0) & (ids < e)).sum()) for e in range(6)]
    with row_tile(tile):
        plan = ops.plan_slots(ids.to(device), None, 6, *DENSE)
    check_plan(plan, starts, ids.numel(), 6, one_row_tile(tile))


@given(
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=9),
    most=st.sampled_from((1, 16, 40, 300)),
    tile=st.sampled_from((16, 192, None)),
    how=st.sampled_from((("unquantized",), ("int8_channel",), ("unquantized", True))),
)
def test_other_rows_stay_where_they_are(counts, most, tile, how, device):
    counts = [min(count, most) for count in counts]
    starts = [sum(counts[:e]) for e in range(len(counts))]
    offset = torch.tensor([*starts, sum(counts)], device=device)
    scheme, *mode = how
    with row_tile(tile):
        rule = expert_rule(scheme, offset.device, *mode)
        permuted = ops.plan_permuted(offset, sum(counts) + 3, *how)
        batched = ops.plan_batched(torch.tensor(counts, device=device), most, *how)
    check_plan(permuted, starts, sum(counts) + 3, len(counts), rule)
    starts = [e * most for e in range(len(counts))]
    check_plan(batched, starts, most * len(counts), len(counts), rule)


@given(
    tokens=st.sampled_from((0, 1, 5, 40)),
    k=st.integers(1, 3),
    sizes=st.sampled_from(((16, 8), (40, 24), (130, 70))),
    dtype=st.sampled_from(DTYPES),
    tile=st.sampled_from((16, 64, 192, None)),
    portable_only=st.booleans(),
    invariant=st.booleans(),
    activation=st.sampled_from(ACTIVATIONS),
    has_bias=st.booleans(),
    weighted=st.sampled_from((None, 1, 2)),
    routing=st.sampled_from(ROUTINGS),
    local=st.sampled_from((None, 3)),
    known=st.booleans(),
)
def test_both_orders(
    tokens, k, sizes, dtype, tile, portable_only, invariant,
    activation, has_bias, weighted, routing, local, known, device,
):  # fmt: skip
    """Bit by bit the same rows, whatever lies around them; ``known``: ids are given, too."""
    problem = Problem(
        tokens, 5, k, *sizes, dtype, activation, has_bias, num_local_experts=local, routing=routing
    )
    x, w1, w2, weights, ids, expert_map, b1, b2 = make_inputs(problem, device)
    first, second = (weights if weighted == gemm else None for gemm in (1, 2))
    num_experts, num_slots = w1.shape[0], ids.numel()
    slots = (ids, expert_map, num_experts)
    at = places(*slots, known and is_direct(num_slots, num_experts))
    layer = (x, w1, b1, first), (w2, b2, second)
    with row_tile(tile, portable_only=portable_only):
        plan = planned(*slots, batch_invariant=invariant)
        if known:
            how = ("unquantized", dtype, invariant)
            plan = Tiles(ops.plan_slots(*slots, *how), ids, expert_map)
        check_both_orders(*layer, plan, k, activation, at, invariant)


@pytest.mark.parametrize("max_num_tokens", [5, 40])
def test_batched_rows(max_num_tokens, device):
    """They lie by expert already: nothing changes, and padding may hold anything."""
    counts = torch.tensor([3, 0, 5], dtype=torch.int32, device=device)
    x, w1, w2, *_ = make_inputs(Problem(3 * max_num_tokens, 3, 1, 24, 16), device)
    real = (torch.arange(max_num_tokens, device=device) < counts[:, None]).flatten()
    x[~real] = torch.nan
    plan = Tiles(ops.plan_batched(counts, max_num_tokens, "unquantized"))
    for arguments, activation in (((x, w1), "silu"), ((x[:, :16], w2), "")):
        call = (*arguments, None, None, [*plan], 1, activation)
        one, two = (plain_product(ops, *call, ordered)[real] for ordered in (False, True))
        assert one.isfinite().all() and torch.equal(one, two)


class Orders(TorchDispatchMode):
    """Notes which expert GEMMs were told that rows lie in expert order."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is ops.expert_product:
            self.seen.append(True in [a for a in args if isinstance(a, bool)])
        return func(*args, **(kwargs or {}))


def test_layers_use_it(device):
    """Where nobody but the GEMMs sees the rows between them."""
    problem = Problem(40, 5, 2, 32, 16, torch.bfloat16, on_input=True)
    inputs = make_inputs(problem, device)
    with Orders() as fused:
        call(moe_ops.fused_experts, problem, inputs)
    assert fused.seen == [True, True]
    routing, gate = (inputs.topk_weights, inputs.topk_ids), lambda x: x[:, ::2]
    with Orders() as gated:
        gated_experts(*inputs[:3], *routing, gate)
    assert gated.seen == [False, False]
