"""Alignment and counting: bit by bit against a loop."""

import pytest
import torch
from conftest import INTERPRETED
from hypothesis import given
from hypothesis import strategies as st
from looped_plan import assert_plan, cdiv, looped
from pairwise import half_exhaustive
from plans import row_tile
from strategies import topk_ids

import moe_ops
from moe_ops import ops
from moe_ops.dispatch.row_tiles import HOPPER, expert_rule, tile_rule
from moe_ops.dispatch.tile_plan import unpack_plan
from moe_ops.dispatch.tiles import (
    SINGLE_LAUNCH_SLOTS,
    is_direct,
    num_tiles,
    one_row_tile,
    padded_slots,
    plan_sizes,
)
from moe_ops.dispatch.tiles import row_tile as tile_of
from moe_ops.reference.align import plan_slots
from moe_ops.reference.slots import local_experts

pytestmark = pytest.mark.kernel

BF16 = torch.bfloat16
DENSE = ("unquantized", BF16)
RULES = (DENSE, ("fp8_channel", BF16), ("unquantized", BF16, True))
"""Scheme, dtype and mode: one kind of rule each."""
TILES = (*((tile, DENSE) for tile in (16, 192)), *((None, rule) for rule in RULES))
"""A row tile, or None for the one that the load asks for, and one of `RULES`."""


def slot_plan(ids, expert_map, num_experts, tile, device):
    """The parts of a plan of one row tile."""
    on = [None if x is None else x.to(device) for x in (ids, expert_map)]
    with row_tile(tile):
        plan = ops.plan_slots(*on, num_experts, *DENSE)
    return unpack_plan(plan, ids.numel(), num_experts, one_row_tile(tile))


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


@pytest.mark.parametrize(
    ("num_tokens", "tile"),
    half_exhaustive([129, 128, 200 if INTERPRETED else 500], [128, 16, 192], where=INTERPRETED),
)
def test_both_sides_of_the_single_launch(num_tokens, tile, device):
    """1024 slots are the last that one launch sorts, with counts of 16 bits."""
    assert SINGLE_LAUNCH_SLOTS < 2**15
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(-1, 7, (num_tokens, 8), generator=g, dtype=torch.int32)
    expected = looped(ids, tile, 6)
    assert_plan(slot_plan(ids, None, 6, tile, device), expected)
    if tile != 192:
        plan = ops.moe_align_block_size(ids.to(device), None, tile, 6, False, True)
        assert_plan(plan, expected)


@pytest.mark.parametrize(("num_experts",), half_exhaustive([2, 1, 512, 257], where=INTERPRETED))
def test_blocks_of_few_and_many_experts(num_experts, device):
    """More blocks than are added up in one step, one of which has only one expert's slots."""
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(-1, num_experts + 1, (5100, 1), generator=g, dtype=torch.int32)
    ids[256:512] = num_experts - 1
    plan = moe_ops.moe_align_block_size(ids.to(device), 16, num_experts)
    assert_plan(plan, looped(ids, 16, num_experts))
    counts = moe_ops.functional.count_expert_num_tokens(ids.to(device), num_experts)
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
    plan = ops.moe_align_block_size(ids.to(device), expert_map.to(device), 16, local, False, ignore)
    padded = ids.numel() + local * 15
    assert plan[0].shape == (padded,)
    assert_plan(plan, looped(ids, 16, local, expert_map.tolist(), ignore))
    with row_tile(16):
        plan = ops.plan_slots(ids.to(device), expert_map.to(device), local, *DENSE)
        assert torch.equal(plan.cpu(), plan_slots(ids, expert_map, local, *DENSE))
    counts = ops.count_expert_num_tokens(ids.to(device), expert_map.to(device), local)
    experts = local_experts(ids, expert_map, local)
    assert counts.tolist() == torch.bincount(experts + 1, minlength=local + 1).tolist()[1:]


def test_ids_wider_than_int32_are_no_expert(device):
    ids = torch.tensor([[2**32, 1], [0, -(2**40)]], device=device)
    plan = moe_ops.moe_align_block_size(ids, 2, 3)
    assert_plan(plan, looped(ids, 2, 3))
    assert moe_ops.functional.count_expert_num_tokens(ids, 3).tolist() == [1, 1, 0]


