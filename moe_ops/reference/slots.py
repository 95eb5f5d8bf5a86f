"""The local expert of each slot, and the rows and experts of a plan.

`local_experts` is the one rule by which slots are skipped.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from itertools import accumulate, chain, groupby
from operator import itemgetter
from typing import NamedTuple, cast

import torch
from torch import Tensor

from moe_ops.dispatch.tile_plan import plan_to_read
from moe_ops.dispatch.tiles import PLAN_HEADER, TileRule, plan_sizes, row_tile
from moe_ops.tensors import AnyTiles

LINE = 64
"""Bytes of a cache line. BLAS sums by how rows and weights lie to it."""


def local_experts(topk_ids: Tensor, expert_map: Tensor | None, num_local_experts: int) -> Tensor:
    """The local expert of each slot, -1 for a skipped slot: int64, flat, in slot order.

    A slot is skipped when its id is negative, not less than the number of experts (the length of
    ``expert_map``, or ``num_local_experts`` without one), or mapped to no local expert.
    """
    ids = topk_ids.flatten().long()
    num_experts = num_local_experts if expert_map is None else expert_map.shape[0]
    valid = (ids >= 0) & (ids < num_experts)
    if expert_map is not None and num_experts:
        ids = expert_map.long()[torch.where(valid, ids, 0)]
        valid &= (ids >= 0) & (ids < num_local_experts)
    return torch.where(valid, ids, -1)


def none_skipped(topk_ids: Tensor, expert_map: Tensor | None, num_local_experts: int) -> bool:
    """Whether certainly no slot is skipped; with an expert map nothing is certain."""
    if expert_map is not None or not topk_ids.numel():
        return False
    lowest, highest = topk_ids.aminmax()
    return bool(lowest >= 0) and bool(highest < num_local_experts)


def slots_by_expert(
    topk_ids: Tensor, expert_map: Tensor | None, num_local_experts: int
) -> list[tuple[int, list[int]]]:
    """Each local expert that has slots, in order, with its slots in order."""
    if expert_map is not None:
        topk_ids = local_experts(topk_ids, expert_map, num_local_experts)
    expert_of = topk_ids.flatten().tolist().__getitem__
    slots = sorted(range(topk_ids.numel()), key=expert_of)
    groups = groupby(slots, key=expert_of)
    return [(expert, [*same]) for expert, same in groups if 0 <= expert < num_local_experts]


class PlannedRows(NamedTuple):
    """The rows of a plan without padding and without the slots of other ranks' experts.

    They are grouped by expert, in slot order within an expert.
    """

    slots: Tensor
    """int64."""
    experts: list[int]
    """The experts that have rows."""
    counts: list[int]
    """The number of rows of each of these experts."""
    between: Tensor | slice
    """The indices of these rows between two GEMMs if rows are permuted; int64 if a tensor."""
    in_order: bool = False
    """Whether these are all slots, in slot order, with and without a permutation."""


def planned_rows(
    tiles: AnyTiles, rule: TileRule, num_slots: int, num_experts: int, by_slot: bool = False
) -> PlannedRows:
    """The rows of a plan; ``by_slot``: without one, experts come in the order of their slots.

    If kernels use one slot per tile and do not read the plan, neither does this function; permuted
    rows are then in slot order. If the plan's number of rows in use is negative or larger than the
    plan, no row is in use. Slots and rows outside of their tensors are moved inside.
    """
    plan = plan_to_read(tiles, num_slots, num_experts)
    if plan is None:
        ids = cast(Tensor, tiles[1])
        groups = slots_by_expert(ids, tiles[2], num_experts)
        if by_slot:
            groups.sort(key=itemgetter(1))
        slots = [slot for _, same in groups for slot in same]
        index, in_order = _index(slots, ids.device), by_slot and slots == [*range(num_slots)]
        counts = [len(same) for _, same in groups]
        return PlannedRows(index, [expert for expert, _ in groups], counts, index, in_order)
    tile = row_tile(rule, num_slots, num_experts)
    sizes, entries = plan_sizes(num_slots, num_experts, rule), plan.tolist()
    tiles_used = entries[0] // tile if 0 <= entries[0] <= sizes.rows else 0
    slots, firsts = [], []
    experts, counts = [], []
    for expert, same in groupby(range(tiles_used), key=entries[sizes.experts_at :].__getitem__):
        first, *others = same
        begin = PLAN_HEADER + first * tile
        # Slots are ascending, and padding follows, which is larger than any slot.
        end = bisect_left(entries, num_slots, begin, begin + (1 + len(others)) * tile)
        if begin < end and 0 <= expert < num_experts:
            slots += entries[begin:end]
            firsts.append(entries[sizes.firsts_at + first])
            experts.append(expert)
            counts.append(end - begin)
    index = _index(slots, plan.device).clamp_(0, num_slots - 1)
    if firsts == [*accumulate(counts, initial=0)][:-1]:
        return PlannedRows(index, experts, counts, slice(0, len(slots)))
    ranges = (range(row, row + count) for row, count in zip(firsts, counts, strict=True))
    between = _index([*chain.from_iterable(ranges)], plan.device).clamp_(0, num_slots - 1)
    return PlannedRows(index, experts, counts, between)


def present_rows(planned: PlannedRows, rows: Tensor | None) -> PlannedRows:
    """The rows of a plan whose experts have a row of the weight, which stands for the expert.

    Args:
        planned: the rows of a plan.
        rows: the row of each expert, -1: none. None: expert e is row e.
    """
    if rows is None:
        return planned
    slots, experts, counts, between, _ = planned
    row_of = [rows.tolist()[expert] for expert in experts]
    each = [row >= 0 for row, count in zip(row_of, counts, strict=True) for _ in range(count)]
    kept = torch.tensor(each, dtype=torch.bool, device=slots.device)
    if isinstance(between, slice):
        between = torch.arange(between.start, between.stop, device=slots.device)
    return PlannedRows(
        slots[kept],
        [row for row in row_of if row >= 0],
        [count for row, count in zip(row_of, counts, strict=True) if row >= 0],
        between[kept],
    )


def _index(entries: list[int], device: torch.device) -> Tensor:
    """``entries`` in a tensor, int64."""
    if not entries:
        return torch.empty(0, dtype=torch.int64, device=device)
    return torch.frombuffer(array("q", entries), dtype=torch.int64).to(device)


def take(x: Tensor, rows: Tensor | slice) -> Tensor:
    """``x[rows]``; `index_select` takes a fraction of the time of an index."""
    return x[rows] if isinstance(rows, slice) else x.index_select(0, rows)


def multiply(x: Tensor, w: Tensor, out: Tensor, batch_invariant: bool) -> None:
    """Write ``x @ w`` to ``out``; row by row in batch-invariant mode.

    In that mode the bits of a row must not depend on other rows. The order in which BLAS adds
    depends on the number of rows and on their address, so each row is copied and multiplied alone.
    """
    if not batch_invariant:
        torch.mm(x, w, out=out)
    else:
        for row, result in zip(x.split(1), out, strict=True):
            result.copy_((row.clone() @ w)[0])
