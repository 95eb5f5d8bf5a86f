"""Alignment and counting: bit by bit against a loop."""

import pytest
import torch
from conftest import INTERPRETED
from hypothesis import given
from hypothesis import strategies as st
from looped_plan import assert_plan, cdiv, looped
from strategies import topk_ids

import moe_ops
from moe_ops import ops
from moe_ops.dispatch.tile_plan import unpack_plan
from moe_ops.dispatch.tiles import (
    ROW_TILES,
    SINGLE_LAUNCH_SLOTS,
    is_direct,
    num_tiles,
    padded_slots,
    pick_row_tile,
    plan_sizes,
)
from moe_ops.reference.align import plan_slots
from moe_ops.reference.slots import local_experts

ROW_TILE_LISTS = (ROW_TILES, (16, 32, 192), (192, 192))

pytestmark = pytest.mark.kernel


def test_worked_example(device):
    ids = torch.tensor([[2, 3, 4], [1, 2, 4], [1, 3, 4], [1, 2, 3]], device=device)
    plan = moe_ops.moe_align_block_size(ids, 4, 5)
    assert plan.sorted_token_ids.shape == (27,)
    first = [3, 6, 9, 12, 0, 4, 10, 12, 1, 7, 11, 12, 2, 5, 8, 12]
    assert plan.sorted_token_ids[:16].tolist() == first
    assert_plan(plan, looped(ids, 4, 5))


@given(case=topk_ids(), block=st.sampled_from((1, 4, 16, 64)))
def test_any_ids(case, block, device):
    ids, num_experts = case
    plan = moe_ops.moe_align_block_size(ids.to(device), block, num_experts)
    assert_plan(plan, looped(ids, block, num_experts))


@given(case=topk_ids(), ignore=st.booleans(), seed=st.integers(0, 99))
def test_expert_map(case, ignore, seed, device):
    ids, num_experts = case
    g = torch.Generator().manual_seed(seed)
    local = int(torch.randint(0, num_experts + 1, (), generator=g))
    expert_map = torch.full((num_experts,), -1, dtype=torch.int32)
    expert_map[torch.randperm(num_experts, generator=g)[:local]] = torch.arange(
        local, dtype=torch.int32
    )
    plan = moe_ops.moe_align_block_size(
        ids.to(device), 16, num_experts, expert_map.to(device), ignore_invalid_experts=ignore
    )
    assert_plan(plan, looped(ids, 16, num_experts, expert_map.tolist(), ignore))


@pytest.mark.parametrize("num_experts", [513, 1025] if INTERPRETED else [513, 1025, 4096])
def test_many_experts(num_experts, device):
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(0, num_experts, (4, 8), generator=g, dtype=torch.int32)
    plan = moe_ops.moe_align_block_size(ids.to(device), 8, num_experts)
    assert_plan(plan, looped(ids, 8, num_experts))


@pytest.mark.parametrize("num_tokens", [128, 129, 200 if INTERPRETED else 500])
@pytest.mark.parametrize("tile", [16, 192])
def test_both_sides_of_the_single_launch(num_tokens, tile, device):
    """1024 slots are the last that one launch sorts, with counts of 16 bits."""
    assert SINGLE_LAUNCH_SLOTS < 2**15
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(-1, 7, (num_tokens, 8), generator=g, dtype=torch.int32)
    plan = ops.moe_align_block_size(ids.to(device), None, [tile], 6, False, True)
    assert_plan(plan, looped(ids, tile, 6))


@pytest.mark.parametrize("num_experts", [1, 2, 257, 512])
def test_blocks_of_few_and_many_experts(num_experts, device):
    """More blocks than are added up in one step, one of which has only one expert's slots."""
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(-1, num_experts + 1, (5100, 1), generator=g, dtype=torch.int32)
    ids[256:512] = num_experts - 1
    plan = moe_ops.moe_align_block_size(ids.to(device), 16, num_experts)
    assert_plan(plan, looped(ids, 16, num_experts))
    counts = moe_ops.count_expert_num_tokens(ids.to(device), num_experts)
    assert counts.tolist() == [int((ids == e).sum()) for e in range(num_experts)]


