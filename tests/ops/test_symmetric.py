"""The operators that exchange rows through windows; all ranks are in this process.

`pipeline/test_symmetric_exchange.py` tests them between processes, which wait for each other.
"""

import time
from typing import NamedTuple

import pytest
import torch
from conftest import HAS_CUDA, INTERPRETED
from operator_samples import I32
from torch._subclasses.fake_tensor import FakeTensorMode
from windows_here import DONE, UNTOUCHED, Ranks

import moe_ops
from moe_ops import ops
from moe_ops.pipeline.exchange.groups import RankGroup
from moe_ops.pipeline.exchange.memory import allocate_here
from moe_ops.reference import symmetric as reference
from moe_ops.reference import symmetric_batched as batched
from moe_ops.reference.quantize import moe_quantize
from moe_ops.windows import FAILED, INTERRUPTED, MOST_PROGRAMS, WindowLayout

pytestmark = pytest.mark.kernel
R, P, E, H, COUNTS = 3, 5, 6, 96, (3, 5, 0)
ROOM, SLOTS = P + 2, 4
"""Rows of a rank and slots for which the windows have room."""
HOLDERS = torch.tensor([0, 1, 0, 2, 1, 0], dtype=I32)
BF16, F32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn


class Form(NamedTuple):
    """How rows travel."""

    quant: str = ""
    scale: tuple = ()
    """One number that is given; or the dtype and columns of scales that travel with their rows."""
    on_input: bool = False
    everywhere: bool = False
    dtype: torch.dtype = BF16
    ids: torch.dtype = I32


FORMS = {
    "unquantized": Form(),
    "float16-everywhere": Form(everywhere=True, dtype=torch.float16, ids=torch.int64),
    "float32-on-input": Form(on_input=True, dtype=F32),
    "rows": Form("fp8:1x*:float32", ids=torch.int64),
    "rows-on-input": Form("int8:1x*:float32", on_input=True),
    "groups-everywhere": Form("fp8:1x32:float32", everywhere=True),
    "exponents": Form("fp8:1x32:e8m0", dtype=F32),
    "fp4-on-input": Form("fp4:1x32:e8m0", on_input=True),
    "fp4-global-scale": Form("fp4:1x16:e4m3:global_scale", (0.03,)),
    "one-scale": Form("fp8:*x*:float32:static", (0.02,)),
    "one-scale-of-rows": Form("int8:1x*:float32:static", (0.02,), on_input=True),
    "scales-travel": Form(scale=(F32, 3), dtype=FP8),
    "scales-of-8-bits-travel": Form(scale=(FP8, 6), dtype=torch.uint8),
    "exponents-travel": Form(scale=(torch.uint8, 3), dtype=torch.uint8, everywhere=True),
}


class Batch(NamedTuple):
    """The tokens of all ranks, in their order."""

    x: torch.Tensor
    scale: torch.Tensor | None
    weights: torch.Tensor
    ids: torch.Tensor
    expert_ranks: torch.Tensor | None


def batch_of(form):
    """Tokens on the CPU: one without experts that is NaN, and ids that no expert has."""
    g, tokens = torch.Generator().manual_seed(7), sum(COUNTS)
    k = 1 if form.on_input else 3
    x = torch.randn(tokens, H, generator=g)
    x[1] = torch.nan
    x = (x.nan_to_num() * 40).round().clamp(0, 99) if form.dtype == torch.uint8 else x
    ids = torch.rand(tokens, E, generator=g).argsort(1)[:, :k].to(form.ids)
    ids[1], ids[2, 0], ids[4, 0] = -1, E, -7
    if form.ids == torch.int64:
        ids[5, 0] = 2**32  # expert 0 once it is cut to 32 bits
    weights = torch.rand(tokens, k, generator=g)
    if not form.on_input:
        weights[6, 0] = torch.nan
    scale = None
    if form.quant and form.scale:
        scale = torch.tensor(form.scale)
    elif form.scale:
        dtype, columns = form.scale
        scale = torch.randint(1, 250, (tokens, columns), generator=g).to(dtype)
    return Batch(x.to(form.dtype), scale, weights, ids, None if form.everywhere else HOLDERS)


