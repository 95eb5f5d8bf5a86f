"""Plans and expert maps that name rows of a weight instead of experts.

The weight is the slots of experts in host memory, and has fewer rows than there are experts. GEMM
kernels need not know of that. Whatever a tile or a slot reads of its expert lies in the expert's
row, so rows take the place of experts before the launch. A plan loses the tiles of experts that
have no row. A map gets -1 for such experts, and kernels store nothing for their slots.
"""

from __future__ import annotations

from functools import lru_cache

import triton
import triton.language as tl

from moe_ops.kernels._runtime.slots import HEADER, next_power_of_2

ENTRIES = tl.constexpr(1024)
"""Entries of a map that a program reads at once."""
SLOTS = 2048
"""Slots of a plan that a program copies at once."""


@triton.jit
def write_map(expert_map, rows, out, num_global, num_experts):
    """Write the row of each expert id, -1 where there is none; programs share the ids."""
    for start in range(tl.program_id(0) * ENTRIES, num_global, tl.num_programs(0) * ENTRIES):
        at = start + tl.arange(0, ENTRIES)
        expert = tl.load(expert_map + at, mask=at < num_global, other=-1)
        tl.store(out + at, row_or_none(expert, rows, num_experts), mask=at < num_global)


@triton.jit
def row_or_none(expert, rows, num_experts):
    """The row of each expert, -1 where there is none."""
    valid = (expert >= 0) & (expert < num_experts)
    return tl.load(rows + tl.where(valid, expert, 0), mask=valid, other=-1)


@triton.jit
def write_plan(
    plan, count, rows, out, num_experts,
    TILE: tl.constexpr, WIDE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Write a plan of the tiles whose experts have rows, in order; programs share blocks of tiles.

    ``count``: the plan's `planned_tiles`. TILE: its row tile; WIDE: TILE, rounded up to a power of
    two; TILES: the tiles of a block.
    """
    experts_at, firsts_at = tl.load(plan + 1), tl.load(plan + 2)
    col, kept = tl.arange(0, WIDE), 0
    blocks = (count + TILES - 1) // TILES
    for block in range(0, tl.where(tl.program_id(0) < blocks, blocks, 0)):
        tile = block * TILES + tl.arange(0, TILES)
        expert = tl.load(plan + experts_at + tile, mask=tile < count, other=-1)
        row = row_or_none(expert, rows, num_experts)
        present = row >= 0
        to = kept + tl.cumsum(present.to(tl.int32), 0) - 1
        if block % tl.num_programs(0) == tl.program_id(0):
            first = tl.load(plan + firsts_at + tile, mask=present)
            tl.store(out + experts_at + to, row, mask=present)
            tl.store(out + firsts_at + to, first, mask=present)
            mask = present[:, None] & (col < TILE)[None, :]
            source = plan + HEADER + tile[:, None] * TILE + col[None, :]
            target = out + HEADER + to[:, None] * TILE + col[None, :]
            tl.store(target, tl.load(source, mask=mask), mask=mask)
        kept += tl.sum(present.to(tl.int32), 0)
    if tl.program_id(0) == 0:
        write_header(plan, out, kept * TILE)


@triton.jit
def write_header(plan, out, used):
    """Write the header of a plan with ``used`` rows in use, and the parts of another plan."""
    tl.store(out, used)
    tl.store(out + 1, tl.load(plan + 1))
    tl.store(out + 2, tl.load(plan + 2))
    tl.store(out + 3, 0)


@lru_cache(maxsize=64)
def plan_constants(row_tile: int) -> dict[str, int]:
    """The constants of `write_plan`."""
    wide = next_power_of_2(row_tile)
    return {"TILE": row_tile, "WIDE": wide, "TILES": max(8, SLOTS // wide)}