@pytest.mark.parametrize("ignore", [False, True])
@pytest.mark.parametrize(("num_slots", "num_experts"), [(4096, 300), (33000, 7), (262200, 512)])
@pytest.mark.skipif(INTERPRETED, reason="takes minutes")
def test_many_slots(num_slots, num_experts, ignore, device):
    """Blocks of every size, skewed: half of the slots go to one expert, some to none."""
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(-1, num_experts + 1, (num_slots // 8, 8), generator=g)
    ids[:, ::2] = num_experts // 2
    expert_map = torch.randperm(num_experts, generator=g, dtype=torch.int32)
    expert_map[::3] = -1
    local = num_experts if not ignore else 1 + int(expert_map.max())
    plan = ops.moe_align_block_size(
        ids.to(device), expert_map.to(device), [16], local, False, ignore
    )
    padded = ids.numel() + local * 15
    assert plan[0].shape == (padded,)
    assert_plan(plan, looped(ids, 16, local, expert_map.tolist(), ignore))
    plan = ops.plan_slots(ids.to(device), expert_map.to(device), [16], local)
    assert torch.equal(plan.cpu(), plan_slots(ids, expert_map, [16], local))
    counts = ops.count_expert_num_tokens(ids.to(device), expert_map.to(device), local)
    experts = local_experts(ids, expert_map, local)
    assert counts.tolist() == torch.bincount(experts + 1, minlength=local + 1).tolist()[1:]


def test_ids_wider_than_int32_are_no_expert(device):
    ids = torch.tensor([[2**32, 1], [0, -(2**40)]], device=device)
    plan = moe_ops.moe_align_block_size(ids, 2, 3)
    assert_plan(plan, looped(ids, 2, 3))
    assert moe_ops.count_expert_num_tokens(ids, 3).tolist() == [1, 1, 0]


def test_pad_sorted_ids_rounds_the_length(device):
    ids = torch.tensor([[0, 1, 2]], device=device)
    plan = moe_ops.moe_align_block_size(ids, 4, 2, pad_sorted_ids=True)
    assert plan.sorted_token_ids.shape == (12,)
    assert moe_ops.moe_align_block_size(ids, 4, 2).sorted_token_ids.shape == (9,)


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 64, 300])
@pytest.mark.parametrize("row_tiles", ROW_TILE_LISTS)
def test_several_row_tiles_make_the_plan_of_the_one_picked(num_tokens, row_tiles, device):
    """The plan is as long as the largest tile may need, and filled for the tile that is used."""
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 4, (num_tokens, 2), generator=g, dtype=torch.int32)
    plan = ops.moe_align_block_size(ids.to(device), None, row_tiles, 4, False, True)
    tile = pick_row_tile(row_tiles, ids.numel(), 4)
    rows, experts, used = looped(ids, tile, 4)
    assert plan[2].tolist() == used
    assert plan[0][: used[0]].tolist() == rows[: used[0]]
    assert plan[1][: used[0] // tile].tolist() == experts[: used[0] // tile]
    assert (plan[0][used[0] :] == ids.numel()).all()
    assert (plan[1][used[0] // tile :] == -1).all()


@given(case=topk_ids(), local=st.none() | st.integers(1, 40), tile=st.sampled_from((1, 16, 192)))
def test_the_slot_plan_is_the_same_in_one_tensor(case, local, tile, device):
    """Where anybody reads it: so few slots that nobody does leave it as it is."""
    ids, num_experts = case
    ids, expert_map = ids.to(device), None
    if local is not None:
        local = min(local, num_experts)
        expert_map = torch.arange(-1, num_experts - 1, dtype=torch.int32, device=device)
        expert_map[expert_map >= local] = -1
    sizes = ([tile], local or num_experts)
    plan = ops.plan_slots(ids, expert_map, *sizes)
    parts = unpack_plan(plan, ids.numel(), sizes[1], sizes[0])
    expected = ops.moe_align_block_size(ids, expert_map, *sizes, False, True)
    assert plan.dtype == torch.int32 and plan.data_ptr() % 16 == 0
    assert [x.shape for x in parts] == [x.shape for x in expected]
    if not is_direct(ids.numel(), sizes[1]):
        assert all(torch.equal(a, b) for a, b in zip(parts, expected, strict=True))
    parts = unpack_plan(plan_slots(ids, expert_map, *sizes), ids.numel(), sizes[1], sizes[0])
    assert all(torch.equal(a, b) for a, b in zip(parts, expected, strict=True))


@given(case=topk_ids())
def test_counts(case, device):
    ids, num_experts = case
    counts = moe_ops.count_expert_num_tokens(ids.to(device), num_experts)
    wanted = [int((ids == e).sum()) for e in range(num_experts)]
    assert counts.dtype == torch.int32 and counts.tolist() == wanted


def test_a_strided_expert_map(device):
    """Every second entry of a wider vector: kernels must not read the ones between."""
    ids = torch.tensor([[0, 1], [2, 3]], device=device)
    wide = torch.full((8,), -1, dtype=torch.int32, device=device)
    wide[::2] = torch.tensor([1, -1, 0, 2], dtype=torch.int32, device=device)
    assert moe_ops.count_expert_num_tokens(ids, 3, wide[::2]).tolist() == [1, 1, 1]
    plan = moe_ops.moe_align_block_size(ids, 2, 4, wide[::2], ignore_invalid_experts=True)
    assert plan.expert_ids.tolist()[:3] == [0, 1, 2]
    _, _, offset, _, _ = moe_ops.moe_permute(ids.float(), None, ids, 4, 3, wide[::2])
    assert offset.tolist() == [0, 1, 2, 3]
    rows, ones = torch.ones(2, 2, 4, device=device), torch.ones(2, 2, device=device)
    summed = moe_ops.moe_fused_mul_sum(rows, ones, None, ids, wide[::2])
    assert summed[:, 0].tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("tokens", "dtype"), [(60, torch.int32), (60, torch.int64), (513, torch.int64)]
)
def test_entries_of_a_map_that_are_no_local_expert(tokens, dtype, device):
    """They skip a slot as -1 does: in one launch, in two, and where rows are permuted."""
    large = 2**31 - 1 if dtype == torch.int32 else 2**32
    hostile = torch.tensor([1, 2, -1, 0, 7, -5, large], dtype=dtype, device=device)
    tame = torch.where((hostile >= 0) & (hostile < 2), hostile, -1)
    g = torch.Generator().manual_seed(tokens)
    ids = torch.randint(-1, 8, (tokens, 2), generator=g, dtype=torch.int32).to(device)
    results = [[ops.plan_slots(ids, expert_map, [16], 2)] for expert_map in (hostile, tame)]
    for result, expert_map in zip(results, (hostile, tame), strict=True):
        result += ops.moe_align_block_size(ids, expert_map, [4], 2, False, True)
        result += [ops.count_expert_num_tokens(ids, expert_map, 2)]
        result += ops.moe_permutation(ids, expert_map, 2)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    expected = [{0: 1, 3: 0}.get(e, -1) for e in ids.flatten().tolist()]
    assert local_experts(ids, hostile, 2).tolist() == expected
    slots = [slot for expert in (0, 1) for slot, e in enumerate(expected) if e == expert]
    planned = unpack_plan(results[0][0], ids.numel(), 2, [16])[0].tolist()
    assert [slot for slot in planned if slot < ids.numel()] == slots


@pytest.mark.parametrize("tokens", [60, 513])
def test_tiles_have_the_names_of_a_map_that_drops_nothing(tokens, device):
    """Also those of the last expert; other ranks' tiles are there, with no name."""
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 5, (tokens, 2), generator=g, dtype=torch.int32)
    expert_map = torch.tensor([2, -1, 0, -1, 1], dtype=torch.int32)
    plan = moe_ops.moe_align_block_size(ids.to(device), 16, 5, expert_map.to(device))
    assert_plan(plan, looped(ids, 16, 5, expert_map.tolist()))


def test_unused_tiles_of_a_plan_have_no_first_row(device):
    ids = torch.arange(60, device=device, dtype=torch.int32).view(30, 2) % 3
    for plan in (ops.plan_slots(ids, None, [16], 3), ops.plan_batched(ids[0], 40, [16])):
        firsts = plan[int(plan[2]) :].tolist()
        used = int(plan[0]) // 16
        assert used < len(firsts) and min(firsts[:used]) >= 0 and set(firsts[used:]) == {-1}


def test_counts_by_local_expert(device):
    ids = torch.tensor([[0, 1], [2, 3], [3, 9]], device=device)
    expert_map = torch.tensor([-1, 1, -1, 0], dtype=torch.int32, device=device)
    assert moe_ops.count_expert_num_tokens(ids, 2, expert_map).tolist() == [2, 1]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((torch.zeros(3, 2), 4, 4), TypeError, "topk_ids must have a dtype"),
        ((torch.zeros(3, dtype=torch.int32), 4, 4), ValueError, "topk_ids must have 2 axes"),
        ((torch.zeros(3, 2, dtype=torch.int32), 3, 4), ValueError, "block_size must be a power"),
        ((torch.zeros(3, 2, dtype=torch.int32), 4, 5000), ValueError, "num_experts must be in"),
        (
            (torch.zeros(3, 2, dtype=torch.int32), 4, 4, torch.zeros(3, dtype=torch.int32)),
            ValueError,
            r"expert_map.shape\[0\] must be the number of experts = 4, got 3",
        ),
    ],
)
def test_errors(arguments, error, message):
    with pytest.raises(error, match=message):
        moe_ops.moe_align_block_size(*arguments)


