"""Rows that are written into the Batched format of a rank: places, sizes, and what is compiled."""

import pytest
import torch
from conftest import INTERPRETED
from operator_samples import called
from windows_here import UNTOUCHED, Ranks

from moe_ops import ops
from moe_ops.reference import symmetric_batched as reference

pytestmark = pytest.mark.kernel
E, K, H = 4, 2, 48
I32 = torch.int32


def sent(ids, device, quant="", room=None, on_input=False, dtype=torch.bfloat16, scale=None):
    """A send of one rank's tokens to its own experts, and what a dispatch on one rank gives."""
    tokens = ids.shape[0]
    room = room or max(tokens, 1)
    (window,) = Ranks.of(1, device, room, H, ids.shape[1], 4, E).windows
    g = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, H, generator=g).to(device, dtype)
    weights, ids = torch.rand(ids.shape, generator=g).to(device), ids.to(device)
    experts = torch.arange(E, dtype=I32, device=device)
    placement = torch.stack([experts * 0, experts])
    where = (placement, experts, window.peers, window.state, room)
    out = ops.symmetric_send_batched(x, scale, weights, ids, *where, on_input, quant)
    given = weights if on_input else None
    known = torch.where((ids >= 0) & (ids < E), ids, -1)
    expected = ops.batched_dispatch(x, scale, given, known, 0, E, room, quant)
    return out, expected, weights, known


def check(out, expected, weights, known):
    rows, scale, counts, dropped, local, there = out
    wanted, wanted_scale, wanted_counts, num_dropped = expected
    assert torch.equal(counts, wanted_counts)
    assert int(dropped.sum()) == int(num_dropped)
    tokens = known.shape[0]
    assert torch.equal(local[:tokens], known.int()) and (local[tokens:] == -1).all()
    routed = (known >= 0).any(1)
    assert torch.equal(there[:tokens][routed], weights[routed])
    for expert, count in enumerate(counts.tolist()):
        pair = (rows[expert, :count], wanted[expert, :count])
        assert torch.equal(*(y.contiguous().view(torch.uint8) for y in pair))
        if scale.dim() == 3:
            n = count if scale.shape[1] > 1 else 1
            pair = (scale[expert, :n], wanted_scale[expert, :n])
            assert torch.equal(*(y.contiguous().view(torch.uint8) for y in pair))


ONE_TOKEN = torch.tensor([[3, 1]], dtype=I32)
TOKENS = torch.tensor([[0, 1], [1, 0], [-1, 7], [2, 2**20], [3, 0]], dtype=I32)
"""With ids of no expert."""


@pytest.mark.parametrize("quant", ["", "fp8:1x16:float32", "int8:1x*:float32", "fp4:1x16:e8m0"])
@pytest.mark.parametrize("on_input", [False, True])
def test_rows_are_those_of_a_dispatch(quant, on_input, device):
    """In the interpreter with one program, which a room for one token gives."""
    for ids in [ONE_TOKEN] if INTERPRETED else [ONE_TOKEN, TOKENS, TOKENS.long(), TOKENS[:0]]:
        check(*sent(ids, device, quant, on_input=on_input))


def test_one_given_scale(device):
    scale = torch.full((1,), 0.02, device=device)
    check(*sent(ONE_TOKEN, device, "fp8:*x*:float32:static", scale=scale))


@pytest.mark.skipif(INTERPRETED, reason="needs several programs")
def test_rows_that_do_not_fit_are_counted(device):
    """Ids of a token that are the same."""
    out, expected, weights, known = sent(torch.zeros(3, 2, dtype=I32), device)
    assert out[2].tolist() == [3, 0, 0, 0] and out[3].tolist() == [3, 0, 0, 0]
    check(out, expected, weights, known)


HOSTILE = [-(2**31), -5, -1, 2, 3, 4, 5, 6, 7, 2**16, 2**31 - 1]
"""Ranks and experts: of 3 ranks of 2 experts some are there, and of 6 experts in all."""


def run_ranks(place, x, ids, placements, held, quant=""):
    """What each of 3 ranks gets of its one token, all windows in the end, and whether all is well.

    One program, as the others are not waited for: see `Ranks`.
    """
    ranks = Ranks.of(3, place, 2, H, ids.shape[2], 4, 2)
    ranks.clear(1)
    at = ranks.layout.parts
    for window in ranks.windows:
        window.own[at.ids : at.weights] = 255  # ids of -1
    found, weights = [], torch.ones(1, ids.shape[2], device=place)
    for rank, (own, placement, here) in enumerate(zip(ids, placements, held, strict=True)):
        given = (weights, own.to(place), placement.to(place), here.to(place))
        out = ranks.send_batched(rank, x[rank].to(place), None, *given, 1, False, quant)
        found.append([out[i].cpu().clone() for i in (2, 3, 4)])
    return found, [window.own[at.ids :].cpu() for window in ranks.windows]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("quant", ["", "fp8:1x16:float32"])
