"""Analytic tiles of the portable GEMM kernels, from sizes and the GPU, used without tuned tiles.

Host arithmetic, which runs inside operators, where sizes are numbers.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from moe_ops.activation import Formula
from moe_ops.dispatch.device import Device
from moe_ops.dispatch.tiles import Gemm, TileConfig, cdiv, next_power_of_2
from moe_ops.scheme import Scheme

ACCUMULATES_WIDE = (90, 100, 103)
"""Architectures whose matrix instructions read operands from shared memory, which leaves registers
for two accumulators of 128 x 128."""


def shared_bytes(tiles: TileConfig, gemm: Gemm, weight_bits: int) -> int:
    """Bytes of shared memory for the operands of all stages."""
    stage = 8 * tiles.block_m * gemm.itemsize + gemm.halves * tiles.block_n * weight_bits
    return tiles.num_stages * stage * tiles.block_k // 8


def _fitting(tiles: TileConfig, gemm: Gemm, weight_bits: int, device: Device) -> TileConfig:
    """``tiles`` with as many of their stages as fit in shared memory, but at least one."""
    stage = shared_bytes(replace(tiles, num_stages=1), gemm, weight_bits)
    return replace(tiles, num_stages=max(1, min(tiles.num_stages, device.shared_memory // stage)))


def _columns_of_few_rows(gemm: Gemm, device: Device) -> tuple[int, int]:
    """Columns and warps of a CTA that reads a 16-bit weight for at most 32 rows."""
    block_n, gated = 128 // gemm.halves, gemm.halves == 2
    # Timed on Hopper: where CTAs take more than two rounds, small ones finish closer together.
    if gated and device.arch == 90 and gemm.active * cdiv(gemm.n, block_n) > 2 * device.processors:
        return 32, 2
    # One token of a layer with few, large experts: more and smaller CTAs load faster.
    while block_n > 64 and 2 * gemm.active * cdiv(gemm.n, block_n) < device.processors:
        block_n //= 2
    return block_n, 4


@lru_cache(maxsize=4096)
def gemm_tiles(gemm: Gemm, device: Device) -> TileConfig:
    """Tiles of an expert GEMM whose operands are not quantized.

    Few rows: reading weights takes the time, so tiles are long along K and many CTAs run at once.
    Many rows: the largest output tile whose accumulators stay in registers. float32 products run on
    CUDA cores, whose unrolled loops fit in registers only with small tiles.
    """
    block_m = gemm.row_tile
    block_m &= -block_m  # 64 rows for a row tile of 192: block sizes are powers of two
    small, gated = block_m <= 32, gemm.halves == 2
    hopper = device.arch in ACCUMULATES_WIDE
    block_n, block_k, num_warps, group_m = 128, 64, 8, 8 if block_m == 128 else 16
    if gemm.itemsize == 4:
        block_n, block_k = 16 if gated and not small else 64, 16
    elif small:
        block_k, group_m = 128, 1
        block_n, num_warps = _columns_of_few_rows(gemm, device)
    elif device.arch == 90 and gemm.row_tile == 64:  # timed there; a row tile of 192 has many rows
        block_n, num_warps, group_m = 64 if gated else 128, 4, 8
    elif gated:
        block_n, block_k = (128, 64) if hopper or block_m == 64 else (64, 32)
    elif block_m == 128 and hopper:
        block_n = 256
    elif block_m == 64:
        num_warps = 4
    if not small:  # if a rank has few experts, narrow tiles keep more SMs busy
        while block_n > 64 and gemm.run_at_once(block_m, block_n // 2, device.processors):
            block_n //= 2
    # K or N is the rank of an adapter's factor.
    block_k = min(block_k, max(16, next_power_of_2(gemm.k)))
    block_n = min(block_n, max(16, next_power_of_2(gemm.n)))
    tiles = TileConfig(block_m, block_n, block_k, group_m, num_warps, 4)
    return _fitting(tiles, gemm, 8 * gemm.itemsize, device)


EVERY_COLUMN = 2**30
"""A power of two larger than any number of columns."""


class ScaleGroups(NamedTuple):
    """Scale groups of a GEMM with two 8-bit operands, as far as tiles depend on them."""

    k: int | None
    """Elements along K that share a scale, which a K block does not cross; None: all."""
    n: int
    """Length of the aligned runs of output columns whose weight rows share a scale, and whose up
    rows share a scale; a power of two."""


def scaled_group(scheme: Scheme) -> int | None:
    """Elements along K that share the scale of a row, which a K block may not cross; None: any."""
    quant = scheme.activation
    return None if quant is None or scheme.dequantizes_both else quant.shared_cols


def scale_groups(n: int, k: int | None, weight_rows: int, rule: Formula | None) -> ScaleGroups:
    """The scale groups for ``n`` output columns.

    The length of a run divides ``weight_rows``. If up rows follow gate rows, the up row of column c
    is row ``n + c``, so the length also divides ``n``.

    Args:
        n: output columns.
        k: elements along K that share a scale; None: all.
        weight_rows: weight rows that share a scale.
        rule: the activation of the product; None without one.
    """
    gated, interleaved = rule is not None and rule.gated, rule is not None and rule.interleaved
    if weight_rows >= (2 * n if gated else n) or (weight_rows == n and not interleaved):
        return ScaleGroups(k, EVERY_COLUMN)
    either = weight_rows | n if gated and not interleaved else weight_rows
    length = either & -either  # the largest power of two that divides both
    return ScaleGroups(k, max(1, length // (2 if interleaved else 1)))


@lru_cache(maxsize=4096)
def scaled_gemm_tiles(gemm: Gemm, groups: ScaleGroups, device: Device) -> TileConfig:
    """Tiles of an expert GEMM with two 8-bit operands.

    Products are summed in registers that the matrix instructions do not use, so accumulators take
    twice as many registers. Tiles are small if the instructions also read operands from registers
    (everywhere but on Hopper), or if every column has its own scales to hold.

    Args:
        gemm: sizes of the GEMM.
        groups: scale groups of the GEMM.
        device: the GPU.
    """
    block_m = gemm.row_tile
    small, gated = block_m <= 32, gemm.halves == 2
    block_n, num_warps, group_m = 128, 4, 8 if block_m == 128 else 16
    if small:
        block_n, group_m = 64 if gated else 128, 1
        while block_n > 32 and gemm.active * cdiv(gemm.n, block_n) < 2 * device.processors:
            block_n //= 2
    elif device.arch != 90 or (groups.k is not None and groups.n < 64):
        block_n, num_warps = 64 // gemm.halves, 8
    elif block_m == 128:
        num_warps = 8
    elif gated:
        block_n = 64
    if groups.k is not None and not small:
        block_n = min(block_n, max(64, groups.n))
    block_k = min(128, groups.k or 128)
    most = 3 if gated and block_m == 128 else 4
    tiles = TileConfig(block_m, block_n, block_k, group_m, num_warps, most)
    return _fitting(tiles, gemm, 8, device)


SLOT_TILES = TileConfig(8, 32, 128, 1, 2, 4)
"""Tiles of the kernel that quantizes the rows of few slots itself."""
LONGEST_SLOT = 7168
"""The most columns of a row for that kernel: each program reads all of them."""


@lru_cache(maxsize=4096)
def weight_only_tiles(gemm: Gemm, bits: int, device: Device) -> TileConfig:
    """Tiles of an expert GEMM that dequantizes its weights to the dtype of the rows.

    Few rows: as many CTAs as fit at once, since each alternates between waiting for memory and
    dequantizing. Many rows: large tiles, which use a dequantized weight for as many rows as
    possible.

    Args:
        gemm: sizes of the GEMM; ``itemsize`` is the activations'.
        bits: bits of a stored weight.
        device: the GPU.
    """
    block_m = gemm.row_tile
    block_n, block_k, num_warps, group_m = 128, 64, 8, 8
    hopper = device.arch == 90
    if gemm.itemsize == 4:
        block_n, block_k = 64, 16
    elif block_m <= 32:
        block_n, block_k, num_warps, group_m = 128 // gemm.halves, 128, 4, 1
        while block_n > 32 and gemm.active * cdiv(gemm.n, block_n) < device.processors:
            block_n //= 2
    elif gemm.halves == 2:
        block_n, num_warps = 64, 4 if hopper else 8
    elif block_m == 64 and hopper:
        num_warps = 4
    tiles = TileConfig(block_m, block_n, block_k, group_m, num_warps, 4)
    return _fitting(tiles, gemm, bits, device)