def own(batch, rank, device):
    """A rank's part of a batch, on a device."""
    part = slice(sum(COUNTS[:rank]), sum(COUNTS[: rank + 1]))
    parts = (
        a[part] if a is not None and len(a) == sum(COUNTS) else a
        for a in (batch.x, batch.scale, batch.weights, batch.ids, batch.expert_ranks)
    )
    return [None if a is None else a.to(device) for a in parts]


def send_all(ranks, batch, form, device, rows=P):
    """What has arrived at each rank after all have sent."""
    ranks.clear(rows)
    arguments = [own(batch, rank, device) for rank in range(R)]
    rest = (rows, E, form.on_input, form.quant)
    return [ranks.send(rank, *arguments[rank], *rest) for rank in range(R)]


def padded(x):
    """``(R * P, ..)`` of tokens in the order of ranks; padding is zeros."""
    blocks = x.split(COUNTS)
    return torch.cat([torch.cat([b, b.new_zeros(P - len(b), *b.shape[1:])]) for b in blocks])


def known_ids(batch):
    """``(R * P, k)`` int32 with -1 for what no expert has."""
    ids = torch.where((batch.ids >= 0) & (batch.ids < E), batch.ids, -1).int()
    return padded(ids + 1) - 1


def used_by(ids, rank, form):
    """Mask of the rows that ``rank`` gets."""
    home = torch.cat([HOLDERS, HOLDERS.new_tensor([-1])])[ids.long()]
    return (home >= 0 if form.everywhere else home == rank).any(1)


def raw(x):
    return x.contiguous().cpu().view(torch.uint8)


@pytest.fixture
def ranks(request, device):
    """Windows for the rows of a form."""
    return Ranks.of(R, device, ROOM, H, SLOTS, max(2, FORMS[request.param].dtype.itemsize))


EVERY_FORM = pytest.mark.parametrize(
    ("ranks", "form"),
    [(name, form) for name, form in FORMS.items()],
    indirect=["ranks"],
    ids=[*FORMS],
)


@EVERY_FORM
def test_what_arrives(ranks, form, device):
    """The bits of rows quantized on one rank, where they are read; nothing else is written."""
    batch = batch_of(form)
    rows, scale = batch.x, batch.scale
    if form.quant:
        weights = batch.weights if form.on_input else None
        rows, scale = moe_quantize(batch.x, scale, weights, None, None, 0, form.quant)
    elif form.on_input:
        rows = batch.x * batch.weights
    ids = known_ids(batch)
    for rank, arrived in enumerate(send_all(ranks, batch, form, device)):
        assert torch.equal(arrived[3].cpu(), ids)
        real = padded(torch.ones(sum(COUNTS))) > 0
        got, given = arrived[2].cpu()[real], padded(batch.weights)[real]
        torch.testing.assert_close(got, given, rtol=0, atol=0, equal_nan=True)
        used = used_by(ids, rank, form)
        assert not used.all() and (used.any() or rank == 2)
        pairs = [(arrived[0], rows)]
        if scale is not None and scale.dim() == 2:
            pairs.append((arrived[1], scale))
        elif scale is not None:
            assert torch.equal(arrived[1].cpu(), scale)
        for actual, expected in pairs:
            assert actual.dtype == expected.dtype and actual.shape[0] == R * P
            assert torch.equal(raw(actual)[used], raw(padded(expected))[used])
            assert (raw(actual)[~used] == UNTOUCHED).all()
        at, window = ranks.layout.parts, ranks.windows[rank]
        assert (window.own[at.rows + arrived[0].nbytes :] == UNTOUCHED).all()
        assert int(window.error) == 0 and int(window.state[FAILED]) == 0


