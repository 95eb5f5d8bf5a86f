"""Which of Hopper's own kernels computes an expert GEMM, if any, and with which tiles.

Host arithmetic, which runs inside operators, where sizes are numbers.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from moe_ops.tiles import Device, Gemm, cdiv, load_class, pick_row_tile

ROW_BYTES = 128
"""Of a row of a tile in shared memory: what its swizzle spans, and how much of K a step takes."""
PACKED_LOAD = 3
"""From this class of load on (more than 42 rows an expert) rows are packed for boxes to be made of
them. Below, a pass over the rows costs more than it saves."""


class HopperTiles(NamedTuple):
    """The tiles of a kernel."""

    block_m: int
    """Rows: the row tile of the plan."""
    block_n: int
    """Weight rows, gate and up rows together."""
    group_m: int
    num_stages: int
    packed: bool
    """Whether rows are packed in plan order, for many rows; else weights stream past few rows."""


@lru_cache(maxsize=4096)
def hopper_tiles(gemm: Gemm, device: Device) -> HopperTiles | None:
    """The tiles of one GEMM on Hopper; None where the kernel for all GPUs serves.

    Many rows: the largest tile whose sums stay in registers (those of 8-bit products take twice as
    many), in as many stages as fit. Few: two programs a processor, so half of its memory each. A
    plan of one row tile wants the same sums at every load, which two kernels would not give.
    """
    if device.arch != 90 or len(gemm.row_tiles) == 1 or gemm.itemsize > 2:
        return None
    load = load_class(gemm.num_slots, gemm.num_experts)
    block_m = pick_row_tile(gemm.row_tiles, gemm.num_slots, gemm.num_experts)
    if load >= PACKED_LOAD and block_m in (64, 128):
        wide = block_m == 64 or gemm.itemsize == 2
        block_n = 256 if wide else 128
        stage = (block_m + block_n) * ROW_BYTES + 4 * block_m
        epilogue = 17 * 1024
        stages = (device.shared_memory - epilogue) // stage
        return HopperTiles(block_m, block_n, 8, stages, True)
    if gemm.itemsize == 1 and block_m <= 64:
        rows = gemm.n * gemm.halves
        active = min(gemm.num_slots, gemm.num_experts)
        block_n = 128 if active * cdiv(rows, 128) >= device.processors else 64
        stage = (block_m + block_n) * ROW_BYTES
        epilogue = 3 * 1024
        stages = ((device.shared_memory - 1024) // 2 - epilogue) // stage
        return HopperTiles(block_m, block_n, 1 if block_m <= 32 else 8, min(stages, 12), False)
    return None
