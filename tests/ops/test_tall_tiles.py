"""Tiles of 192 rows where the kernel for all GPUs takes a third at a time, and who gets them."""

from dataclasses import replace

import pytest
import torch
from conftest import INTERPRETED
from expert_order import check_both_orders, places
from gemm_rows import compare, exact_rows
from hypothesis import given
from hypothesis import strategies as st
from pairwise import half_exhaustive
from planning import problem_of_call
from plans import ids_of, planned, row_tile
from products import plain_product
from strategies import topk_ids
from tuned_entries import entry, own, record
from tuned_entries import layer as read

import moe_ops
from moe_ops import FusedMoEConfig, RoutingMethodType, ops
from moe_ops.activation import formula
from moe_ops.dispatch import GemmProblem, tuned
from moe_ops.dispatch.device import device_facts, plain_name, row_tile_facts
from moe_ops.dispatch.gemm_plan import plan_gemm
from moe_ops.dispatch.hopper import PACKED, STREAM, HopperTiles
from moe_ops.dispatch.plan import BufferSpec
from moe_ops.dispatch.portable import gemm_tiles
from moe_ops.dispatch.row_tiles import HOPPER, PORTABLE
from moe_ops.dispatch.tile_plan import first_rows, split_tiles, unpack_plan
from moe_ops.dispatch.tiles import (
    ROW_TILES,
    Gemm,
    TileConfig,
    cuts_up,
    max_programs,
    max_row_tiles,
    one_row_tile,
    plan_sizes,
)
from moe_ops.dispatch.tuned_file import written
from moe_ops.inspect.devices import TARGETS
from moe_ops.reference import expert_product as reference
from moe_ops.reference.align import plan_slots
from moe_ops.reference.slots import local_experts
from moe_ops.tensors import Tiles
from moe_ops.testing import Problem, make_inputs

TALL = one_row_tile(192)
DENSE = ("unquantized", torch.bfloat16)
H200 = TARGETS["sm_90"].facts
COUNTS = (0, 1, 63, 64, 65, 128, 129, 191, 192, 193)


# Plans that are cut up


def contents(plan, num_slots, num_experts, rule, tile, count):
    """``{(expert, row in expert order, slot)}`` of a plan's first tiles, by another tile."""
    slots, *_ = unpack_plan(plan, num_slots, num_experts, rule)
    experts, firsts = plan[plan[1] :][:count].tolist(), plan[plan[2] :][:count].tolist()
    found = set()
    for m, (expert, first) in enumerate(zip(experts, firsts, strict=True)):
        for row, slot in enumerate(slots[m * tile : (m + 1) * tile].tolist()):
            if slot < num_slots:
                found.add((expert, first + row, slot))
    return found


