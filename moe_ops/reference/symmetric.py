"""Reference of the operators that exchange rows through windows: ranks are processes on one host.

The protocol is that of the kernels with one program. Windows are memory that processes share.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from moe_ops.fake_impls.symmetric import symmetric_send as empty_sent
from moe_ops.reference.quantize import moe_quantize
from moe_ops.windows import FAILED, INTERRUPTED, MOST_PROGRAMS, Window, Windows, windows_of


def symmetric_send(
    x: Tensor,
    scale: Tensor | None,
    topk_weights: Tensor,
    topk_ids: Tensor,
    expert_ranks: Tensor | None,
    peers: Tensor,
    state: Tensor,
    rows_per_rank: int,
    num_experts: int,
    on_input: bool,
    quant: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantize this rank's tokens and write each to the ranks of its experts; ids go to all."""
    empty = empty_sent(
        x,
        scale,
        topk_weights,
        topk_ids,
        expert_ranks,
        peers,
        state,
        rows_per_rank,
        num_experts,
        on_input,
        quant,
    )
    windows = windows_of(peers)
    rank, top_k = windows.rank, topk_ids.shape[1]
    arrived = windows.arrived(empty[0], empty[1], top_k, quant)
    valid = (topk_ids >= 0) & (topk_ids < num_experts)
    home = homes(torch.where(valid, topk_ids, -1), expert_ranks, windows.live)
    count_left_out(windows, valid & (home < 0))
    rows, row_scale = x, scale
    if quant:
        weights = topk_weights if on_input else None
        rows, row_scale = moe_quantize(x, scale, weights, None, None, 0, quant)
    elif on_input:
        rows = (x.float() * topk_weights.float()).to(x.dtype)
    if row_scale is not None and row_scale.dim() == 1:  # one for all rows
        arrived[1].copy_(row_scale)
    ids = torch.where(home >= 0, topk_ids, -1)
    for other in reached(windows, state):
        there = peer(windows, other)
        to_rows, to_scales, *_ = there.arrived(empty[0], empty[1], top_k, quant)
        own = slice(rank * rows_per_rank, rank * rows_per_rank + x.shape[0])
        sent = _goes_to(home, other, expert_ranks).nonzero().flatten()
        to_rows[own][sent] = rows[sent]
        if to_scales.dim() == 2 and row_scale is not None:
            to_scales[own][sent] = row_scale[sent]
    write_routing(windows, state, topk_weights, ids, rows_per_rank)
    exchange(windows, state, 0, windows.layout.parts.sent)
    check_sizes(windows, state, rows_per_rank)
    return arrived


def symmetric_return(
    sums: Tensor,
    expert_ranks: Tensor | None,
    peers: Tensor,
    state: Tensor,
    top_k: int,
) -> Tensor:
    """Write partial sums to their tokens' ranks, and add the ranks' sums of this rank's tokens.

    Once a rank has failed to answer all sums are NaN.
    """
    windows = windows_of(peers)
    layout, rank, (tokens, width) = windows.layout, windows.rank, sums.shape
    ranks, each = layout.ranks, tokens // layout.ranks
    layout.check_room("sums", each, top_k, width * sums.itemsize)
    ids = windows.part(layout.parts.ids, torch.int32, ranks, each, top_k)
    home = homes(ids, expert_ranks, windows.live)
    blocks, shape = sums.view(ranks, each, width), (ranks, each, width)
    for other in reached(windows, state):
        sent = _goes_to(home[other], rank, expert_ranks)
        to = peer(windows, other).part(layout.parts.sums, sums.dtype, *shape)
        to[rank][sent] = blocks[other][sent]
    exchange(windows, state, MOST_PROGRAMS, layout.parts.returned)
    came = windows.part(layout.parts.sums, sums.dtype, *shape)
    inside = [_goes_to(home[rank], other, expert_ranks)[:, None] for other in range(ranks)]
    total = torch.where(inside[0], came[0].float(), 0.0)
    for other in range(1, ranks):
        total = total + torch.where(inside[other], came[other].float(), 0.0)
    return total.masked_fill_(state[FAILED] != 0, torch.nan).to(sums.dtype)


def homes(ids: Tensor, expert_ranks: Tensor | None, live: Tensor | None) -> Tensor:
    """The rank of each slot's expert, -1 for a slot that no expert of a live rank computes."""
    if expert_ranks is None:
        return torch.where(ids >= 0, 0, -1)
    valid = (ids >= 0) & (ids < len(expert_ranks))
    table = torch.cat([expert_ranks, expert_ranks.new_full((1,), -1)])
    home = table[torch.where(valid, ids, -1).long()]
    return home if live is None else torch.where(is_live(home, live), home, -1)