@EVERY_FORM
def test_fakes_return_what_runs_return(ranks, form, device):
    """Shape, stride, dtype and device."""
    window, batch = ranks.windows[1], batch_of(form)
    real = ranks.send(1, *own(batch, 1, device), P, E, form.on_input, form.quant)
    k, sums = batch.ids.shape[1], torch.zeros(R * P, H, dtype=BF16, device=device)
    real = (*real, ranks.send_back(1, sums, None, k))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = [None if a is None else mode.from_tensor(a) for a in own(batch, 1, device)]
        where = (mode.from_tensor(window.peers), mode.from_tensor(window.state))
        there = ops.symmetric_send(*fake, *where, P, E, form.on_input, form.quant)
        there = (*there, ops.symmetric_return(mode.from_tensor(sums), None, *where, k))
    for a, b in zip(real, there, strict=True):
        assert a.shape == b.shape and a.stride() == b.stride()
        assert a.dtype == b.dtype and a.device == b.device


@pytest.mark.parametrize("name", ["unquantized", "float16-everywhere", "float32-on-input"])
@pytest.mark.parametrize("ranks", ["float32-on-input"], indirect=True)
def test_sums_come_back(ranks, name, device):
    """Sums of the ranks that hold a token's experts, in float32 in the order of ranks."""
    form = FORMS[name]
    batch, g = batch_of(form), torch.Generator().manual_seed(1)
    arrived = send_all(ranks, batch, form, device)
    ids, k = arrived[0][3].cpu(), batch.ids.shape[1]
    sums = [torch.randn(R * P, H, generator=g).to(form.dtype) for _ in range(R)]
    holders = None if batch.expert_ranks is None else batch.expert_ranks.to(device)
    for _ in range(2):  # what later ranks have sent back is there the second time
        out = [ranks.send_back(r, sums[r].to(device), holders, k) for r in range(R)]
    for rank in range(R):
        part, total = slice(rank * P, (rank + 1) * P), None
        for r in range(R):
            there = torch.where(used_by(ids[part], r, form)[:, None], sums[r][part].float(), 0.0)
            total = there if total is None else total + there
        assert torch.equal(out[rank].cpu(), total.to(form.dtype)), rank
        came = ranks.windows[rank].part(ranks.layout.parts.sums, form.dtype, R, P, H).cpu()
        for r in {0, 1, 2} - {rank}:
            left = ~used_by(ids[part], r, form)
            assert (raw(came[r][left]) == UNTOUCHED).all()


def test_calls_one_after_another(device):
    """More rows than programs, and calls one after another; other P in between."""
    ranks = Ranks.of(1, device, 300, 32, 2, 4)
    (window,) = ranks.windows
    for tokens in (7, 300, 0, 141):
        x = torch.arange(tokens * 32, dtype=F32, device=device).view(-1, 32)
        ids = torch.arange(2 * tokens, dtype=I32, device=device).view(-1, 2) % 5
        weights = ids + 0.5
        arrived = ops.symmetric_send(
            x, None, weights, ids, None, window.peers, window.state, tokens, 5, False, ""
        )
        for a, b in zip(arrived[::2], (x, weights), strict=True):
            assert torch.equal(a, b)
        assert torch.equal(arrived[3], ids)
        out = ops.symmetric_return(arrived[0] * 2, None, window.peers, window.state, 2)
        assert torch.equal(out, 2 * x)
    assert int(window.error) == 0
    on_kernels = INTERPRETED or HAS_CUDA  # references have one program
    sent, returned = window.state[:FAILED].view(2, MOST_PROGRAMS).tolist()
    assert sent == ([4, *[3] * 6, *[2] * 125] if on_kernels else [4, *[0] * 131])
    assert returned == ([*[3] * 7, *[2] * 125] if on_kernels else [4, *[0] * 131])


ANY = [-(2**31), -5, -1, 0, 1, 2, 3, 4, 5, 6, 7, 2**16, 2**31 - 1]
WIDE = [2**32, 2**32 + 1, -(2**32), 2**62, -(2**63)]
FLOATS = [torch.nan, torch.inf, -torch.inf, 1e15, 0.0, 1.0]


def any_of(values, shape, dtype, seed):
    g = torch.Generator().manual_seed(seed)
    return torch.tensor(values)[torch.randint(len(values), shape, generator=g)].to(dtype)


