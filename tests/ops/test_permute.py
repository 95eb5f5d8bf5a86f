"""Permutation: a bijection in the order of the experts, and its inverse."""

import pytest
import torch
from conftest import INTERPRETED
from hypothesis import given
from hypothesis import strategies as st
from strategies import topk_ids

import moe_ops
from moe_ops import ops
from moe_ops.reference import permute
from moe_ops.testing import Bounded, assert_matches_reference

pytestmark = pytest.mark.kernel
ROWS, IDS = torch.zeros(4, 8), torch.zeros(2, 2, dtype=torch.int32)
OFFSET = torch.zeros(3, dtype=torch.int64)


def sorted_slots(ids, num_experts, expert_map=None):
    """Slots by local expert, skipped ones last."""

    def key(slot_and_id):
        expert = slot_and_id[1]
        if not 0 <= expert < num_experts:
            return num_experts
        local = expert if expert_map is None else expert_map[expert]
        return num_experts if local < 0 else local

    return [slot for slot, _ in sorted(enumerate(ids.flatten().tolist()), key=key)], key


@given(case=topk_ids(max_tokens=40), mapped=st.booleans())
def test_any_ids(case, mapped, device):
    ids, num_experts = case
    tokens, k = ids.shape
    expert_map = torch.arange(num_experts, dtype=torch.int32).flip(0) if mapped else None
    x = torch.randn(tokens, 24, generator=torch.Generator().manual_seed(0)).to(device)
    rows, scale, offset, inverse, slots = moe_ops.moe_permute(
        x, None, ids.to(device), num_experts,
        expert_map=None if expert_map is None else expert_map.to(device),
    )  # fmt: skip
    order, key = sorted_slots(ids, num_experts, None if not mapped else expert_map.tolist())
    assert scale is None
    assert (offset.dtype, inverse.dtype, slots.dtype) == (torch.int64, torch.int32, torch.int32)
    assert slots.tolist() == order
    assert inverse.shape == ids.shape
    assert [order[r] for r in inverse.flatten().tolist()] == list(range(ids.numel()))
    group = [key((0, i)) for i in ids.flatten().tolist()]
    assert offset.tolist() == [sum(g < e for g in group) for e in range(num_experts + 1)]
    used = offset[-1].item()
    token = slots[:used].long() // k
    assert torch.equal(rows[:used], x[token])
    assert (rows[used:] == 0).all()


BLOCKS = [(1024, 257, True), (1025, 256, True), (5100, 2, False)]
if not INTERPRETED:
    BLOCKS += [(33000, 7, True), (262200, 512, True), (1000, 4096, False), (1100, 4096, True)]


@pytest.mark.parametrize(("num_slots", "num_experts", "mapped"), BLOCKS)
def test_blocks_of_slots(num_slots, num_experts, mapped, device):
    """One launch's last number of slots, and two launches' with blocks of every size.

    One block has slots of one expert only, one has none of an expert, and some ids are skipped.
    """
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(-1, num_experts + 2, (num_slots, 1), generator=g)
    ids[256:512], ids[512:768], ids[::7] = num_experts - 1, -1, 2**32
    expert_map = torch.randperm(num_experts, generator=g, dtype=torch.int32) if mapped else None
    order, key = sorted_slots(ids, num_experts, expert_map.tolist() if mapped else None)
    on_device = expert_map.to(device) if mapped else None
    offset, inverse, slots = ops.moe_permutation(ids.to(device), on_device, num_experts)
    assert slots.tolist() == order
    assert inverse.flatten()[slots.long()].tolist() == list(range(num_slots))
    group = torch.tensor([key((0, i)) for i in ids.flatten().tolist()])
    counts = torch.bincount(group, minlength=num_experts + 1)
    assert offset.tolist() == (counts.cumsum(0) - counts).tolist()


def test_no_slots(device):
    ids = torch.zeros(0, 2, dtype=torch.int32, device=device)
    offset, inverse, slots = ops.moe_permutation(ids, None, 5)
    assert offset.tolist() == [0] * 6 and inverse.shape == (0, 2) and slots.shape == (0,)
    assert ops.count_expert_num_tokens(ids, None, 5).tolist() == [0] * 5
    assert ops.batched_rows(ids, 1, 5, 3).shape == (0, 2)


