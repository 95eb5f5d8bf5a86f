"""The local expert of each slot, and the rows and experts of a plan.

`local_experts` is the one rule by which slots are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, cast

import torch
from torch import Tensor

from moe_ops.dispatch.tile_plan import plan_to_read, unpack_plan
from moe_ops.dispatch.tiles import TileRule, plan_sizes, row_tile
from moe_ops.tensors import AnyTiles


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


class PlannedRows(NamedTuple):
    """The rows of a plan without padding and without the slots of other ranks' experts, int64.

    They are grouped by expert, in slot order within an expert.
    """

    slots: Tensor
    experts: Tensor
    between: Tensor
    """int64: the indices of these rows between two GEMMs if rows are permuted."""


def planned_rows(tiles: AnyTiles, rule: TileRule, num_slots: int, num_experts: int) -> PlannedRows:
    """The rows of a plan.

    If kernels use one slot per tile and do not read the plan, neither does this function; permuted
    rows are then in slot order. If the plan's number of rows in use is negative or larger than the
    plan, no row is in use.
    """
    plan = plan_to_read(tiles, num_slots, num_experts)
    if plan is None:
        experts = local_experts(cast(Tensor, tiles[1]), tiles[2], num_experts)
        slots = experts.argsort(stable=True)
        slots = slots[experts[slots] >= 0]
        return PlannedRows(slots, experts[slots], slots)
    tile = row_tile(rule, num_slots, num_experts)
    all_slots, all_experts, used = unpack_plan(plan, num_slots, num_experts, rule)
    count = int(used) // tile
    count = count if 0 <= count <= len(all_slots) // tile else 0
    slots = all_slots[: count * tile].long()
    experts = all_experts[:count].long().repeat_interleave(tile)
    real = (slots >= 0) & (slots < num_slots) & (experts >= 0) & (experts < num_experts)
    firsts = plan[plan_sizes(num_slots, num_experts, rule).firsts_at :][:count, None]
    between = (firsts.long() + torch.arange(tile, device=plan.device)).flatten()[real]
    return PlannedRows(slots[real], experts[real], between.clamp(0, num_slots - 1))


def multiply(x: Tensor, w: Tensor, out: Tensor, batch_invariant: bool) -> None:
    """Write ``x @ w.T`` to ``out``; row by row in batch-invariant mode.

    In that mode the bits of a row must not depend on other rows. The order in which BLAS adds
    depends on the number of rows and on their address, so each row is copied and multiplied alone.
    """
    if not batch_invariant:
        torch.mm(x, w.t(), out=out)
    else:
        for row, result in zip(x.split(1), out, strict=True):
            result.copy_((row.clone() @ w.t())[0])


def runs(experts: Tensor) -> Iterator[tuple[int, slice]]:
    """Yield each expert that has rows, with the slice of its rows."""
    present, counts = torch.unique_consecutive(experts, return_counts=True)
    first = 0
    for expert, count in zip(present.tolist(), counts.tolist(), strict=True):
        yield expert, slice(first, first + count)
        first += count
