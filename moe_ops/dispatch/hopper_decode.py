"""Rules for the Hopper kernels that decode packed weights: which GEMMs they take, and their tiles.

Host arithmetic, which runs inside operators, where sizes are numbers.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch

from moe_ops.dispatch.device import Device
from moe_ops.dispatch.hopper import HopperTiles
from moe_ops.dispatch.tiles import Gemm, is_direct
from moe_ops.scheme import Quant
from moe_ops.scheme.values import SCALE_BITS

DECODE_FEW, DECODE_MANY = DECODE_KERNELS = ("hopper_decode_few", "hopper_decode_many")
"""The kernel for few rows, which gathers them itself, and the kernel for many, packed rows."""
ONE_BYTE = ("e8m0", "e4m3")
"""Forms of scales of one byte."""
STAGE_K = 128
"""Numbers along K of a stage."""
FEW_ROWS = 32
"""The largest row tile of the kernel for few rows."""
FEW_STAGES, MANY_STAGES = 6, 4
"""The most stages: more bring nothing, or do not fit."""
CTA_BYTES = 1024 + 512
"""Bytes of a CTA beside its stages and its epilogue: reserved by the system, and barriers."""
MANY_BYTES = 20 * 1024
"""The same of the kernel for many rows, with the buffers of its epilogue."""


MEASURED = False
"""Whether these kernels were run and timed on a GPU. Until then weights are packed on request only
(`FusedMoE.pack_`, `pack_weight`), not when they are loaded."""


def decodes(quant: Quant, dtype: torch.dtype) -> bool:
    """Whether the kernels decode weights for rows of a dtype.

    Scales of groups multiply the weights in that dtype, which must hold them: scales in the rows'
    own dtype, or one-byte scales in bf16.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return False
    if not (quant.local or quant.zero_point):
        return True
    return quant.scale == "input" or (quant.scale in ONE_BYTE and dtype == torch.bfloat16)


def few_ctas(block_m: int) -> int:
    """CTAs per SM of the kernel for few rows."""
    return 4 if block_m <= 16 else 3


def stage_bytes(tiles: HopperTiles, quant: Quant) -> int:
    """Bytes of weights, scales and zero points in a stage, and of packed rows."""
    bits = quant.element.stored_bits * STAGE_K
    if quant.local or quant.zero_point:
        groups = max(1, STAGE_K // (quant.shared_cols or STAGE_K))
        zero_bits = quant.element.stored_bits if quant.zero_point else 0
        bits += groups * (SCALE_BITS[quant.scale] + zero_bits)
    rows = tiles.block_m * STAGE_K * 2 if tiles.kernel == DECODE_MANY else 0
    return tiles.block_n * bits // 8 + rows


def most_stages(tiles: HopperTiles, quant: Quant, device: Device) -> int:
    """The largest stage count that fits."""
    stage = stage_bytes(tiles, quant)
    if tiles.kernel == DECODE_MANY:
        return (device.shared_memory - MANY_BYTES) // stage
    stage += tiles.block_m * STAGE_K * 2
    beside = CTA_BYTES + 2 * 64 * min(tiles.block_m, 32)
    return ((device.shared_memory + 1024) // few_ctas(tiles.block_m) - beside) // stage


@lru_cache(maxsize=4096)
def decode_tiles(gemm: Gemm, quant: Quant, device: Device) -> HopperTiles:
    """Tiles of a GEMM with packed weights."""
    block_m = gemm.row_tile
    few = block_m <= FEW_ROWS or is_direct(gemm.num_slots, gemm.num_experts)
    if few:
        tiles, most = HopperTiles(DECODE_FEW, block_m, 128, 1, 2), FEW_STAGES
    else:
        tiles, most = HopperTiles(DECODE_MANY, block_m, 256, 8, 2, True), MANY_STAGES
    return replace(tiles, num_stages=min(most, most_stages(tiles, quant, device)))
