"""Reference of the operator that writes slots' rows into the Batched format of other ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops.fake_impls.symmetric_batched import symmetric_send_batched as empty_sent
from moe_ops.reference.quantize import moe_quantize
from moe_ops.reference.symmetric import (
    check_sizes,
    completed,
    count_left_out,
    exchange,
    is_live,
    peer,
    reached,
    write_routing,
)
from moe_ops.scheme import parse_quant
from moe_ops.windows import Windows, windows_of


def symmetric_send_batched(
    x: Tensor,
    scale: Tensor | None,
    topk_weights: Tensor,
    topk_ids: Tensor,
    placement: Tensor,
    held: Tensor,
    peers: Tensor,
    state: Tensor,
    rows_per_rank: int,
    on_input: bool,
    quant: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Send ids; then quantize this rank's tokens, and write a row for each of their slots."""
    out = empty_sent(
        x,
        scale,
        topk_weights,
        topk_ids,
        placement,
        held,
        peers,
        state,
        rows_per_rank,
        on_input,
        quant,
    )
    windows = windows_of(peers)
    mine = windows.arrived(out[0], out[1], topk_ids.shape[1], quant)
    layout, rank, (tokens, top_k) = windows.layout, windows.rank, topk_ids.shape
    room, at = layout.ranks * rows_per_rank, layout.parts
    home, expert = _placed(topk_ids, placement, windows, len(held))
    valid = (topk_ids >= 0) & (topk_ids < placement.shape[1])
    count_left_out(windows, valid & (home < 0))
    ids = torch.where(home >= 0, topk_ids, -1)
    write_routing(windows, state, topk_weights, ids, rows_per_rank)
    exchange(windows, state, 0, at.sent)
    check_sizes(windows, state, rows_per_rank)
    of_all = mine[3]
    with completed(windows, state):
        rows, row_scale = _slot_rows(x, scale, topk_weights, on_input, quant)
        place = _places(of_all)[rank * rows_per_rank : rank * rows_per_rank + tokens]
        if quant and parse_quant(quant).per_tensor:
            mine[1].copy_(row_scale.reshape(1, 1, 1).expand_as(mine[1]))
        for other in reached(windows, state):
            window = peer(windows, other)
            there_rows, there_scales, *_ = window.arrived(out[0], out[1], top_k, quant)
            token, slot = ((home == other) & (place < room)).nonzero(as_tuple=True)
            row = expert[token, slot] * room + place[token, slot]
            there_rows.flatten(0, 1)[row] = rows[token, slot]
            if quant and not parse_quant(quant).per_tensor:
                there_scales.flatten(0, 1)[row] = row_scale[token, slot]
        exchange(windows, state, 0, at.sent)
    home, expert = _placed(of_all, placement, windows, len(held))
    local_ids = torch.where(home == rank, expert, -1).int()
    return mine[0], mine[1], *_counts(of_all, held, room), local_ids, mine[2]


def _counts(ids: Tensor, held: Tensor, room: int) -> tuple[Tensor, Tensor]:
    """int32: the rows that each held expert takes, and those that find no room."""
    count = torch.stack([((ids == e) & (ids >= 0)).sum() for e in held]).int()
    return count.clamp(max=room), (count - room).clamp(min=0)


def _placed(
    ids: Tensor, placement: Tensor, windows: Windows, experts: int
) -> tuple[Tensor, Tensor]:
    """Rank and local expert of each slot; rank -1 for a slot that no expert computes.

    Ids and placement may be anything: what leads out of the ranks or their experts has no expert.
    """
    valid = (ids >= 0) & (ids < placement.shape[1])
    home, expert = placement.long()[:, torch.where(valid, ids, 0).long()]
    valid &= (home >= 0) & (home < windows.layout.ranks) & (expert >= 0) & (expert < experts)
    if windows.live is not None:
        valid &= is_live(home, windows.live)
    return torch.where(valid, home, -1), torch.where(valid, expert, 0)


def _places(ids: Tensor) -> Tensor:
    """Number of earlier slots with the same id, in the shape of ``ids``."""
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    _, counts = torch.unique_consecutive(flat[order], return_counts=True)
    first = (counts.cumsum(0) - counts).repeat_interleave(counts)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=ids.device) - first
    return place.view(ids.shape)


def _slot_rows(
    x: Tensor, scale: Tensor | None, topk_weights: Tensor, on_input: bool, quant: str
) -> tuple[Tensor, Tensor]:
    """A row for each slot ``(T, k, ..)``, and its scales (one for all rows: as it is)."""
    shape, k = topk_weights.shape, topk_weights.shape[1]
    weights = topk_weights if on_input else None
    if not quant:
        rows = x.float().repeat_interleave(k, 0)
        if weights is not None:
            rows = rows * weights.reshape(-1, 1).float()
        return rows.to(x.dtype).unflatten(0, shape), x.new_empty(0)
    if weights is None:
        weights = torch.ones_like(topk_weights)
    rows, row_scale = moe_quantize(x, scale, weights, None, None, 0, quant)
    scales = row_scale.unflatten(0, shape) if row_scale.dim() == 2 else row_scale
    return rows.unflatten(0, shape), scales
