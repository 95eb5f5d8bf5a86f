"""The rule by which the plan and the GEMMs of a layer choose their row tile."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from moe_ops.dispatch.device import row_tile_facts
from moe_ops.dispatch.hopper import operand_bytes, sums_integers
from moe_ops.dispatch.tiles import ROW_TILES, TALL_ROW_TILE, TileRule, one_row_tile
from moe_ops.scheme import Scheme, get_scheme
from moe_ops.tensors import AnyTiles

PORTABLE = TileRule(((16, 16), (32, 32), (64, 64), (math.inf, 128)))
"""The portable kernels' rule: the smallest tile that holds the load."""
EIGHT_BIT = TileRule(((16, 16), (32, 32), (512, 64), (math.inf, 128)))
"""Row tiles for 8-bit GEMMs, which need more registers per row: 128 rows are faster only if nearly
every tile is full."""
HOPPER = {
    1: TileRule(((16, 16), (39, 32), (90, 64), (math.inf, 128))),
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
"""Row tiles for Hopper's kernels, by bytes per number.

8-bit rows: up to 26 rows per expert, so few experts need a second tile of 32 rows that this costs
less than tiles of 64; from 60 rows on, one tile of 128 is faster than two of 64. 16-bit rows: if
experts have about 128 rows, one tile of 192 takes them all; with about 512 rows, three such tiles
do, and weights are read from L2 least often. With 256 or 1024 rows, tiles of 128 in step are
faster."""
HOPPER_DEQUANTIZED = {
    4: TileRule(((16, 16), (41, 32), (80, 64), (math.inf, 128))),
    8: TileRule(((16, 16), (32, 32), (80, 64), (math.inf, 128))),
}
"""Row tiles on Hopper where weights are dequantized, by bits of a stored number.

Up to 53 rows per expert tiles of 64 are faster than tiles of 128, which are half padding, although
some experts need two. Narrow layers would gain up to 65 rows; wide ones lose above 50 to 54. With
4-bit weights tiles of 32 are faster than tiles of 64 up to 27 rows per expert, likewise."""
WIDE_TILE = 64
"""The smallest row tile with which Hopper's and Blackwell's wide matrix instructions work."""
INVARIANT = TileRule(((math.inf, WIDE_TILE),), batch_invariant=True)
"""Row tile of batch-invariant mode: one tile at any load, and so one order of sums along K.

Wide matrix instructions are what many tokens need. For few tokens, whose time goes into reading
weights, padding only adds products. Hopper has several tiles: see `_least_tile`."""

BY_EXPERT = 0
"""Used as the architecture for rows grouped by expert, and without a GPU.

GEMMs of rows grouped by expert were not timed with the row tiles of Hopper's kernels: the number of
padded rows in the Batched format says little about how many rows an expert has."""


def tile_rule(
    scheme: str,
    dtype: torch.dtype,
    device: torch.device,
    batch_invariant: bool = False,
    expert_map: Tensor | None = None,
) -> TileRule:
    """The rule for the plan of a routing and for the GEMMs that follow the plan.

    Args:
        scheme: key of the scheme.
        dtype: dtype of the rows before quantization.
        device: the plan's device.
        batch_invariant: whether the row tile must not depend on the load.
        expert_map: ``(E,)``; None: no expert is elsewhere.
    """
    rule = row_tile_rule(scheme, dtype.itemsize, *row_tile_facts(device), batch_invariant)
    every = None if expert_map is None else expert_map.shape[0]
    return routed_among(rule, every if type(every) is int else None)


@lru_cache(maxsize=1024)
def routed_among(rule: TileRule, num_experts: int | None) -> TileRule:
    """The rule where slots are routed among so many experts, of which some are elsewhere.

    None: none is elsewhere, or the number is a tracer's symbol. A tracer asks for the sizes of
    plans only, which are the same.
    """
    return rule if num_experts is None else replace(rule, routed_experts=num_experts)


def expert_rule(scheme: str, device: torch.device, batch_invariant: bool = False) -> TileRule:
    """The rule for a plan of rows grouped by expert and for the GEMMs that follow the plan."""
    row_tile = row_tile_facts(device)[1]
    return row_tile_rule(scheme, 0, BY_EXPERT, row_tile, batch_invariant)


def gemm_rule(scheme: str, a: Tensor, tiles: AnyTiles, batch_invariant: bool = False) -> TileRule:
    """The rule for the plan that an expert GEMM of the rows ``a`` gets.

    Raises:
        ValueError: ``tiles`` does not have three entries. (Nothing reads ``tiles`` earlier.)
    """
    if len(tiles) != 3:
        raise ValueError(f"tiles must be [plan, topk_ids, expert_map], got {len(tiles)} entries")
    arch, row_tile = row_tile_facts(a.device)
    if tiles[1] is None:
        return row_tile_rule(scheme, a.dtype.itemsize, BY_EXPERT, row_tile, batch_invariant)
    rule = row_tile_rule(scheme, a.dtype.itemsize, arch, row_tile, batch_invariant)
    every = None if tiles[2] is None else tiles[2].shape[0]
    return routed_among(rule, every if type(every) is int else None)


@lru_cache(maxsize=1024)
def row_tile_rule(
    scheme: str, itemsize: int, arch: int, row_tile: int | None, batch_invariant: bool
) -> TileRule:
    """The rule for a scheme, bytes per number before quantization, and fields of `Device`.

    ``arch`` is `BY_EXPERT` for rows grouped by expert.
    """
    if row_tile is not None and not batch_invariant:
        return one_row_tile(row_tile)
    formats = get_scheme(scheme)
    size = operand_bytes(formats)
    if arch == 90 and size is not None and (size == 1 or itemsize == 2):
        rule = HOPPER[size]
    elif formats.activation is not None and not formats.dequantizes_both:
        rule = EIGHT_BIT
    elif arch != 90 or formats.weight is None:
        rule = PORTABLE
    else:
        rule = HOPPER_DEQUANTIZED[formats.weight.element.stored_bits]
    if not batch_invariant:
        return rule
    float32 = formats.activation is None and itemsize == 4
    if float32 or rule in (PORTABLE, EIGHT_BIT):
        return INVARIANT
    return _invariant(rule, _least_tile(formats))


def _least_tile(scheme: Scheme) -> int:
    """The smallest row tile of batch-invariant mode on Hopper.

    Sums of integers along all of K are exact. Unquantized numbers have the same bits at any tile:
    both kinds of matrix instructions add 16 of them along K after 16 others. Others differ in tiles
    of fewer than 64 rows: for fp8 these instructions add in another way, weights that the portable
    kernel dequantizes in registers lie in another order along K, and scales may multiply sums.
    """
    exact = sums_integers(scheme) and scheme.quants[1].shared_cols is None
    small = operand_bytes(scheme) == 2 or exact
    return ROW_TILES[0] if small else WIDE_TILE


@lru_cache(maxsize=16)
def _invariant(rule: TileRule, least: int) -> TileRule:
    """A rule of Hopper in batch-invariant mode: its tiles of ``least`` rows and more."""
    steps = tuple(step for step in rule.steps if step[1] >= least)
    return TileRule(steps, batch_invariant=True)
