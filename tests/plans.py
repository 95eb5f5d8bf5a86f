"""Tile plans for expert GEMMs that are called by themselves."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from moe_ops.reference.align import plan_slots
from moe_ops.tensors import Tiles


def planned(
    ids: Tensor, expert_map: Tensor | None, row_tiles: Sequence[int], num_experts: int
) -> Tiles:
    """A plan without the routing it comes from: kernels read it, however few slots there are."""
    return Tiles(plan_slots(ids, expert_map, row_tiles, num_experts))


def on(tiles: Tiles, device: str) -> Tiles:
    """The same elsewhere."""
    return Tiles(*(None if x is None else x.to(device) for x in tiles))
