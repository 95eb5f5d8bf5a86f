"""Several programs, pieces and turns of the kernels that exchange rows, in the interpreter.

Programs run one after another and cannot wait for each other. So ranks send twice: the second time
a program finds what the others have written the first time.
"""

import pytest
import torch
from conftest import INTERPRETED

if not INTERPRETED:
    pytest.skip("runs kernels in the interpreter", allow_module_level=True)

import triton.language as tl  # noqa: E402
from kernel_cases import check_all, whole  # noqa: E402
from pairwise import cover  # noqa: E402
from windows_here import Ranks  # noqa: E402

from moe_ops.kernels import symmetric, symmetric_batched  # noqa: E402
from moe_ops.kernels._symmetric.sums import (  # noqa: E402
    PACE,
    Pace,
    returned_of,
)
from moe_ops.reference import symmetric as returned_reference  # noqa: E402
from moe_ops.reference import symmetric_batched as reference  # noqa: E402

pytestmark = pytest.mark.kernel
I32, WIDTH, EXPERTS = torch.int32, 48, 4
PLACEMENT = torch.tensor([[0, 1, 0, 1], [1, 0, 0, 1]], dtype=I32)
"""Rank and place of each of four experts on two ranks."""
HELD = torch.tensor([[2, 0], [1, 3]], dtype=I32)


def batched_run(ranks, tokens, k, quant, on_input, scale, rows_per_rank):
    """Results of each rank, and the bytes of all windows from the ids on."""
    exchange = Ranks.of(ranks, "cpu", rows_per_rank, WIDTH, k, 4, EXPERTS)
    placement, held = (PLACEMENT, HELD) if ranks == 2 else (PLACEMENT * 0, torch.arange(4).int())
    if ranks == 1:
        placement = torch.stack([placement[0], torch.arange(4).int()])
    g = torch.Generator().manual_seed(tokens)
    ids = torch.randint(-1, EXPERTS + 1, (ranks, tokens, k), generator=g, dtype=I32)
    ids[0, :, : k // 2 + 1] = 0  # more slots than there is room for, before another expert's rows
    x, weights = whole(ranks, tokens, WIDTH, most=99), 2.0 ** whole(ranks, tokens, k, most=1)
    for _ in range(2):
        exchange.clear(rows_per_rank)
        found = []
        for rank in range(ranks):
            here = held[rank] if ranks == 2 else held
            given = (weights[rank], ids[rank], placement, here)
            rest = (rows_per_rank, on_input, quant)
            out = exchange.send_batched(rank, x[rank].bfloat16(), scale, *given, *rest)
            found.append([out[i].clone() for i in (2, 3, 4)])
    at = exchange.layout.parts
    return found, [window.own[at.ids :] for window in exchange.windows]


def batched(sizes, quant, on_input):
    ranks, tokens, k, rows_per_rank = sizes
    scale = torch.tensor([0.5]) if "static" in quant else None
    arguments = (ranks, tokens, k, quant, on_input, scale, rows_per_rank)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(symmetric_batched, "programs_of", lambda rows: 3)
        patch.setattr(symmetric_batched, "IDS", tl.constexpr(16))
        found, windows = batched_run(*arguments)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("windows_here.ops", reference)
        expected, expected_windows = batched_run(*arguments)
    for pairs in zip(found, expected, strict=True):
        assert all(map(torch.equal, *pairs))
    assert any(dropped.any() for _, dropped, _ in found)
    assert all(map(torch.equal, windows, expected_windows)), "bytes of the windows"


def test_batched():
    """Three programs, which compare 16 ids at a time: more tokens and slots than these."""
    factors = {
        "sizes": ((2, 5, 3, 6), (1, 9, 4, 9), (1, 2, 8, 4)),
        "quant": ("", "fp8:1x16:float32", "int8:1x*:float32", "int8:*x*:float32:static"),
        "on_input": (False, True),
    }
    check_all(cover(factors, ()), batched)


def returned_run(rows, width, k, everywhere, dtype):
    exchange = Ranks.of(3, "cpu", rows, width, k, 4)
    exchange.clear(rows)
    g = torch.Generator().manual_seed(rows)
    holders = None if everywhere else torch.tensor([0, 1, 2, 1], dtype=I32)
    ids = torch.randint(-1, EXPERTS + 1, (3, rows, k), generator=g, dtype=I32)
    weights = torch.ones(3, rows, k)
    sums = whole(3, 3 * rows, width, most=99).to(dtype)
    arrived = []
    for rank, count in enumerate((rows, rows - 1, 1)):
        x = whole(count, width, most=99, seed=rank).to(dtype)
        given = (x, None, weights[rank, :count], ids[rank, :count], holders)
        out = exchange.send(rank, *given, rows, EXPERTS, False, "")
        arrived.append([out[i].clone() for i in (2, 3)])
    for _ in range(2):
        out = [exchange.send_back(r, sums[r], holders, k) for r in range(3)]
    at = exchange.layout.parts.sums
    came = [w.part(at, dtype, 3, rows, width).clone() for w in exchange.windows]
    for rank, part in enumerate(came):
        part[rank] = 0  # a rank's own sums are added where they are
    return out, arrived, [part.view(torch.uint8) for part in came]


def returned(rows, width, k, everywhere, dtype, pace):
    """Few programs: several pieces of turns of one or more rows, the last of which are not full."""
    with pytest.MonkeyPatch.context() as patch:
        programs, tiles = PACES[pace]
        patch.setattr(symmetric, "PACE", tiles)
        patch.setattr(symmetric, "programs_of", lambda rows: min(rows, programs))
        found = returned_run(rows, width, k, everywhere, dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("windows_here.ops", returned_reference)
        expected = returned_run(rows, width, k, everywhere, dtype)
    for actual, wanted in zip(found[:1], expected[:1], strict=True):
        assert all(map(torch.equal, actual, wanted)), "sums"
    for pairs in zip(found[1], expected[1], strict=True):
        assert torch.equal(pairs[0][1], pairs[1][1]), "ids"
    assert all(map(torch.equal, found[2], expected[2])), "sums that came"


PACES = {
    "one row": (2, Pace(rows=4, written=1, added=1, stages=1, warps=1)),
    "three programs": (3, Pace(rows=2, written=256, added=256, stages=2, warps=1)),
    "several words": (1, Pace(rows=32, written=1024, added=128, stages=3, warps=1)),
}
"""Most programs, and their pace. With more than `WORD` rows a piece, the last one looks up some of
them after others."""


def test_returned():
    factors = {"rows": (1, 7, 27), "width": (20, 64), "k": (1, 3), "pace": (*PACES,)}
    factors |= {"everywhere": (False, True), "dtype": (torch.bfloat16, torch.float32)}
    check_all(cover(factors, ()), returned)


def test_wide_rows_are_not_loaded_ahead():
    """They would not fit in shared memory."""
    stages = [returned_of(4, width, torch.float32, PACE).stages for width in (7168, 16384, 40000)]
    assert stages == [PACE.stages, 2, 1]
