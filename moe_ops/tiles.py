"""Tile sizes: how many rows a tile has, how large plans get, and which tiles a GEMM uses.

All of it is host arithmetic on sizes. Sizes of tensors (`padded_slots`, `num_tiles`) also run on
symbolic integers, and then add no guards; the choices (`pick_row_tile`, `gemm_tiles`) run inside
an operator, where sizes are numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

ROW_TILES = (16, 32, 64, 128)
"""The row tiles the expert GEMMs choose from, by the number of rows an expert gets."""


@dataclass(frozen=True)
class TileConfig:
    """How one expert GEMM is cut up; ``block_n`` counts output columns."""

    block_m: int
    block_n: int
    block_k: int
    group_m: int
    num_warps: int
    num_stages: int


def cdiv(a, b):
    """``ceil(a / b)``, also for symbolic integers."""
    return (a + b - 1) // b


def padded_slots(num_slots, num_experts, row_tiles: Sequence[int]):
    """Upper bound of the rows in a plan, whichever of ``row_tiles`` is picked.

    No expert is padded by more than ``tile - 1`` rows, and no slot to more than ``tile`` rows.
    """
    tile = max(row_tiles)
    return torch.sym_min(num_slots * tile, num_slots + num_experts * (tile - 1))


def num_tiles(num_slots, num_experts, row_tiles: Sequence[int]):
    """Upper bound of the tiles in a plan, whichever of ``row_tiles`` is picked."""
    tile = min(row_tiles)
    return cdiv(padded_slots(num_slots, num_experts, (tile,)), tile)


def pick_row_tile(row_tiles: Sequence[int], num_slots: int, num_experts: int) -> int:
    """The row tile for ``num_slots`` routed rows over ``num_experts`` experts.

    The smallest that holds 1.5 times the average expert's rows: one tile then covers most experts
    (their weights are read once), and few rows are padding.
    """
    wanted = 1.5 * num_slots / num_experts
    return next((tile for tile in row_tiles if tile >= wanted), row_tiles[-1])


def gemm_tiles(block_m: int, n: int, k: int, itemsize: int, halves: int, smem: int) -> TileConfig:
    """Tiles for rows of ``block_m`` against weights ``(n output columns, k)``.

    Args:
        block_m: rows of a tile.
        n: output columns.
        k: contraction length.
        itemsize: bytes of an element.
        halves: weight tiles per output tile: 2 where gate and up are computed together.
        smem: shared memory of a block, in bytes; stages are taken away until the tile fits.
    """
    small = block_m <= 32
    block_n = (128 if not small else 64) if halves == 2 else 128
    block_k = (128 if small else 64) * 2 // itemsize
    num_warps = 4 if small or block_m == 64 and halves == 1 else 8
    block_n = min(block_n, max(16, 1 << (n - 1).bit_length()))
    block_k = min(block_k, max(16, 1 << (k - 1).bit_length()))
    stage = (block_m + halves * block_n) * block_k * itemsize
    num_stages = max(1, min(4, smem // stage))
    group_m = 1 if small else 8
    return TileConfig(block_m, block_n, block_k, group_m, num_warps, num_stages)