def spans_plan(starts, counts, num_rows, tile):
    """The plan of experts whose rows lie side by side, in use only."""
    rows, experts = [], []
    for expert, (start, count) in enumerate(zip(starts, counts, strict=True)):
        tiles = cdiv(count, tile)
        rows += [*range(start, start + count)] + [num_rows] * (tiles * tile - count)
        experts += [expert] * tiles
    return rows, experts


def assert_spans(plan, starts, counts, num_rows, row_tiles):
    tile = pick_row_tile(row_tiles, num_rows, len(counts))
    assert len(plan) == plan_sizes(num_rows, len(counts), row_tiles).entries
    rows, experts = spans_plan(starts, counts, num_rows, tile)
    length = padded_slots(num_rows, len(counts), row_tiles)
    tiles = num_tiles(num_rows, len(counts), row_tiles)
    plan = unpack_plan(plan, num_rows, len(counts), row_tiles)
    rows_and_padding = rows + [num_rows] * (length - len(rows))
    assert_plan(plan, (rows_and_padding, experts + [-1] * (tiles - len(experts)), [len(rows)]))


@given(
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=9),
    max_num_tokens=st.sampled_from((1, 7, 16, 40, 300)),
    row_tiles=st.sampled_from(((16,), *ROW_TILE_LISTS)),
)
def test_batched_rows(counts, max_num_tokens, row_tiles, device):
    counts = [min(count, max_num_tokens) for count in counts]
    vector = torch.tensor(counts, dtype=torch.int32, device=device)
    plan = ops.plan_batched(vector, max_num_tokens, row_tiles)
    starts = [e * max_num_tokens for e in range(len(counts))]
    assert_spans(plan, starts, counts, len(counts) * max_num_tokens, row_tiles)