def test_scales_move_with_their_rows(device):
    ids = torch.tensor([[1, 0], [0, 9]], device=device)
    x = torch.arange(8.0, device=device).view(2, 4)
    scale = torch.tensor([[1.0, 10.0], [2.0, 20.0]], device=device)
    _, moved, *_ = moe_ops.moe_permute(x, scale, ids, 2)
    assert moved.tolist() == [[1.0, 10.0], [2.0, 20.0], [1.0, 10.0], [0.0, 0.0]]
    one = torch.tensor(3.0, device=device)
    assert moe_ops.moe_permute(x, one, ids, 2)[1] is one


DTYPES = ["bfloat16", "float8_e4m3fn", "int8", "float8_e8m0fnu", "float4_e2m1fn_x2", "uint16",
          "uint32", "bool", "float64"]  # fmt: skip


@pytest.mark.parametrize("name", [name for name in DTYPES if hasattr(torch, name)])
def test_rows_of_any_dtype(name, device):
    """Their bytes move, and so do those of their scales; a row that is skipped is zeros."""
    ids, dtype = torch.tensor([[1], [0], [-1]], device=device), getattr(torch, name)
    stored = torch.arange(1, 3 * 8 * dtype.itemsize + 1, dtype=torch.uint8).view(3, -1)
    stored = stored % 2 if dtype == torch.bool else stored
    x = stored.to(device).view(dtype)
    rows, scale, *_ = moe_ops.moe_permute(x, x[:, ::2], ids, 2)
    assert rows.dtype == scale.dtype == dtype
    moved = stored[[1, 0, 2]] * torch.tensor([[1], [1], [0]], dtype=torch.uint8)
    assert torch.equal(rows.view(torch.uint8).cpu(), moved)
    parts = moved.unflatten(1, (8, -1))[:, ::2].flatten(1)
    assert torch.equal(scale.view(torch.uint8).cpu(), parts)


@given(case=topk_ids(max_tokens=30), dtype=st.sampled_from((torch.float32, torch.bfloat16)))
def test_unpermute(case, dtype, device):
    ids, num_experts = case
    tokens, k = ids.shape
    g = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, 40, generator=g).to(dtype)
    weights = torch.rand(tokens, k, generator=g)
    rows, _, offset, inverse, _ = moe_ops.moe_permute(
        x.to(device), None, ids.to(device), num_experts
    )
    rows[int(offset[-1]) :] = torch.nan  # of skipped slots
    actual = moe_ops.moe_unpermute(rows, weights.to(device), inverse, offset)
    valid = ((ids >= 0) & (ids < num_experts)).double()
    slots = Bounded.exactly(x[:, None].expand(-1, k, -1))
    exact = slots.weighted_sum(weights * valid).rounded(dtype)
    reference = permute.moe_unpermute(rows.cpu(), weights, inverse.cpu(), offset.cpu())
    assert_matches_reference(actual.cpu(), exact, reference)
    assert (actual.cpu()[valid.sum(-1) == 0] == 0).all()


def test_unpermute_without_weights_or_offsets(device):
    rows = torch.arange(8.0, device=device).view(4, 2)
    inverse = torch.tensor([[3, 0], [1, -1]], dtype=torch.int32, device=device)
    assert moe_ops.moe_unpermute(rows, None, inverse).tolist() == [[6.0, 8.0], [2.0, 3.0]]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((torch.zeros(3, 4), None, torch.zeros(2, 2).int(), 4), ValueError, "3 tokens|2 tokens"),
        ((torch.zeros(3), None, torch.zeros(3, 2).int(), 4), ValueError, "must have 2 axes"),
        ((torch.zeros(3, 4), None, torch.zeros(3, 2), 4), TypeError, "topk_ids must have a dtype"),
        ((torch.zeros(3, 4), None, torch.zeros(3, 2).int(), 0), ValueError, "n_expert must be in"),
        ((ROWS[:2], None, IDS, 4, 5000), ValueError, "n_local_expert must be in 1..4096"),
        ((ROWS[:2].to("meta"), None, IDS, 4), ValueError, "hidden_states must be on the device"),
        ((ROWS[:2], None, IDS, 4, -1, IDS[0]), ValueError, r"expert_map.shape\[0\] must be"),
        ((ROWS[:2].to(torch.complex64), None, IDS, 4), TypeError, "hidden_states must have a real"),
        ((ROWS[:2], ROWS[:2].to(torch.complex64), IDS, 4), TypeError, "a1q_scale must have a real"),
        ((ROWS[:2], None, IDS[:, :0], 4), ValueError, r"topk_ids.shape\[1\] must be in 1..4096"),
        ((ROWS[:2], ROWS[:, 0], IDS, 4), ValueError, "a1q_scale must have 2 axes"),
        ((ROWS[:2], ROWS[:3], IDS, 4), ValueError, "a1q_scale must have the 2 tokens"),
        ((ROWS[:2], ROWS[:2].to("meta"), IDS, 4), ValueError, "a1q_scale must be on the device"),
    ],
)
def test_errors(arguments, error, message):
    with pytest.raises(error, match=message):
        moe_ops.moe_permute(*arguments)