@pytest.mark.parametrize("name", ["unquantized", "float16-everywhere", "groups-everywhere", "rows"])
@pytest.mark.parametrize("seed", range(2))
def test_any_numbers(name, seed, device):
    """Ids, weights, rows and ranks of experts that are anything are harmless.

    Ids, sums and what is written where are the reference's.
    """
    form = FORMS[name]
    values = ANY + (WIDE if form.ids == torch.int64 else [])
    holders = None if form.everywhere else any_of(ANY, (E,), I32, seed)
    batch = Batch(
        any_of(FLOATS, (sum(COUNTS), H), form.dtype, seed),
        None,
        any_of(FLOATS, (sum(COUNTS), 3), F32, seed),
        any_of(values, (sum(COUNTS), 3), form.ids, seed),
        holders,
    )
    sums = any_of(FLOATS, (R * P, H), form.dtype, seed)
    found = []
    for place, run in ((device, None), ("cpu", reference)):
        ranks = Ranks.of(R, place, ROOM, H, SLOTS, 2)
        with pytest.MonkeyPatch.context() as patch:
            if run is not None:
                patch.setattr("windows_here.ops", run)
            arrived = send_all(ranks, batch, form, place)
            there = None if holders is None else holders.to(place)
            out = [ranks.send_back(r, sums.to(place), there, 3) for r in range(R)]
        touched = [(raw(a[0]) != UNTOUCHED).any(1) for a in arrived]
        found.append([[a[3].cpu() for a in arrived], touched, [o.cpu() for o in out]])
    (ids, touched, out), (ids_of_reference, touched_by_reference, expected) = found
    assert all(map(torch.equal, ids, ids_of_reference))
    assert all(map(torch.equal, touched, touched_by_reference))
    for a, b in zip(out[2:], expected[2:], strict=True):  # no rank sends to it later
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def test_who_has_written(device):
    """A rank's programs set their flags in all windows, and no other flags."""
    ranks, form = Ranks.of(R, device, ROOM, H, SLOTS, 2), FORMS["unquantized"]
    programs = P if INTERPRETED or HAS_CUDA else 1
    for steps in (1, 2):
        send_all(ranks, batch_of(form), form, device)
        for window in ranks.windows:
            flags = window.part(ranks.layout.parts.sent, I32, R, MOST_PROGRAMS).tolist()
            assert flags[-1] == [steps] * programs + [DONE] * (MOST_PROGRAMS - programs)
            assert flags[:-1] == [[DONE] * MOST_PROGRAMS] * (R - 1)


def test_experts_that_only_another_rank_knows(device):
    """A rank's ids are inside its own ``num_experts``, which may be more than here."""
    ranks = Ranks.of(2, device, 4, 32, 1, 4)
    ranks.clear(1)
    x, weights = torch.ones(1, 32, device=device), torch.ones(1, 1, device=device)
    for rank, expert in ((0, 1), (1, 9)):
        ids = torch.tensor([[expert]], dtype=I32, device=device)
        holders = torch.ones(10, dtype=I32, device=device)
        ranks.send(rank, x, None, weights, ids, holders, 1, 10, False, "")
    sums, few = torch.ones(2, 32, device=device), torch.ones(2, dtype=I32, device=device)
    ranks.send_back(1, sums, few, 1)
    came = ranks.windows[0].part(ranks.layout.parts.sums, F32, 2, 1, 32)
    assert came[1].eq(1).all()
    assert not ranks.send_back(1, sums, few, 1).any()


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_that_does_not_answer(ranks, device):
    """It is noted on the device and on the host, once, nobody waits again, and results are NaN."""
    windows = allocate_here(WindowLayout(ranks, 4, 32, 1, 4), torch.device(device), 0.002)[0]
    x, ids = torch.ones(1, 32, device=device), torch.zeros(1, 1, dtype=I32, device=device)
    where = (windows.peers, windows.state)
    for _ in range(2):
        ops.symmetric_send(x, None, ids.float(), ids, None, *where, 1, 1, False, "")
    out = ops.symmetric_return(x.repeat(ranks, 1), None, *where, 1)
    assert out.shape == (1, 32) and out.isnan().all()
    assert int(windows.state[FAILED]) == ranks
    assert int(windows.answer[0]) == ranks  # rank ``ranks - 1``
    windows.error.zero_()
    ops.symmetric_send(x, None, ids.float(), ids, None, *where, 1, 1, False, "")
    assert int(windows.state[FAILED]) == ranks and int(windows.answer[0]) == 0


