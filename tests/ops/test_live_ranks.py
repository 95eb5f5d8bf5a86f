"""The operators of windows with a mask of live ranks; all ranks are in this process.

`pipeline/test_dead_ranks.py` kills a rank. Here rank 1 of three is dead from the start.
"""

import pytest
import torch
from conftest import INTERPRETED
from operator_samples import I32
from windows_here import DONE

from moe_ops import ops
from moe_ops.pipeline.exchange.memory import allocate_here
from moe_ops.windows import FAILED, MOST_PROGRAMS, WindowLayout

pytestmark = pytest.mark.kernel
R, P, E, H, K, DEAD = 3, 5, 6, 32, 3, 1
LIVE = (0, 2)
COUNTS = (4, 5, 2)
"""Tokens of each rank."""
HOLDERS = torch.tensor([0, 1, 0, 2, 1, 2], dtype=I32)
PLACES = torch.tensor([0, 0, 1, 0, 1, 1], dtype=I32)
F32, F16 = torch.float32, torch.float16


def windows_on(device, experts=0):
    """Windows of three ranks in which there is garbage."""
    layout = WindowLayout(R, P, H, K, 4, experts, True)
    windows = allocate_here(layout, torch.device(device), 0.02)
    at = layout.parts
    for window in windows:
        window.own.fill_(3)
        window.state[FAILED] = window.answer[0] = 1 + DEAD
        window.restart(LIVE)
        assert window.live_ranks() == [*LIVE] and int(window.state[FAILED]) == 0
        assert int(window.answer[0]) == 0 and not window.own[: at.sizes].any()
        window.part(at.sizes, I32, R)[[*LIVE]] = P
    return windows


def after_live_ranks(windows):
    """Let flags say that the live ranks have written, and the dead one has not."""
    for window in (windows[rank] for rank in LIVE):
        for flags in (window.layout.parts.sent, window.layout.parts.returned):
            window.part(flags, I32, R, MOST_PROGRAMS)[[*LIVE]] = DONE


def routing():
    """Ids and weights of all ranks' P tokens: one without experts, and ids that no expert has."""
    g = torch.Generator().manual_seed(3)
    ids = torch.rand(R, P, E, generator=g).argsort(-1)[..., :K].int()
    ids[0, 1], ids[0, 2, 0], ids[2, 0, 1] = -1, E, -7
    return ids, torch.rand(R, P, K, generator=g)


def known(ids):
    """Ids as all ranks get them: of the dead rank's tokens and experts there are none."""
    table = torch.cat([HOLDERS, HOLDERS.new_full((1,), -1)])
    home = table[torch.where((ids >= 0) & (ids < E), ids, -1).long()]
    there = (home >= 0) & (home != DEAD)
    for rank, count in enumerate(COUNTS):
        there[rank, 0 if rank == DEAD else count :] = False
    return torch.where(there, ids, -1), torch.where(there, home, -1)


def lost(ids, rank):
    """Number of a rank's slots whose expert is on the dead rank."""
    mine = ids[rank, : COUNTS[rank]]
    return int((HOLDERS[mine.clamp(0, E - 1).long()] == DEAD)[(mine >= 0) & (mine < E)].sum())


def of_rank(x, rank, device):
    return x[rank, : COUNTS[rank]].to(device)