@given(
    case=topk_ids(max_tokens=200),
    one=st.booleans(),
    local=st.none() | st.integers(1, 40),
    block_m=st.sampled_from((16, 64)),
)
def test_a_plan_that_is_cut_up(case, one, local, block_m):
    """It holds what a plan of the smaller tiles holds; what nobody has is of no expert."""
    (ids, num_experts), expert_map = case, None
    if one:
        ids = torch.where(ids >= 0, ids.new_tensor(num_experts // 2), ids)
    if local is not None:
        local = min(local, num_experts)
        expert_map = torch.arange(-1, num_experts - 1, dtype=torch.int32)
        expert_map[expert_map >= local] = -1
    num_slots, num_experts = ids.numel(), local or num_experts
    with row_tile(192):
        plan = plan_slots(ids, expert_map, num_experts, *DENSE)
    before = plan.clone()
    split = split_tiles(plan, num_slots, num_experts, TALL, block_m)
    assert torch.equal(plan, before) and split.dtype == plan.dtype and split.is_contiguous()
    sizes = plan_sizes(num_slots, num_experts, TALL)
    count = sizes.tiles * 192 // block_m
    assert split[:4].tolist() == [int(plan[0]), sizes.experts_at, sizes.experts_at + count, 0]
    assert len(split) == sizes.experts_at + 2 * count
    assert torch.equal(split[4 : sizes.experts_at], plan[4 : sizes.experts_at])
    used = int(plan[0]) // block_m
    assert (split[split[1] :][used:count] == -1).all()
    with row_tile(block_m):
        small = plan_slots(ids, expert_map, num_experts, *DENSE)
    rule, count_small = one_row_tile(block_m), int(small[0]) // block_m
    wanted = contents(small, num_slots, num_experts, rule, block_m, count_small)
    found = contents(split, num_slots, num_experts, TALL, block_m, used)
    assert found == wanted
    expert = local_experts(ids, expert_map, num_experts).flatten()
    assert len(found) == int((expert >= 0).sum())
    # Tiles of padding alone still name the expert of the tall tile that they are of.
    _, experts, _ = unpack_plan(plan, num_slots, num_experts, TALL)
    assert torch.equal(split[split[1] :][:count], experts.repeat_interleave(192 // block_m))
    firsts = first_rows(plan, num_slots, num_experts, TALL)
    assert torch.equal(split[split[2] :][:: 192 // block_m], firsts)


@pytest.mark.parametrize("rows", [1, 100, 4000])
def test_programs_for_all_of_a_cut_up_plan(rows):
    gemm = Gemm(rows, 8, 200, 128, 2, 2, TALL)
    tiles = gemm_tiles(gemm, H200)
    assert tiles.block_m == cuts_up(gemm, tiles) == 64
    columns = -(-200 // tiles.block_n)
    assert max_programs(gemm, tiles) == 3 * max_row_tiles(rows, 8, 192) * columns
    for tile in ROW_TILES:
        same = gemm._replace(rule=one_row_tile(tile))
        found = gemm_tiles(same, H200)
        assert found.block_m == tile and cuts_up(same, found) is None
        assert max_programs(same, found) == max_row_tiles(rows, 8, tile) * -(-200 // found.block_n)


# Products of such plans


def inputs_of(counts, k, n, device, top_k=2, halves=1):
    """Rows, a weight, a bias, routing weights and ids, of so many slots an expert."""
    ids, g = ids_of(counts, top_k), torch.Generator().manual_seed(0)
    x = torch.randn(len(ids), k, generator=g).bfloat16()
    w = (torch.randn(len(counts), halves * n, k, generator=g) / k**0.5).bfloat16()
    bias = torch.randn(len(counts), halves * n, generator=g).bfloat16()
    weights = torch.rand(len(ids), top_k, generator=g)
    return x, w, bias, weights, ids


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("portable_only", "counts", "weight_dtype", "activation"),
    half_exhaustive(
        [False, True],
        [COUNTS, (3, 400, 0), (1,), (2, 0, 5)],
        [None, torch.float32, torch.bfloat16],
        [None, "silu", "swigluoai", "relu2_no_mul"],
        where=INTERPRETED,
    ),
    ids=str,
)
def test_products(counts, portable_only, weight_dtype, activation, device):
    """Of Hopper's own kernel, where it runs, and of the one for all GPUs."""
    rule = None if activation is None else formula(activation)
    gated = rule is not None and rule.gated
    given = inputs_of(counts, 48, 40, device, halves=2 if gated else 1)
    x, w, bias, weights, ids = given
    inputs = None if weight_dtype is None else weights.to(weight_dtype)
    on = [None if t is None else t.to(device) for t in (x, w, bias, inputs)]
    exact = exact_rows(x, w, bias, inputs, ids, 2)
    with row_tile(192, portable_only=portable_only):
        there, here = (planned(i, None, len(counts)) for i in (ids.to(device), ids))
        actual = plain_product(ops, *on, [*there], 2, activation or "")
        expected = plain_product(reference, x, w, bias, inputs, here, 2, activation or "")
    if rule is not None:
        exact = exact.activated(rule)
    compare(actual, exact, expected, ids, len(counts))


@pytest.mark.kernel
@pytest.mark.parametrize("portable_only", [False, True])
@pytest.mark.parametrize("weighted", [None, 1, 2])
def test_both_orders(portable_only, weighted, device):
    """Rows between two products lie one after another, across tall tiles that are not full."""
    problem = Problem(3, len(COUNTS), 2, 40, 24, torch.bfloat16, has_bias=True)
    _, w1, w2, _, _, _, b1, b2 = make_inputs(problem, device)
    x, _, _, weights, ids = (t.to(device) for t in inputs_of(COUNTS, 40, 24, device))
    first, second = (weights if weighted == gemm else None for gemm in (1, 2))
    at = places(ids, None, len(COUNTS), False)
    layer = (x, w1, b1, first), (w2, b2, second)
    with row_tile(192, portable_only=portable_only):
        check_both_orders(*layer, planned(ids, None, len(COUNTS)), 2, "silu", at)


@pytest.mark.kernel
@pytest.mark.parametrize("tokens", [1, 2, 40])
def test_tall_tiles_that_nobody_asked_for(tokens, device):
    """With the ids at hand: few slots have no plan, others are cut up; the same numbers."""
    problem = Problem(tokens, 32, 2, 48, 40, torch.bfloat16, routing="holes")
    x, w, _, _, ids, *_ = make_inputs(problem, device)
    made = []
    for tile in (64, 192):
        with row_tile(tile):
            tiles = [ops.plan_slots(ids, None, 32, *DENSE), ids, None]
            made.append(plain_product(ops, x, w, None, None, tiles, 2, "silu"))
    real = local_experts(ids, None, 32).flatten() >= 0
    assert torch.equal(made[0][real], made[1][real])


@pytest.mark.kernel
@pytest.mark.parametrize("activation", ["", "silu"])
@pytest.mark.parametrize("transposed", [False, True])
def test_portable_kernels_sort_the_slots_again(activation, transposed, device):
    """With the routing known, in tiles of 128 rows: weights lie transposed in a data gradient."""
    experts, n, k = len(COUNTS), 40, 48
    x, w, bias, weights, ids = inputs_of(COUNTS, k, n, device, halves=2 if activation else 1)
    expert_map = torch.arange(experts, dtype=torch.int32)
    expert_map[[3, 6]] = -1
    if transposed:
        w = w.transpose(1, 2).contiguous().transpose(1, 2)
    exact = exact_rows(x, w, bias, weights, ids, 2)
    rows = [t.to(device) for t in (x, w, bias, weights)]
    given = ids.to(device), expert_map.to(device)
    with row_tile(192):
        tiles = [ops.plan_slots(*given, experts, *DENSE), *given]
        actual = plain_product(ops, *rows, tiles, 2, activation)
        order = torch.zeros(ids.numel(), n, dtype=x.dtype, device=device)
        if activation:
            order = plain_product(ops, *rows, tiles, 2, activation, True)
    cut = Tiles(plan_slots(ids, expert_map, experts, *DENSE), ids, expert_map)
    expected = plain_product(reference, x, w, bias, weights, cut, 2, activation)
    if activation:
        exact = exact.activated(formula(activation))
        held = local_experts(ids, expert_map, experts).flatten()
        sorted_rows = held.argsort(stable=True)[(held < 0).sum() :]
        assert torch.equal(order.cpu()[: len(sorted_rows)], actual.cpu()[sorted_rows])
    compare(actual, exact, expected, expert_map[ids].where(ids >= 0, -1), experts)


@pytest.mark.parametrize(("known", "rows"), [(True, 128), (False, 64)])
def test_a_plan_for_portable_kernels(known, rows, monkeypatch):
    """Another plan is scratch memory; without the routing a kernel takes thirds of 192 rows."""
    monkeypatch.setattr(tuned, "TABLES", tuned.tables([]))
    x, w, _, _, ids = inputs_of([500, 524] * 4, 256, 512, "cpu")
    with row_tile(192, H200):
        plan = plan_slots(ids, None, 8, *DENSE)
        tiles = [plan, ids if known else None, None]
        problem = problem_of_call("expert_product", a=x, w=w, tiles=tiles, top_k=2, boxes=False)
        found = plan_gemm(problem, H200)
    assert found.config.block_m == rows
    entries = plan_sizes(ids.numel(), 8, one_row_tile(128)).entries
    assert found.scratch == ((BufferSpec("plan", 4 * entries),) if known else ())


# Who gets them


@pytest.mark.parametrize("on_demand", [False, True])
def test_what_is_written_is_read(on_demand):
    tiles = HopperTiles(PACKED, 192, 256, 3, 3, on_demand)
    assert written(tiles)["ON_DEMAND"] is on_demand
    (found,) = read(record(_500=entry(192, written(tiles), written(tiles)))).entries
    assert found.gemm1 == found.gemm2 == tiles
    streamed, plain = HopperTiles(STREAM, 16, 128, 1, 5), TileConfig(16, 64, 32, 8, 4, 3)
    content = record(_4=entry(16, written(streamed), written(plain)))
    (found,) = read(content, scheme="fp8_channel").entries
    assert (found.gemm1, found.gemm2) == (streamed, plain)


def test_files_without_the_way_of_tiles_deal_them_out():
    """As all did before there was another."""
    (found,) = read(record(_5=entry(64, own(), own()))).entries
    assert found.gemm1.on_demand is False


@pytest.fixture
def chosen(monkeypatch):
    """Plans GEMM 1 of a gated layer with tuned files."""

    def choose(gemm, *layers, **facts):
        monkeypatch.setattr(tuned, "TABLES", tuned.tables(layers))
        return plan_gemm(GemmProblem(gemm, activation="silu", **facts), H200)

    return choose


def test_a_file_of_tall_tiles(chosen):
    """Where Hopper's kernel takes them; the kernel for all GPUs takes a third at a time."""
    tall = own(PACKED, 256, 3, 3, ON_DEMAND=True)
    content = read(record(_500=entry(192, tall, tall)))
    gemm, source = Gemm(1000, 8, 64, 128, 2, 2, HOPPER[2]), f"tuned ({content.file})"
    choice = chosen(gemm, content)
    assert (choice.config, choice.source) == (HopperTiles(PACKED, 192, 256, 3, 3, True), source)
    default = gemm_tiles(gemm, H200)
    assert chosen(gemm, content, boxes=False).config == default and default.block_m == 64


@pytest.mark.parametrize(("rule", "tile"), [(PORTABLE, 192), (HOPPER[2], 128)])
def test_a_file_does_not_choose_the_row_tile(rule, tile, chosen):
    """An entry of the same load, timed with another row tile than the plan's, is not used."""
    tall = own(PACKED, 256, 3, 3)
    content = read(record(_500=entry(tile, tall, tall)))
    gemm = Gemm(1000, 8, 64, 128, 2, 2, rule)
    choice = chosen(gemm, content)
    assert gemm.row_tile == choice.config.block_m == (128 if tile == 192 else 192)
    assert choice.source == f"analytic default ({content.file} has nothing for this load)"
    assert choice.config == chosen(gemm).config


def test_a_device_that_is_no_gpu_has_no_name():
    assert row_tile_facts(torch.device("cpu")) == (0, None)
    if not torch.cuda.is_available():
        assert row_tile_facts(torch.device("cuda")) == (0, None)
        assert device_facts(torch.device("cuda")).name == ""


@pytest.mark.gpu
def test_the_name_of_a_gpu(device):
    (major, minor), here = torch.cuda.get_device_capability(), torch.device(device)
    name = torch.cuda.get_device_name().replace(" ", "_")
    assert plain_name(device_facts(here).name) == name
    assert row_tile_facts(here) == (10 * major + minor, None)


def test_explained(monkeypatch):
    """Rows of tiles by load, on Hopper and elsewhere: 12, 96, 192, 384 and 1536 rows wanted."""
    monkeypatch.setattr(tuned, "TABLES", tuned.tables([]))
    config = FusedMoEConfig(128, 8, 2048, 768, 128, "silu", "cuda", RoutingMethodType.Renormalize)
    tokens = (128, 1024, 2048, 4096, 16384)

    def rows(scheme, device, config=config):
        costs = moe_ops.explain(config, scheme, device=device, num_tokens=tokens).costs
        assert all(cost.gemm1.block_m == cost.gemm2.block_m for cost in costs)
        return [cost.gemm1.block_m for cost in costs]

    assert rows("unquantized", "sm_90") == [16, 128, 192, 128, 128]
    of_rank = replace(config, num_local_experts=32)
    assert rows("unquantized", "sm_90", of_rank) == [16, 128, 192, 128, 128]
    assert rows("unquantized", "sm_80") == [16, 128, 128, 128, 128]
    assert rows("fp8_block128", "sm_90") == [16, 128, 128, 128, 128]
    assert rows("fp8_block128", "sm_100") == [16, 64, 64, 64, 128]
    text = str(moe_ops.explain(config, "unquantized", device="sm_90", num_tokens=(2048,)))
    assert "hopper_packed 192x256 /3" in text
    text = str(moe_ops.explain(config, "unquantized", device="sm_80", num_tokens=(2048,)))
    assert "192x" not in text