def test_a_rank_with_another_number_of_rows(device):
    ranks = Ranks.of(2, device, 4, 32, 1, 4)
    x, ids = torch.ones(1, 32, device=device), torch.zeros(1, 1, dtype=I32, device=device)
    ranks.clear(3)
    ranks.send(0, x, None, ids.float(), ids, None, 2, 1, False, "")
    assert int(ranks.windows[0].state[FAILED]) == int(ranks.windows[0].answer[0]) == -2


class Interrupted:
    """A module ``time`` in which the nth wait is interrupted as by Ctrl-C."""

    monotonic = staticmethod(time.monotonic)

    def __init__(self, nth):
        self.left = nth

    def sleep(self, seconds):
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt


def three_steps(windows, rank):
    """A send, a return and a Batched send of one rank on the CPU, as functions."""
    x, ids = torch.full((1, 32), 1.0 + rank), torch.tensor([[0, 1]], dtype=I32)
    where, holders = (windows.peers, windows.state), torch.tensor([0, 1], dtype=I32)
    placement, held = torch.stack([holders, holders * 0]), torch.tensor([rank], dtype=I32)
    given = (x, None, torch.ones(1, 2), ids)
    return (
        lambda: reference.symmetric_send(*given, holders, *where, 1, 2, False, ""),
        lambda: reference.symmetric_return(x.repeat(2, 1), holders, *where, 2),
        lambda: batched.symmetric_send_batched(*given, placement, held, *where, 1, False, ""),
    )


@pytest.mark.parametrize("step", range(3))
def test_an_interrupted_exchange_is_a_failure(step, monkeypatch):
    """It raises from then on, and other ranks get no more from it than what they had."""
    exchange = moe_ops.pipeline.SymmetricPrepareAndFinalize(RankGroup(1), 4, 32, 2)
    ranks = allocate_here(WindowLayout(2, 4, 32, 2, 4, 1), torch.device("cpu"), 0.02)
    first, second = (three_steps(window, rank) for rank, window in enumerate(ranks))
    monkeypatch.setattr(reference, "time", Interrupted(0))
    with pytest.raises(KeyboardInterrupt):
        first[step]()
    monkeypatch.undo()
    assert int(ranks[0].state[FAILED]) == int(ranks[0].answer[0]) == INTERRUPTED
    exchange.attach(ranks[:1])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="rank 0 of 2 was interrupted .* anew on all ranks"):
            exchange.check()
    assert int(ranks[0].state[0]) == int(ranks[0].state[MOST_PROGRAMS]) == 0
    if step < 2:  # the flag was sent: rank 1 completes the step of which it has everything
        second[step]()
        assert int(ranks[1].state[FAILED]) == 0
    before = ranks[1].own.clone()
    for call in first:  # as compiled calls, which do not ask `check`
        call()
    assert torch.equal(ranks[1].own, before)
    second[step]()
    assert int(ranks[1].state[FAILED]) == int(ranks[1].answer[0]) == 1  # no answer of rank 0


@pytest.mark.parametrize("where", ["_slot_rows", "_places", "exchange"])
def test_interrupted_between_the_two_exchanges_of_a_batched_send(where, monkeypatch):
    """Other ranks have passed the first, and would take the next call's first for the second."""
    ranks = allocate_here(WindowLayout(2, 4, 32, 2, 4, 1), torch.device("cpu"), 5.0)
    flags = ranks[0].part(ranks[0].layout.parts.sent, I32, 2, MOST_PROGRAMS)
    flags[1, 0] = 1  # rank 1 has sent its ids
    real, calls = batched.exchange, []

    def interrupted(*arguments):
        calls.append(arguments)
        if where != "exchange" or len(calls) == 2:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(batched, where, interrupted)
    with pytest.raises(KeyboardInterrupt):
        three_steps(ranks[0], 0)[2]()
    assert int(ranks[0].state[0]) == 1 and int(ranks[0].answer[0]) == INTERRUPTED