def test_pad_sorted_ids_rounds_the_length(device):
    ids = torch.tensor([[0, 1, 2]], device=device)
    plan = moe_ops.moe_align_block_size(ids, 4, 2, pad_sorted_ids=True)
    assert plan.sorted_token_ids.shape == (12,)
    assert moe_ops.moe_align_block_size(ids, 4, 2).sorted_token_ids.shape == (9,)


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 64, 300, 800])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_plan_has_the_row_tile_of_its_load(num_tokens, rule, device):
    """The plan is as long as the largest tile may need, and filled for the tile that is used.

    Kernels leave a plan that nobody reads as it is.
    """
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 4, (num_tokens, 2), generator=g, dtype=torch.int32)
    plans = [make(ids.to(device), None, 4, *rule) for make in (plan_slots, ops.plan_slots)]
    rule = tile_rule_on(device, *rule)
    tile = tile_of(rule, ids.numel(), 4)
    rows, experts, used = looped(ids, tile, 4)
    assert {len(plan) for plan in plans} == {plan_sizes(ids.numel(), 4, rule).entries}
    for plan in plans[:1] if is_direct(ids.numel(), 4) else plans:
        parts = unpack_plan(plan, ids.numel(), 4, rule)
        assert parts[2].tolist() == used
        assert parts[0][: used[0]].tolist() == rows[: used[0]]
        assert parts[1][: used[0] // tile].tolist() == experts[: used[0] // tile]
        assert (parts[0][used[0] :] == ids.numel()).all()
        assert (parts[1][used[0] // tile :] == -1).all()


def tile_rule_on(device, scheme, dtype, batch_invariant=False):
    return tile_rule(scheme, dtype, torch.device(device), batch_invariant)


@given(slots=st.integers(0, 5000), experts=st.integers(1, 300))
def test_a_plan_has_room_for_the_row_tile_of_any_load(slots, experts):
    """One length serves all of the rule's row tiles, which need not grow with the load."""
    for rule in (*(tile_rule_on("cpu", *rule) for rule in RULES), *HOPPER.values()):
        sizes, used = plan_sizes(slots, experts, rule), one_row_tile(tile_of(rule, slots, experts))
        least = plan_sizes(slots, experts, used)
        assert sizes.rows >= least.rows and sizes.tiles >= least.tiles


@given(case=topk_ids(), local=st.none() | st.integers(1, 40), tile=st.sampled_from((1, 16, 192)))
def test_the_slot_plan_is_the_same_in_one_tensor(case, local, tile, device):
    """Where anybody reads it: so few slots that nobody does leave it as it is."""
    ids, num_experts = case
    expert_map = None
    if local is not None:
        local = min(local, num_experts)
        expert_map = torch.arange(-1, num_experts - 1, dtype=torch.int32)
        expert_map[expert_map >= local] = -1
    size = local or num_experts
    expected = looped(ids, tile, size, None if local is None else expert_map.tolist(), True)
    on = [None if x is None else x.to(device) for x in (ids, expert_map)]
    with row_tile(tile):
        plan, plain = ops.plan_slots(*on, size, *DENSE), plan_slots(*on, size, *DENSE)
    parts = unpack_plan(plan, ids.numel(), size, one_row_tile(tile))
    assert plan.dtype == torch.int32 and plan.data_ptr() % 16 == 0
    assert [len(x) for x in parts] == [len(x) for x in expected]
    if not is_direct(ids.numel(), size):
        assert_plan(parts, expected)
    assert_plan(unpack_plan(plain, ids.numel(), size, one_row_tile(tile)), expected)
    if tile != 192:
        assert_plan(ops.moe_align_block_size(*on, tile, size, False, True), expected)


@given(case=topk_ids())
def test_counts(case, device):
    ids, num_experts = case
    counts = moe_ops.functional.count_expert_num_tokens(ids.to(device), num_experts)
    wanted = [int((ids == e).sum()) for e in range(num_experts)]
    assert counts.dtype == torch.int32 and counts.tolist() == wanted


def test_a_strided_expert_map(device):
    """Every second entry of a wider vector: kernels must not read the ones between."""
    ids = torch.tensor([[0, 1], [2, 3]], device=device)
    wide = torch.full((8,), -1, dtype=torch.int32, device=device)
    wide[::2] = torch.tensor([1, -1, 0, 2], dtype=torch.int32, device=device)
    assert moe_ops.functional.count_expert_num_tokens(ids, 3, wide[::2]).tolist() == [1, 1, 1]
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
    with row_tile(16):
        results = [[ops.plan_slots(ids, expert_map, 2, *DENSE)] for expert_map in (hostile, tame)]
    for result, expert_map in zip(results, (hostile, tame), strict=True):
        result += ops.moe_align_block_size(ids, expert_map, 4, 2, False, True)
        result += [ops.count_expert_num_tokens(ids, expert_map, 2)]
        result += ops.moe_permutation(ids, expert_map, 2)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    expected = [{0: 1, 3: 0}.get(e, -1) for e in ids.flatten().tolist()]
    assert local_experts(ids, hostile, 2).tolist() == expected
    slots = [slot for expert in (0, 1) for slot, e in enumerate(expected) if e == expert]
    planned = unpack_plan(results[0][0], ids.numel(), 2, one_row_tile(16))[0].tolist()
    assert [slot for slot in planned if slot < ids.numel()] == slots


@pytest.mark.parametrize("tokens", [60, 513])
def test_tiles_have_the_names_of_a_map_that_drops_nothing(tokens, device):
    """Also those of the last expert; other ranks' tiles are there, with no name."""
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 5, (tokens, 2), generator=g, dtype=torch.int32)
    expert_map = torch.tensor([2, -1, 0, -1, 1], dtype=torch.int32)
    plan = moe_ops.moe_align_block_size(ids.to(device), 16, 5, expert_map.to(device))
    assert_plan(plan, looped(ids, 16, 5, expert_map.tolist()))


def test_tokens_without_slots_have_no_adapter(device):
    ids, of_tokens = (torch.zeros(3, *k, dtype=torch.int32, device=device) for k in ((0,), ()))
    pairs, adapters, tokens = ops.adapter_ids(ids, None, of_tokens, 4, 2)
    assert pairs.shape == adapters.shape == (3, 0) and tokens.tolist() == [[-1]] * 3


def test_unused_tiles_of_a_plan_have_no_first_row(device):
    ids = torch.arange(60, device=device, dtype=torch.int32).view(30, 2) % 3
    with row_tile(16):
        plans = ops.plan_slots(ids, None, 3, *DENSE), ops.plan_batched(ids[0], 40, "unquantized")
    for plan in plans:
        firsts = plan[int(plan[2]) :].tolist()
        used = int(plan[0]) // 16
        assert used < len(firsts) and min(firsts[:used]) >= 0 and set(firsts[used:]) == {-1}


def test_counts_by_local_expert(device):
    ids = torch.tensor([[0, 1], [2, 3], [3, 9]], device=device)
    expert_map = torch.tensor([-1, 1, -1, 0], dtype=torch.int32, device=device)
    assert moe_ops.functional.count_expert_num_tokens(ids, 2, expert_map).tolist() == [2, 1]


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


def assert_spans(make, tile, rule, starts, counts, num_rows, device):
    """``make(scheme, batch_invariant)`` makes the plan of these rows, of one of `TILES`."""
    scheme, _, *mode = rule
    with row_tile(tile):
        plan = make(scheme, *mode)
        rule = expert_rule(scheme, torch.device(device), *mode)
    tile = tile or tile_of(rule, num_rows, len(counts))
    assert len(plan) == plan_sizes(num_rows, len(counts), rule).entries
    rows, experts = spans_plan(starts, counts, num_rows, tile)
    length = padded_slots(num_rows, len(counts), rule.largest)
    tiles = num_tiles(num_rows, len(counts), rule.smallest)
    plan = unpack_plan(plan, num_rows, len(counts), rule)
    rows_and_padding = rows + [num_rows] * (length - len(rows))
    assert_plan(plan, (rows_and_padding, experts + [-1] * (tiles - len(experts)), [len(rows)]))


@given(
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=9),
    max_num_tokens=st.sampled_from((1, 7, 16, 40, 400)),
    tiles=st.sampled_from(TILES),
)
def test_batched_rows(counts, max_num_tokens, tiles, device):
    counts = [min(count, max_num_tokens) for count in counts]
    vector = torch.tensor(counts, dtype=torch.int32, device=device)
    starts = [e * max_num_tokens for e in range(len(counts))]
    num_rows = len(counts) * max_num_tokens

    def make(*rule):
        return ops.plan_batched(vector, max_num_tokens, *rule)

    assert_spans(make, *tiles, starts, counts, num_rows, device)


@given(
    counts=st.lists(st.integers(0, 70), min_size=1, max_size=9),
    skipped=st.integers(0, 9),
    tiles=st.sampled_from(((32, DENSE), *TILES)),
)
def test_permuted_rows(counts, skipped, tiles, device):
    """Rows past the last expert's belong to skipped slots: no tile has them."""
    starts = [sum(counts[:e]) for e in range(len(counts))]
    num_rows = sum(counts) + skipped
    offset = torch.tensor([*starts, sum(counts)], device=device)
    assert_spans(
        lambda *rule: ops.plan_permuted(offset, num_rows, *rule),
        *tiles, starts, counts, num_rows, device,
    )  # fmt: skip


@pytest.mark.parametrize(("most", "tiles"), [(10, (16, 16, 64)), (100, (128, 64, 64)),
                                              (400, (128, 128, 64))])  # fmt: skip
@pytest.mark.parametrize("rule", range(len(RULES)))
def test_row_tiles_of_rows_by_expert(most, tiles, rule, device):
    """Plans without a routing follow `RULES` on every GPU: Hopper's row tiles are for routings."""
    scheme, _, *mode = RULES[rule]
    counts = torch.tensor([most, 1, 3], dtype=torch.int32, device=device)
    offset = torch.tensor([0, most, most + 1, most + 4], device=device)
    batched = ops.plan_batched(counts, most, scheme, *mode)
    permuted = ops.plan_permuted(offset, 3 * most, scheme, *mode)
    tile = tiles[rule]
    used = tile * (cdiv(most, tile) + 2)
    assert int(batched[0]) == int(permuted[0]) == used


def test_the_permuted_plan_is_that_of_its_slots(device):
    """The tiles of permuted rows hold the slots that the Standard plan has there."""
    ids = torch.randint(-1, 6, (37, 3), generator=torch.Generator().manual_seed(0)).to(device)
    sizes = (ids.numel(), 5)
    slot_rule, rule = tile_rule_on(device, *DENSE), expert_rule("unquantized", ids.device)
    assert tile_of(slot_rule, *sizes) == tile_of(rule, *sizes)
    standard = unpack_plan(ops.plan_slots(ids, None, 5, *DENSE), *sizes, slot_rule)
    offset, _, slots = ops.moe_permutation(ids, None, 5)
    permuted = unpack_plan(ops.plan_permuted(offset, sizes[0], "unquantized"), *sizes, rule)
    padded = torch.cat((slots, slots.new_tensor([sizes[0]])))
    rows, tiles = (min(len(x), len(y)) for x, y in zip(standard[:2], permuted[:2], strict=True))
    assert torch.equal(padded[permuted[0][:rows].long()], standard[0][:rows])
    assert torch.equal(permuted[1][:tiles], standard[1][:tiles])
    assert torch.equal(permuted[2], standard[2])


def test_more_tokens_than_fit_are_cut(device):
    """Counts past the capacity (before anyone clamped them) reach no other expert's rows."""
    counts = torch.tensor([9, 2, -3], dtype=torch.int32, device=device)

    def make(*rule):
        return ops.plan_batched(counts, 4, *rule)

    assert_spans(make, 2, DENSE, [0, 4, 8], [4, 2, 0], 12, device)
