"""Which expert each slot goes to: the one rule by which slots are skipped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import Tensor

from moe_ops.dispatch.tiles import pick_row_tile
from moe_ops.tensors import AnyTiles, first_rows, plan_to_read, unpack_plan


def local_experts(topk_ids: Tensor, expert_map: Tensor | None, num_local_experts: int) -> Tensor:
    """The local expert of each slot, -1 where it is skipped: int64, flat, in slot order.

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


def planned_slots(
    tiles: AnyTiles, row_tiles: Sequence[int], num_slots: int, num_experts: int
) -> tuple[Tensor, Tensor]:
    """The slots of some tiles, padding and other ranks' slots left out, and their experts.

    Both int64, so that slots of an expert lie together, in their order. So few slots that no kernel
    reads the plan are found without it here, too.
    """
    plan = plan_to_read(tiles, num_slots, num_experts)
    if plan is None:
        experts = local_experts(cast(Tensor, tiles[1]), tiles[2], num_experts)
        slots = experts.argsort(stable=True)
        slots = slots[experts[slots] >= 0]
        return slots, experts[slots]
    slots, experts, real = _planned_rows(plan, row_tiles, num_slots, num_experts)
    return slots[real], experts[real]


def _planned_rows(
    plan: Tensor, row_tiles: Sequence[int], num_slots: int, num_experts: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The slot and the expert of each row in use, and which rows are neither padding nor skipped.

    No row is in use where a plan says that more are than it has.
    """
    sorted_token_ids, expert_ids, num_tokens_post_padded = unpack_plan(
        plan, num_slots, num_experts, row_tiles
    )
    tile = pick_row_tile(row_tiles, num_slots, num_experts)
    tiles = int(num_tokens_post_padded) // tile
    tiles = tiles if 0 <= tiles <= len(sorted_token_ids) // tile else 0
    slots = sorted_token_ids[: tiles * tile].long()
    experts = expert_ids[:tiles].long().repeat_interleave(tile)
    real = (slots >= 0) & (slots < num_slots) & (experts >= 0) & (experts < num_experts)
    return slots, experts, real


def rows_between(
    tiles: AnyTiles, row_tiles: Sequence[int], num_slots: int, num_experts: int
) -> Tensor:
    """Where the rows of `planned_slots` lie in expert order: int64.

    Row i of a tile lies i rows after the tile's first; without a plan every row lies by slot.
    """
    plan = plan_to_read(tiles, num_slots, num_experts)
    if plan is None:
        return planned_slots(tiles, row_tiles, num_slots, num_experts)[0]
    tile = pick_row_tile(row_tiles, num_slots, num_experts)
    _, _, real = _planned_rows(plan, row_tiles, num_slots, num_experts)
    firsts = first_rows(plan, num_slots, num_experts, row_tiles)[: len(real) // tile, None]
    rows = firsts.long() + torch.arange(tile, device=plan.device)
    return rows.flatten()[real].clamp(0, num_slots - 1)


def multiply(x: Tensor, w: Tensor, out: Tensor, row_tiles: Sequence[int]) -> None:
    """Write ``x @ w.T`` to ``out``; where there is one row tile, row by row.

    One tile promises that a row's bits depend on no other row. The order in which BLAS adds depends
    on how many rows there are, and on where they lie in memory: each row is multiplied as a copy.
    """
    if len(row_tiles) > 1:
        torch.mm(x, w.t(), out=out)
    else:
        for row, result in zip(x.split(1), out, strict=True):
            result.copy_((row.clone() @ w.t())[0])


def runs(experts: Tensor) -> Iterator[tuple[int, slice]]:
    """Each expert that has rows, and where they are."""
    present, counts = torch.unique_consecutive(experts, return_counts=True)
    first = 0
    for expert, count in zip(present.tolist(), counts.tolist(), strict=True):
        yield expert, slice(first, first + count)
        first += count
