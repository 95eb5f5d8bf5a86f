"""The batched format: every slot's row with its expert, in slot order; padding is zeros."""

import importlib

import pytest
import torch
from conftest import INTERPRETED
from hypothesis import given
from hypothesis import strategies as st
from pairwise import half_exhaustive
from quantize_oracle import QUANTS, assert_bits, quantize, quants, random_rows, to
from strategies import ACTIVATIONS, DTYPES, placements

import moe_ops
from moe_ops import ops
from moe_ops.testing import assert_matches_reference

pytestmark = pytest.mark.kernel
reference = importlib.import_module("moe_ops.reference.batched")

FP8, INT8 = torch.float8_e4m3fn, torch.int8
WIDTH = 72


def looped(ids, first, here, room):
    """The slots of each expert, one after another; those that fit and how many do not."""
    slots = [[] for _ in range(here)]
    for slot, expert in enumerate(ids.flatten().tolist()):
        if first <= expert < first + here:
            slots[expert - first].append(slot)
    dropped = sum(max(len(s) - room, 0) for s in slots)
    return [s[:room] for s in slots], dropped


def rows_of(x, weights, slots, k):
    """The float32 rows of some slots; weighted ones are products."""
    rows = x[torch.tensor(slots, dtype=torch.int64) // k].float()
    return rows if weights is None else rows * weights.flatten()[slots, None]


def dispatch_inputs(case, weighted, seed, dtype=torch.bfloat16):
    """Rows of tokens without a slot here are NaN, and so are the weights of other slots."""
    ids, first, here, room = case
    x = random_rows(seed, len(ids), WIDTH, dtype)
    mine = (ids >= first) & (ids < first + here)
    x[~mine.any(1)] = torch.nan
    g = torch.Generator().manual_seed(seed)
    weights = torch.rand(ids.shape, generator=g) if weighted else None
    if weighted:
        weights[~mine] = torch.nan
    return x, weights


@given(case=placements(), weighted=st.booleans(), dtype=st.sampled_from(DTYPES))
def test_dispatch(case, weighted, dtype, device):
    ids, first, here, room = case
    x, weights = dispatch_inputs(case, weighted, 0, dtype)
    rows, scale, counts, dropped = ops.batched_dispatch(
        *to(device, x, None, weights, ids), first, here, room, ""
    )
    slots, lost = looped(ids, first, here, room)
    assert (counts.tolist(), dropped.tolist()) == ([len(s) for s in slots], [lost])
    assert (counts.dtype, dropped.dtype) == (torch.int32, torch.int32)
    assert scale.shape == (0,)
    expected = torch.zeros(here, room, WIDTH, dtype=dtype)
    for expert, mine in enumerate(slots):
        expected[expert, : len(mine)] = rows_of(x, weights, mine, ids.shape[1]).to(dtype)
    assert_bits(rows, expected)


@given(case=placements(), weighted=st.booleans(), quant=quants)
def test_dispatch_quantized(case, weighted, quant, device):
    """An expert's rows are quantized as those rows alone would be; padding is exact zeros."""
    ids, first, here, room = case
    x, weights = dispatch_inputs(case, weighted, 1)
    q, scale, counts, dropped = ops.batched_dispatch(
        *to(device, x, None, weights, ids), first, here, room, quant.key
    )
    slots, lost = looped(ids, first, here, room)
    assert (counts.tolist(), dropped.tolist()) == ([len(s) for s in slots], [lost])
    assert scale.shape == quant.batched_scale_shape(here, room, WIDTH)
    for expert, mine in enumerate(slots):
        values, scales = quantize(rows_of(x, weights, mine, ids.shape[1]), quant)
        used = len(mine)
        assert torch.equal(q[expert, :used].cpu().float(), values)
        assert (q[expert, used:].float() == 0).all()
        if quant.per_tensor:
            assert torch.equal(scale[expert].flatten().cpu(), scales)
        else:
            assert torch.equal(scale[expert, :used].cpu(), scales)
            assert (scale[expert, used:] == 0).all()


@pytest.mark.parametrize(
    ("num_experts", "room"), half_exhaustive([1, 60, 257], [1, 16], where=INTERPRETED)
)
def test_many_slots(num_experts, room, device):
    """More slots than one step of the scan holds, on every number of experts."""
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(-1, num_experts + 1, (700, 2), generator=g)
    x = torch.randn(700, 16, generator=g)
    rows, _, counts, dropped = ops.batched_dispatch(
        *to(device, x, None, None, ids), 0, num_experts, room, ""
    )
    slots, lost = looped(ids, 0, num_experts, room)
    assert (counts.tolist(), dropped.tolist()) == ([len(s) for s in slots], [lost])
    for expert in {0, num_experts // 2, num_experts - 1}:
        used = len(slots[expert])
        assert torch.equal(rows[expert, :used].cpu(), x[torch.tensor(slots[expert]) // 2])
        assert (rows[expert, used:] == 0).all()


@given(case=placements())
def test_rows_of_slots(case, device):
    ids, first, here, room = case
    rows = ops.batched_rows(ids.to(device), first, here, room)
    expected = [-1] * ids.numel()
    for expert, mine in enumerate(looped(ids, first, here, room)[0]):
        for rank, slot in enumerate(mine):
            expected[slot] = expert * room + rank
    assert rows.dtype == torch.int32 and rows.shape == ids.shape
    assert rows.flatten().tolist() == expected


@pytest.mark.parametrize(
    ("num_slots", "first", "here", "room"),
    [(1024, 0, 1, 0), (1026, 3, 40, 20), (1500, 2**30, 257, 3)],
)
def test_rows_of_many_slots(num_slots, first, here, room, device):
    """One launch and two; some experts have more slots than room, and ids are anything."""
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(first - 2, first + here + 2, (num_slots // 2, 2), generator=g)
    ids[100:300], ids[::9, 0], ids[1::9, 1] = first + here - 1, first + 2**32, -(2**63)
    rows = ops.batched_rows(ids.to(device), first, here, room)
    expected = torch.full((num_slots,), -1)
    for expert, mine in enumerate(looped(ids, first, here, room)[0]):
        expected[mine] = expert * room + torch.arange(len(mine))
    assert torch.equal(rows.flatten().cpu(), expected.int())


@given(case=placements(), dtype=st.sampled_from(DTYPES))
def test_dispatched_rows_come_back(case, dtype, device):
    """batched_rows and moe_unpermute combine: dropped and other ranks' slots add nothing."""
    ids, first, here, room = case
    x, weights = dispatch_inputs(case, True, 2, dtype)
    rows, *_ = ops.batched_dispatch(*to(device, x, None, None, ids), first, here, room, "")
    places = ops.batched_rows(ids.to(device), first, here, room)
    flat = rows.view(here * room, WIDTH)
    out = ops.moe_unpermute(flat, weights.to(device), places, None)
    kept = places.cpu() >= 0
    total = torch.where(kept, weights, 0.0).double().sum(1, keepdim=True)
    exact = torch.where(kept.any(1, keepdim=True), x.double() * total, 0.0)
    slot_by_slot = torch.zeros(x.shape)
    for j in range(ids.shape[1]):
        term = x.float() * weights[:, j, None]
        slot_by_slot = torch.where(kept[:, j, None], slot_by_slot + term, slot_by_slot)
    assert_matches_reference(out.cpu(), exact, slot_by_slot.to(dtype))


def batch(counts, room, width, seed, dtype=torch.bfloat16):
    """``(E, MT, width)`` rows; padding is NaN."""
    x = random_rows(seed, len(counts) * room, width, dtype).view(len(counts), room, width)
    for expert, count in enumerate(counts):
        x[expert, count:] = torch.nan
    return x


room_and_counts = st.sampled_from((1, 3, 9)).flatmap(
    lambda room: st.tuples(st.just(room), st.lists(st.integers(0, room), min_size=1, max_size=4))
)


@given(case=room_and_counts, quant=quants, seed=st.integers(0, 99))
def test_an_expert_is_quantized_as_if_alone(case, quant, seed, device):
    room, counts = case
    x = batch(counts, room, 130, seed).to(device)
    vector = torch.tensor(counts, dtype=torch.int32, device=device)
    q, scale = ops.batched_quantize(x, None, vector, quant.key)
    assert scale.shape == quant.batched_scale_shape(len(counts), room, 130)
    for expert, count in enumerate(counts):
        flat, flat_scale = ops.moe_quantize(x[expert, :count], None, None, None, None, 0, quant.key)
        assert_bits(q[expert, :count].contiguous(), flat)
        assert (q[expert, count:].float() == 0).all()
        if quant.per_tensor:
            assert_bits(scale[expert].view(1), flat_scale)
        else:
            assert_bits(scale[expert, :count].contiguous(), flat_scale)
            assert (scale[expert, count:] == 0).all()


@given(
    case=room_and_counts, key=st.sampled_from(ACTIVATIONS), quant=quants,
    dtype=st.sampled_from(DTYPES), seed=st.integers(0, 99),
)  # fmt: skip
def test_activations(case, key, quant, dtype, seed, device):
    """Valid rows as `activation` has them, padding zeros; and quantized as the pair."""
    room, counts = case
    gated = moe_ops.activation.formula(key).gated
    x = batch(counts, room, 44 * (2 if gated else 1), seed, torch.float32)
    x = (x / 500).to(dtype).to(device)
    vector = torch.tensor(counts, dtype=torch.int32, device=device)
    h = ops.batched_activation(x, vector, key)
    flat = ops.activation(x.flatten(0, 1), key).view(h.shape)
    for expert, count in enumerate(counts):
        assert_bits(h[expert, :count].contiguous(), flat[expert, :count].contiguous())
        assert (h[expert, count:] == 0).all()
    fused = ops.batched_activation_quantize(x, None, vector, key, quant.key)
    pair = ops.batched_quantize(h, None, vector, quant.key)
    for a, b in zip(fused, pair, strict=True):
        assert_bits(a, b)


@pytest.mark.parametrize("dtype", [FP8, INT8])
@pytest.mark.parametrize(
    ("per_row", "given_scales"), [(False, 1), (False, 3), (True, 1), (True, 3), (True, 12)]
)
def test_given_scales(dtype, per_row, given_scales, device):
    """For all, for each expert, for each row."""
    counts = torch.tensor([4, 0, 2], dtype=torch.int32, device=device)
    x = batch(counts.tolist(), 4, 40, 0).to(device)
    given_scale = torch.arange(1.0, given_scales + 1, device=device) / 8
    q, scale = moe_ops.functional.batched_moe_kernel_quantize_input(
        x, given_scale, 4, 3, 40, counts, dtype, per_row
    )
    assert scale.shape == (3, 4 if per_row else 1, 1)
    spread = given_scale.view(3, -1, 1) if given_scales > 1 else given_scale.view(1, 1, 1)
    spread = spread.expand(3, 4, 1)
    for expert, count in enumerate(counts.tolist()):
        for row in range(count):
            own = spread[expert, row]
            flat, _ = moe_ops.moe_kernel_quantize_input(x[expert, row : row + 1], own, dtype, False)
            assert_bits(q[expert, row], flat[0])
            assert scale[expert, row if per_row else 0].item() == own.item()
        assert (q[expert, count:].float() == 0).all()
        assert not per_row or (scale[expert, count:] == 0).all()


@given(case=placements(), quant=quants, weighted=st.booleans())
def test_equals_the_reference(case, quant, weighted, device):
    """The kernels and the references, byte by byte."""
    x, weights = dispatch_inputs(case, weighted, 4)
    arguments = (x, None, weights, *case, quant.key)
    actual = ops.batched_dispatch(*to(device, *arguments))
    for a, b in zip(actual, reference.batched_dispatch(*arguments), strict=True):
        assert_bits(a, b)


@pytest.mark.parametrize("quant", QUANTS, ids=lambda q: q.key)
def test_no_tokens_and_empty_experts(quant, device):
    """A scale of nothing is finite where it belongs to an expert, 0 where it belongs to a row."""
    ids = torch.zeros(0, 2, dtype=torch.int32, device=device)
    x = torch.zeros(0, 32, device=device)
    q, scale, counts, dropped = ops.batched_dispatch(x, None, None, ids, 0, 3, 4, quant.key)
    assert counts.tolist() == [0, 0, 0] and dropped.tolist() == [0]
    assert (q.float() == 0).all() and torch.isfinite(scale).all()
    assert (scale > 0).all() if quant.per_tensor else (scale == 0).all()


def test_no_dtype_passes_through(device):
    x, counts = torch.ones(2, 3, 4, device=device), torch.ones(2, dtype=torch.int32, device=device)
    arguments = (3, 2, 4, counts, None, False)
    assert moe_ops.functional.batched_moe_kernel_quantize_input(x, None, *arguments) == (x, None)
    one = torch.full((1,), 2.0, device=device)
    _, scale = moe_ops.functional.batched_moe_kernel_quantize_input(x, one, *arguments)
    assert scale.flatten().tolist() == [2.0, 2.0] and scale.shape == (2, 1, 1)
    rows = torch.ones(6, 1, device=device)
    assert moe_ops.functional.batched_moe_kernel_quantize_input(x, rows, *arguments)[1].shape == (
        2,
        3,
        1,
    )


COUNTS = torch.ones(2, dtype=torch.int32)


@pytest.mark.parametrize(
    ("x", "arguments", "error", "message"),
    [
        (torch.ones(2, 4), (None, 4, 2, 4, COUNTS, FP8, False), ValueError, "must have 3 axes"),
        (torch.ones(3, 4, 4), (None, 4, 2, 4, COUNTS, FP8, False), ValueError, r"A.shape\[0\]"),
        (torch.ones(2, 4, 4), (None, 3, 2, 4, COUNTS, FP8, False), ValueError, "num_tokens = 3"),
        (torch.ones(2, 4, 4), (None, 4, 2, 4, COUNTS[:1], FP8, False), ValueError, "expert_num"),
        (torch.ones(2, 4, 4), (torch.ones(3), 4, 2, 4, COUNTS, FP8, False), ValueError, "A_scale"),
        (torch.ones(2, 4, 4), (None, 4, 2, 4, COUNTS, torch.uint8, False), NotImplementedError,
         "qtype must"),
        (torch.ones(2, 4, 4), (COUNTS.float(), 4, 2, 4, COUNTS, "nvfp4", False), ValueError,
         r"A_scale.numel\(\) must be one of \[1\], got 2"),
    ],
)  # fmt: skip
def test_errors(x, arguments, error, message):
    with pytest.raises(error, match=message):
        moe_ops.functional.batched_moe_kernel_quantize_input(x, *arguments)


@pytest.mark.skipif(INTERPRETED, reason="the graph is that of references")
@pytest.mark.parametrize("quant", ["fp8:*x*:float32", "fp8:1x*:float32", "fp8:1x16:pow2", ""])
def test_one_compilation_for_every_number_of_tokens(quant, device):
    """Dispatch, activation and combination, graph and eager alike to the bit."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def layer(x, ids, weights):
        rows, scale, counts, dropped = ops.batched_dispatch(x, None, weights, ids, 0, 4, 8, quant)
        h = ops.batched_activation(rows.float(), counts, "silu")
        out = (rows.float(), scale, counts, dropped, h)
        if quant:
            out += ops.batched_activation_quantize(rows.float(), None, counts, "silu", quant)
        places = ops.batched_rows(ids, 0, 4, 8)
        return *out, ops.moe_unpermute(h.view(32, 32), weights, places, None)

    with torch.fx.experimental._config.patch(backed_size_oblivious=True):
        compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
        for tokens in (7, 3, 1, 0, 30):
            g = torch.Generator().manual_seed(tokens)
            ids = torch.randint(-1, 5, (tokens, 3), generator=g)
            x, weights = torch.randn(tokens, 64, generator=g), torch.rand(tokens, 3, generator=g)
            arguments = to(device, x, ids, weights)
            for a, b in zip(compiled(*arguments), layer(*arguments), strict=True):
                assert_bits(a, b)
    assert counter.frame_count == 1


def test_odd_rows_do_not_fill_their_bytes(device):
    x, counts = torch.ones(2, 33, device=device), torch.ones(1, dtype=torch.int32, device=device)
    ids, key = torch.zeros(2, 1, dtype=torch.int32, device=device), "fp4:1x32:e8m0"
    for call in (
        lambda: ops.batched_dispatch(x, None, None, ids, 0, 1, 2, key),
        lambda: ops.batched_quantize(x[None], None, counts, key),
    ):
        with pytest.raises(ValueError, match="even number of columns"):
            call()