@given(
    counts=st.lists(st.integers(0, 70), min_size=1, max_size=9),
    skipped=st.integers(0, 9),
    row_tiles=st.sampled_from(((32,), *ROW_TILE_LISTS)),
)
def test_permuted_rows(counts, skipped, row_tiles, device):
    """Rows past the last expert's belong to skipped slots: no tile has them."""
    starts = [sum(counts[:e]) for e in range(len(counts))]
    num_rows = sum(counts) + skipped
    offset = torch.tensor([*starts, sum(counts)], device=device)
    plan = ops.plan_permuted(offset, num_rows, row_tiles)
    assert_spans(plan, starts, counts, num_rows, row_tiles)


def test_the_permuted_plan_is_that_of_its_slots(device):
    """The tiles of permuted rows hold the slots that the Standard plan has there."""
    ids = torch.randint(-1, 6, (37, 3), generator=torch.Generator().manual_seed(0)).to(device)
    standard = unpack_plan(ops.plan_slots(ids, None, ROW_TILES, 5), ids.numel(), 5, ROW_TILES)
    offset, _, slots = ops.moe_permutation(ids, None, 5)
    permuted = ops.plan_permuted(offset, ids.numel(), ROW_TILES)
    permuted = unpack_plan(permuted, ids.numel(), 5, ROW_TILES)
    padded = torch.cat((slots, slots.new_tensor([ids.numel()])))
    assert torch.equal(padded[permuted[0].long()], standard[0])
    assert torch.equal(permuted[1], standard[1]) and torch.equal(permuted[2], standard[2])


def test_more_tokens_than_fit_are_cut(device):
    """Counts past the capacity (before anyone clamped them) reach no other expert's rows."""
    counts = torch.tensor([9, 2, -3], dtype=torch.int32, device=device)
    plan = ops.plan_batched(counts, 4, [2])
    assert_spans(plan, [0, 4, 8], [4, 2, 0], 12, [2])