def is_live(rank: Tensor, live: Tensor) -> Tensor:
    """Whether numbers are live ranks; ``live`` is `Windows.live`."""
    inside = (rank >= 0) & (rank < len(live) - 1)
    return inside & (live[torch.where(inside, rank, 0).long()] != 0)


def count_left_out(windows: Windows, slots: Tensor) -> None:
    """Count the slots of a mask as left out."""
    if windows.live is not None:
        windows.live[-1] += slots.sum()


def _goes_to(home: Tensor, rank: int, expert_ranks: Tensor | None) -> Tensor:
    """Mask of the tokens that have an expert on ``rank``."""
    return (home >= 0 if expert_ranks is None else home == rank).any(-1)


def peer(windows: Windows, rank: int) -> Window:
    """The window of a rank."""
    if rank == windows.rank:
        return windows
    size = windows.layout.parts.end
    raw = (ctypes.c_uint8 * size).from_address(windows.addresses[rank])
    return Window(windows.layout, torch.frombuffer(raw, dtype=torch.uint8))


def reached(windows: Windows, state: Tensor) -> list[int]:
    """Ranks that this rank writes to: after a failure only itself, as it does not wait for others.

    The others may still read what it wrote before. They fail when they wait for it.
    """
    return [windows.rank] if int(state[FAILED]) else windows.live_ranks()


def write_routing(
    windows: Windows, state: Tensor, topk_weights: Tensor, topk_ids: Tensor, rows_per_rank: int
) -> None:
    """Write weights and ids of this rank's tokens, and P, to the windows of all ranks.

    A dead rank has no window. Its tokens, in this rank's window, have no ids.
    """
    for other in reached(windows, state):
        _write_routing(peer(windows, other), windows.rank, topk_weights, topk_ids, rows_per_rank)
    for dead in {*range(windows.layout.ranks)} - {*windows.live_ranks()}:
        _write_routing(windows, dead, topk_weights[:0], topk_ids[:0], rows_per_rank)


def _write_routing(
    window: Window, rank: int, topk_weights: Tensor, topk_ids: Tensor, rows_per_rank: int
) -> None:
    """Write to a window the weights and ids of the tokens of ``rank``, and its P."""
    layout, (tokens, top_k) = window.layout, topk_ids.shape
    at, ranks = layout.parts, layout.ranks
    ids = window.part(at.ids, torch.int32, ranks, rows_per_rank, top_k)[rank]
    ids[:tokens], ids[tokens:] = topk_ids, -1
    weights = window.part(at.weights, torch.float32, ranks, rows_per_rank, top_k)
    weights[rank, :tokens] = topk_weights
    window.part(at.sizes, torch.int32, ranks)[rank] = rows_per_rank


def check_sizes(windows: Windows, state: Tensor, rows_per_rank: int) -> None:
    """Note a rank whose P is another one."""
    layout = windows.layout
    others = windows.part(layout.parts.sizes, torch.int32, layout.ranks) != rows_per_rank
    if others.any() and not int(state[FAILED]):
        _fail(windows, state, -1 - int(others.nonzero()[-1]))


def _fail(windows: Windows, state: Tensor, error: int) -> None:
    state[FAILED] = error
    windows.error.fill_(error)


@contextmanager
def completed(windows: Windows, state: Tensor) -> Iterator[None]:
    """Note a failure if an exception such as KeyboardInterrupt leaves this context.

    Within it other ranks get flags of a step that this rank has not completed. If it went on as
    before, it would take their flags of this step for flags of its next call.
    """
    try:
        yield
    except BaseException:
        _fail(windows, state, INTERRUPTED)
        raise


def exchange(windows: Windows, state: Tensor, index: int, offset: int) -> None:
    """Tell all ranks that this one has written, and wait until all have; note one that has not."""
    ranks, live = windows.layout.ranks, windows.live_ranks()
    epoch = int(state[index]) + 1
    with completed(windows, state):
        for other in reached(windows, state):
            there = peer(windows, other).part(offset, torch.int32, ranks, MOST_PROGRAMS)
            there[windows.rank, 0] = epoch
        flags = windows.part(offset, torch.int32, ranks, MOST_PROGRAMS)[:, 0]
        end = time.monotonic() + windows.timeout
        while not int(state[FAILED]):
            behind = [other for other in live if int(flags[other]) < epoch]
            if not behind:
                break
            if time.monotonic() > end:
                _fail(windows, state, 1 + behind[-1])
            time.sleep(1e-4)
        state[index] = epoch