@pytest.mark.parametrize("quant", ["", "fp8:1x16:float32"])
def test_a_send_and_a_return(quant, device, monkeypatch):
    """Rows go to live ranks, and sums leave out what a dead one would have added."""
    if INTERPRETED:  # programs that take several tokens
        monkeypatch.setattr("moe_ops.kernels.symmetric.programs_of", lambda rows: 2)
    windows, (ids, weights) = windows_on(device), routing()
    untouched, (there, home) = windows[DEAD].own.clone(), known(ids)
    x, holders = torch.randn(R, P, H).to(F16), HOLDERS.to(device)
    for rank in LIVE:
        window = windows[rank]
        rows = [of_rank(part, rank, device) for part in (x, weights, ids)]
        after_live_ranks(windows)
        where = (holders, window.peers, window.state, P, E, False, quant)
        found = ops.symmetric_send(rows[0], None, *rows[1:], *where)
        assert found[3].shape == (R * P, K)
        assert window.num_dropped_slots() == lost(ids, rank) > 0
    for rank in LIVE:
        part = windows[rank].part(windows[0].layout.parts.ids, I32, R, P, K).cpu()
        assert torch.equal(part, there)
        sizes = windows[rank].part(windows[0].layout.parts.sizes, I32, R)
        assert sizes.tolist() == [P] * R
    sums = [torch.randn(R * P, H).to(F16) for _ in range(R)]
    for _ in range(2):  # what later ranks have sent back is there the second time
        out = {}
        for rank in LIVE:
            after_live_ranks(windows)
            where = (holders, windows[rank].peers, windows[rank].state, K)
            out[rank] = ops.symmetric_return(sums[rank].to(device), *where)
    for rank in LIVE:
        total = torch.zeros(P, H)
        for r in LIVE:
            part = sums[r].view(R, P, H)[rank].float()
            total += torch.where((home[rank] == r).any(-1)[:, None], part, 0.0)
        assert torch.equal(out[rank].cpu(), total.to(F16))
        assert int(windows[rank].state[FAILED]) == int(windows[rank].answer[0]) == 0
    assert torch.equal(windows[DEAD].own, untouched)


def test_rows_that_go_everywhere(device):
    """Not to a dead rank."""
    windows, (ids, weights) = windows_on(device), routing()
    untouched, window = windows[DEAD].own.clone(), windows[0]
    rows = [of_rank(part, 0, device) for part in (torch.ones(R, P, H), weights, ids)]
    after_live_ranks(windows)
    where = (None, window.peers, window.state, P, E, False, "")
    found = ops.symmetric_send(rows[0], None, *rows[1:], *where)
    assert (found[3].view(R, P, K)[DEAD] == -1).all()
    assert torch.equal(windows[DEAD].own, untouched)


@pytest.mark.parametrize("quant", ["", "fp8:1x16:float32"])
def test_a_send_of_slots(quant, device):
    """Rows of live ranks' experts are in the order of live ranks' slots, without gaps."""
    windows, (ids, weights) = windows_on(device, E // R), routing()
    untouched, (there, home) = windows[DEAD].own.clone(), known(ids)
    x, placement = torch.randn(R, P, H).to(F16), torch.stack([HOLDERS, PLACES]).to(device)
    for number in (1, 2):  # of several programs the first do not know the ids of the last
        for rank in LIVE:
            window, held = windows[rank], (rank == HOLDERS).nonzero().flatten().int()
            rows = [of_rank(part, rank, device) for part in (x, weights, ids)]
            after_live_ranks(windows)
            where = (placement, held.to(device), window.peers, window.state, P, False, quant)
            found = ops.symmetric_send_batched(rows[0], None, *rows[1:], *where)
            assert window.num_dropped_slots() == number * lost(ids, rank)
    _, _, counts, dropped, local_ids, _ = found
    assert counts.tolist() == [int((there == expert).sum()) for expert in held] and counts.any()
    assert not dropped.any()
    local = PLACES[there.clamp(min=0).long()]
    assert torch.equal(local_ids.cpu(), torch.where(home == rank, local, -1).view(R * P, K))
    if not quant:
        for expert, rows in zip(held, found[0].cpu(), strict=True):
            token = (there == expert).any(-1)
            assert torch.equal(rows[: int(token.sum())], x[token])
    assert int(window.state[FAILED]) == 0
    assert torch.equal(windows[DEAD].own, untouched)


def test_all_ranks_live_again(device):
    """A rank that was left out takes part once all ranks begin anew; the count stays."""
    (window, *_) = windows_on(device)
    window.live[-1] = 5
    window.restart(range(R))
    assert window.live_ranks() == [0, 1, 2] and window.num_dropped_slots() == 5
