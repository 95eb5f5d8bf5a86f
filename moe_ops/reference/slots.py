"""The local expert of each slot, and the rows and experts of a plan.

`local_experts` is the one rule by which slots are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor

from moe_ops.dispatch.tile_plan import first_rows, plan_to_read, unpack_plan
from moe_ops.dispatch.tiles import TileRule
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


def planned_slots(
    tiles: AnyTiles, rule: TileRule, num_slots: int, num_experts: int
) -> tuple[Tensor, Tensor]:
    """The slots of a plan without padding and other ranks' slots, and their experts, both int64.

    Slots are grouped by expert, in slot order within an expert. Where kernels use one slot per tile
    and do not read the plan, this function does not read it either.
    """
    plan = plan_to_read(tiles, num_slots, num_experts)
    if plan is None:
        experts = local_experts(cast(Tensor, tiles[1]), tiles[2], num_experts)
        slots = experts.argsort(stable=True)
        slots = slots[experts[slots] >= 0]
        return slots, experts[slots]
    slots, experts, real = _planned_rows(plan, rule, num_slots, num_experts)
    return slots[real], experts[real]


def _planned_rows(
    plan: Tensor, rule: TileRule, num_slots: int, num_experts: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The slot and the expert of each row in use, and a mask of rows not padding and not skipped.

    If the plan's number of rows in use is negative or larger than the plan, no row is in use.
    """
    sorted_token_ids, expert_ids, num_tokens_post_padded = unpack_plan(
        plan, num_slots, num_experts, rule
    )
    tile = rule.row_tile(num_slots, num_experts)
    tiles = int(num_tokens_post_padded) // tile
    tiles = tiles if 0 <= tiles <= len(sorted_token_ids) // tile else 0
    slots = sorted_token_ids[: tiles * tile].long()
    experts = expert_ids[:tiles].long().repeat_interleave(tile)
    real = (slots >= 0) & (slots < num_slots) & (experts >= 0) & (experts < num_experts)
    return slots, experts, real


def rows_between(tiles: AnyTiles, rule: TileRule, num_slots: int, num_experts: int) -> Tensor:
    """The permuted row of each of `planned_slots`, int64.

    Row i of a tile is permuted row ``first row of the tile + i``. Without a plan rows are slots.
    """
    plan = plan_to_read(tiles, num_slots, num_experts)
    if plan is None:
        return planned_slots(tiles, rule, num_slots, num_experts)[0]
    tile = rule.row_tile(num_slots, num_experts)
    _, _, real = _planned_rows(plan, rule, num_slots, num_experts)
    firsts = first_rows(plan, num_slots, num_experts, rule)[: len(real) // tile, None]
    rows = firsts.long() + torch.arange(tile, device=plan.device)
    return rows.flatten()[real].clamp(0, num_slots - 1)


def multiply(x: Tensor, w: Tensor, out: Tensor, batch_invariant: bool) -> None:
    """Write ``x @ w.T`` to ``out``; row by row if it is to be batch-invariant.

    Then the bits of a row must not depend on other rows. The order in which BLAS adds
    depends on the number of rows and on their address, so each row is copied and multiplied alone.
    """
    if not batch_invariant:
        torch.mm(x, w.t(), out=out)
    else:
        for row, result in zip(x.split(1), out, strict=True):
            result.copy_((row.clone() @ w.t())[0])


def runs(experts: Tensor) -> Iterator[tuple[int, slice]]:
    """Each expert that has rows, and the slice of its rows."""
    present, counts = torch.unique_consecutive(experts, return_counts=True)
    first = 0
    for expert, count in zip(present.tolist(), counts.tolist(), strict=True):
        yield expert, slice(first, first + count)
        first += count