@given(case=topk_ids(max_tokens=20), mapped=st.booleans(), width=st.sampled_from((1, 24, 1100)))
def test_columns_in_the_order_of_each_expert(case, mapped, width, device):
    """Skipped slots are zeros, and tokens without any other are never read: they are NaN here."""
    ids, num_experts = case
    tokens, k = ids.shape
    g = torch.Generator().manual_seed(width)
    others = int(mapped)
    expert_map = torch.randperm(num_experts, generator=g, dtype=torch.int32) - others
    num_local = num_experts - others
    order = torch.stack([torch.randperm(width, generator=g).int() for _ in range(num_experts)])
    order, x = order[:num_local], torch.randn(tokens, 2 * width, generator=g)[:, ::2]
    expected = torch.zeros(tokens * k, width)
    for t in range(tokens):
        experts = [expert_map[e].item() if 0 <= e < num_experts else -1 for e in ids[t].tolist()]
        for j, expert in enumerate(experts):
            if expert >= 0:
                expected[t * k + j] = x[t][order[expert].long()]
        if max(experts) < 0:
            x[t] = torch.nan
    rows = moe_ops.ops.order_columns(
        x.to(device), order.to(device), ids.to(device), expert_map.to(device)
    )
    assert rows.is_contiguous() and torch.equal(rows.cpu(), expected)


def test_rows_outside_are_skipped(device):
    """Rows that are not there, whatever offset says, are not read, nor are weights of their slots.

    The rows are the first of a longer tensor, in which the others are NaN.
    """
    rows = torch.full((9, 2), torch.nan, device=device)
    rows[:4] = torch.arange(8.0).view(4, 2)
    inverse = torch.tensor([[3, 4], [-1, 1], [7, -2]], dtype=torch.int32, device=device)
    weights = torch.tensor([[2.0, torch.nan], [torch.nan, 1.0], [torch.nan] * 2], device=device)
    for offset in (None, torch.tensor([0, 2, 8], device=device)):
        actual = moe_ops.moe_unpermute(rows[:4], weights, inverse, offset)
        assert actual.tolist() == [[12.0, 14.0], [2.0, 3.0], [0.0, 0.0]]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((ROWS.int(), None, IDS), TypeError, "permuted_hidden_states must have a dtype"),
        ((ROWS[0], None, IDS), ValueError, "permuted_hidden_states must have 2 axes"),
        ((ROWS, None, IDS.long()), TypeError, "inv_permuted_idx must have a dtype"),
        ((ROWS, None, IDS.to("meta")), ValueError, "inv_permuted_idx must be on the device"),
        ((ROWS, torch.zeros(2, 3), IDS), ValueError, r"topk_weights.shape\[1\] must be"),
        ((ROWS, torch.zeros(3, 2), IDS), ValueError, "topk_weights must have the 2 tokens"),
        ((ROWS, None, IDS, OFFSET.int()), TypeError, "expert_first_token_offset must have a dtype"),
        ((ROWS, None, IDS, OFFSET[None]), ValueError, "expert_first_token_offset must have 1 axes"),
        ((ROWS, None, IDS, OFFSET.to("meta")), ValueError, "offset must be on the device of"),
    ],
)
def test_errors_of_the_way_back(arguments, error, message):
    with pytest.raises(error, match=message):
        moe_ops.moe_unpermute(*arguments)


def test_columns_out_of_range_are_zeros(device):
    """Nothing outside the token's row is read: its neighbours in memory are NaN."""
    x = torch.full((3, 8), torch.nan)
    x[1] = torch.arange(8.0)
    order = torch.tensor([[-1, 8, 2**31 - 1, -(2**31), 3, 9, -8, 7]], dtype=torch.int32)
    ids = torch.zeros(1, 1, dtype=torch.int32)
    rows = moe_ops.ops.order_columns(x.to(device)[1:2], order.to(device), ids.to(device), None)
    assert rows.tolist() == [[0, 0, 0, 0, 3, 0, 0, 7]]