def test_any_numbers(quant, seed, device, monkeypatch):
    """Ids, ranks and experts that are anything are harmless: the slot is skipped.

    Results, and the bytes of all windows, are the reference's.
    """
    g = torch.Generator().manual_seed(seed)

    def mixed(shape, good):
        wild = torch.tensor(HOSTILE)[torch.randint(len(HOSTILE), shape, generator=g)]
        known = torch.randint(good, shape, generator=g)
        return torch.where(torch.rand(shape, generator=g) < 0.3, wild, known).to(I32)

    x, ids = torch.randn(3, 1, H, generator=g).bfloat16(), mixed((3, 1, 8), 6)
    placements = [torch.stack([mixed((6,), 3), mixed((6,), 2)]) for _ in range(3)]
    held = mixed((3, 2), 6)
    found, windows = run_ranks(device, x, ids, placements, held, quant)
    monkeypatch.setattr("windows_here.ops", reference)
    expected, expected_windows = run_ranks("cpu", x, ids, placements, held, quant)
    for pairs in zip(found, expected, strict=True):
        assert all(map(torch.equal, *pairs))
        counts, _, local = pairs[0]
        assert ((counts >= 0) & (counts <= 3)).all() and ((local >= -1) & (local < 2)).all()
    assert all(map(torch.equal, windows, expected_windows))


def test_slots_that_lead_nowhere(device):
    """No row is written for them, no rank counts them, and their ids arrive as -1."""
    x, ids = torch.ones(3, 1, H).bfloat16(), torch.arange(8, dtype=I32).repeat(3, 1, 1)
    bad = torch.tensor([[3, 2**31 - 1, -5, 0, 1, 0], [0, 0, 1, 2, -5, 1]], dtype=I32)
    held = torch.tensor([[5, -1], [4, 7], [2, 9]], dtype=I32)
    found, windows = run_ranks(device, x, ids, [bad] * 3, held)
    for rank, (counts, dropped, local) in enumerate(found):
        assert counts.tolist() == [int(rank == 0), 0] and not dropped.any()
        assert local[rank].tolist() == [-1] * 5 + [1 if rank == 0 else -1, -1, -1]
    at = Ranks.of(3, "cpu", 2, H, 8, 4, 2).layout.parts
    for rank, window in enumerate(windows):
        arrived = window[: 3 * 8 * 4].view(I32).view(3, 8).tolist()
        assert arrived == [[-1, -1, -1, -1, -1, 5, -1, -1]] * 3
        rows = window[at.rows - at.ids : at.sums - at.ids][: 2 * 3 * H * 2].view(2, 3, 2 * H)
        written = (rows != UNTOUCHED).any(2)
        assert written.tolist() == [[False] * 3, [rank == 0] * 3]


def test_experts_that_only_another_rank_knows(device):
    """A rank's ids are inside its own placement, which may be longer than here."""
    x, ids = torch.ones(3, 1, H).bfloat16(), torch.full((3, 1, 1), 9, dtype=I32)
    few, many = torch.zeros(2, 2, dtype=I32), torch.zeros(2, 10, dtype=I32)
    held = torch.tensor([[0, 1]] * 3, dtype=I32)
    found, _ = run_ranks(device, x, ids, [many, few, few], held)
    assert found[0][2].tolist() == [[0], [-1], [-1]]
    for counts, _, local in found[1:]:
        assert not counts.any() and (local == -1).all()


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("rows_per_rank", lambda x: 9, "rows_per_rank must be at most 8"),
        ("x", lambda x: x.repeat(1, 2), "bytes of a row of x must be at most 128"),
        ("topk_weights", lambda x: x[:, :1], "topk_weights"),
        ("placement", lambda x: x[:1], "placement"),
        ("held", lambda x: x.repeat(2), r"len\(held\) must be at most 4"),
        ("state", lambda x: x[:-1], "state"),
        ("scale", lambda x: torch.ones(1), "scale must be None"),
    ],
)
def test_sizes_that_do_not_fit(name, change, message, device):
    call = called("symmetric_send_batched", device)[0]
    value = change(call[name])
    value = value.to(device) if torch.is_tensor(value) else value
    with pytest.raises(ValueError, match=message):
        ops.symmetric_send_batched(**{**call, name: value})
