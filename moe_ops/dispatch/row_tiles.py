"""Which row tiles the plan and the GEMMs of a layer have: one rule for both."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from moe_ops.dispatch.device import row_tile_facts
from moe_ops.dispatch.hopper import operand_bytes
from moe_ops.dispatch.tiles import TALL_ROW_TILE, TileRule, one_row_tile
from moe_ops.scheme import get_scheme
from moe_ops.tensors import AnyTiles

PORTABLE = TileRule(((16, 16), (32, 32), (64, 64), (math.inf, 128)))
"""The smallest tile that holds the load."""
EIGHT_BIT = TileRule(((16, 16), (32, 32), (512, 64), (math.inf, 128)))
"""For 8-bit rows, which need more registers: 128 rows pay only where nearly every tile is full."""
HOPPER = {
    1: TileRule(((16, 16), (32, 32), (90, 64), (math.inf, 128))),
    2: TileRule(
        (
            (16, 16),
            (32, 32),
            (64, 64),
            (128, 128),
            (256, TALL_ROW_TILE),
            (512, 128),
            (1024, TALL_ROW_TILE),
            (math.inf, 128),
        )
    ),
}
"""For Hopper's own kernels, by bytes per number.

8-bit rows: from 60 rows an expert on one tile of 128 is faster than two of 64. 16-bit rows: if
experts have about 128 rows, one tile of 192 takes them all; with about 512 rows three such tiles
do, and weights are read from L2 least. With 256 or 1024 rows tiles of 128 in step are faster."""
INVARIANT = TileRule(((math.inf, 64),), batch_invariant=True)
"""For batch-invariant mode: one tile at any load, and so one order of sums along K.

The smallest with which Hopper's and Blackwell's wide matrix instructions work, for many tokens; for
few, whose time goes into reading weights, padding adds products only."""

BY_EXPERT = 0
"""Stands for an architecture where rows lie by expert, and without a GPU.

GEMMs of such rows were not timed with the row tiles of Hopper's kernels: the padded rows of the
Batched format say little about how many rows an expert has."""


def tile_rule(
    scheme: str, dtype: torch.dtype, device: torch.device, batch_invariant: bool = False
) -> TileRule:
    """The rule of the plan of a routing, and of the GEMMs that follow it.

    Args:
        scheme: key of the scheme.
        dtype: of rows that are not quantized.
        device: where the plan is.
        batch_invariant: whether the tiles may not follow the load.
    """
    return rule_of(scheme, dtype.itemsize, *row_tile_facts(device), batch_invariant)


def expert_rule(scheme: str, device: torch.device, batch_invariant: bool = False) -> TileRule:
    """The rule of a plan of rows that lie by expert, and of the GEMMs that follow it."""
    row_tile = row_tile_facts(device)[1]
    return rule_of(scheme, 0, BY_EXPERT, row_tile, batch_invariant)


def gemm_rule(scheme: str, a: Tensor, tiles: AnyTiles, batch_invariant: bool = False) -> TileRule:
    """The rule of the plan that an expert GEMM of the rows ``a`` is given.

    Raises:
        ValueError: ``tiles`` are not three; nobody reads them earlier.
    """
    if len(tiles) != 3:
        raise ValueError(f"tiles must be [plan, topk_ids, expert_map], got {len(tiles)} entries")
    arch, row_tile = row_tile_facts(a.device)
    if tiles[1] is None:
        arch = BY_EXPERT
    return rule_of(scheme, a.dtype.itemsize, arch, row_tile, batch_invariant)


@lru_cache(maxsize=1024)
def rule_of(
    scheme: str, itemsize: int, arch: int, row_tile: int | None, batch_invariant: bool
) -> TileRule:
    """The rule by values: bytes of a number that is not quantized, and fields of `Device`.

    ``arch`` is `BY_EXPERT` for rows that lie by expert.
    """
    if batch_invariant:
        return INVARIANT
    if row_tile is not None:
        return one_row_tile(row_tile)
    known = get_scheme(scheme)
    size = operand_bytes(known)
    if arch == 90 and size is not None and (size == 1 or itemsize == 2):
        return HOPPER[size]
    return PORTABLE if known.activation is None or known.decoded else EIGHT_BIT
