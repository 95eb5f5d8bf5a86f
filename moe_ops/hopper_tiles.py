"""Which of Hopper's own kernels computes an expert GEMM, if any, and with which tiles.

Host arithmetic, which runs inside operators, where sizes are numbers.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from moe_ops.tiles import Device, Gemm, cdiv, load_class, pick_row_tile

ROW_BYTES = 128
"""Of a row of a tile in shared memory: what its swizzle spans, and how much of K a step takes."""
PACKED_LOAD = {1: 3, 2: 5}
"""By bytes of a number: from this class of load on (more than 42 rows an expert, or 170) rows are
packed for boxes to be made of them. Below, a pass over the rows costs more than it saves. Like the
other numbers here it comes from `benchmarks/bench_expert_gemm.py` and `bench_scaled_gemm.py`, on an
H200."""
STREAM_ROWS = 32
"""The largest row tile that weights stream past."""
STREAM_STAGES = 5
"""Of 128 weight rows: more bring nothing."""


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
    if load >= PACKED_LOAD[gemm.itemsize] and block_m in (64, 128):
        wide = block_m == 64 or gemm.itemsize == 2
        block_n = 256 if wide else 128
        stage = (block_m + block_n) * ROW_BYTES + 4 * block_m
        epilogue = 17 * 1024
        stages = (device.shared_memory - epilogue) // stage
        return HopperTiles(block_m, block_n, 16 // gemm.itemsize, stages, True)
    if gemm.itemsize == 1 and block_m <= STREAM_ROWS:
        tiles = gemm.active * cdiv(gemm.n * gemm.halves, 128)
        block_n = 128 if 3 * tiles >= 2 * device.processors else 64
        stage = (block_m + block_n) * ROW_BYTES
        epilogue = 3 * 1024
        stages = ((device.shared_memory - 1024) // 2 - epilogue) // stage
        most = STREAM_STAGES * 128 // block_n
        return HopperTiles(block_m, block_n, 1, min(stages, most), False)
    return None
