"""Rules for the Hopper GEMM kernels: which of them takes a GEMM, if any, and with which tiles.

Host arithmetic, which runs inside operators, where sizes are numbers. The thresholds come from
GEMMs timed one by one on an H200: see `benchmarks/NOTES.md`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from moe_ops.activation import Formula
from moe_ops.dispatch.device import Device
from moe_ops.dispatch.portable import ScaleGroups
from moe_ops.dispatch.tiles import (
    TALL_ROW_TILE,
    Gemm,
    TileConfig,
    cdiv,
    is_direct,
    load_class,
    next_power_of_2,
    padded_slots,
)
from moe_ops.scheme import Scheme

PACKED, STREAM = KERNELS = ("hopper_packed", "hopper_stream")
"""The kernel for many rows, packed in the order of the plan, and the swap-AB decode kernel."""
TOKEN = "hopper_token"
"""The M = 1 decode kernels, of GEMM 1 and of GEMM 2 with the weighted sum."""
ON_DEMAND_LOAD = 6
"""Up to this bucket (683 rows per expert), 8-bit tiles of 128 rows have a dynamic schedule:
skipping padding outweighs running in step. Above it, few tiles have padding."""
GROUP_ON_DEMAND = {1: 4, 2: 3}
"""Row tiles per band with a dynamic schedule, by bytes per number: few, since CTAs are not in
step."""
ROW_BYTES = 128
"""Bytes of one row of a tile in shared memory: the span of the swizzle, and the step along K."""
PACKED_LOAD = {1: 3, 2: 5}
"""The first bucket in which rows are packed (more than 42 rows per expert, or 170), by bytes per
number; tiles of 192 rows always are. Below it, a pass over the rows costs more than it saves."""
LEAST_COLUMNS = 65
"""Weight rows from which rows are packed. A product with fewer, such as the rank of an adapter,
takes less time than the pass over its rows."""
STREAM_ROWS = 32
"""The largest row tile for which the swap-AB decode kernel is chosen without a tuned file."""
STREAM_STAGES = 5
"""Stages of 128 weight rows; more bring nothing."""
LONGEST_INT8 = (2**31 - 1) // 128**2
"""The largest K for which no sum of int8 products leaves int32."""
LEAST_STAGES = 2
"""Minimum stages: a stage is released only when the product of the next stage has begun."""


TOKEN_ROWS, PIECES = 64, 2
"""Weight rows of a tile of the M = 1 kernels, and pieces of `ROW_BYTES` per stage."""
TOKEN_STAGES, LEAST_TOKEN_STAGES = 6, 4
"""Most and fewest stages of the M = 1 kernels: more bring nothing, and take bandwidth from what
GEMM 1 waits for; fewer do not keep memory busy."""
OTHER_BYTES = 2560
"""Bytes of shared memory reserved for everything that is not counted."""


@dataclass(frozen=True)
class HopperTiles:
    """The config of a Hopper kernel."""

    kernel: str
    """The key of the kernel: one of `KERNELS`, `TOKEN`, or one of `hopper_decode.DECODING`."""
    block_m: int
    """The row tile of the plan."""
    block_n: int
    """Weight rows of a tile, gate and up rows together."""
    group_m: int
    num_stages: int
    on_demand: bool = False
    """Dynamic persistent schedule that skips padding, else a static one."""
    ctas: int = 1
    """CTAs per SM for which a persistent kernel sets registers and shared memory aside."""

    @property
    def packed(self) -> bool:
        """Whether rows are packed."""
        return self.kernel == PACKED


KernelTiles = TileConfig | HopperTiles
"""Config of the portable kernel or of a Hopper kernel."""


def operand_bytes(scheme: Scheme) -> int | None:
    """Bytes per number of the operands in Hopper's kernels; None: they do not take the scheme."""
    weight, rows = scheme.weight, scheme.activation
    if weight is None:
        return 2
    if rows is None or scheme.decoded or weight.scale in ("input", "e8m0"):  # not float32
        return None
    if sums_integers(scheme):
        return 1 if weight.shared_cols is None else None  # sums of all of K are not scaled
    return 1 if rows.dtype == weight.dtype == torch.float8_e4m3fn else None


def sums_integers(scheme: Scheme) -> bool:
    """Whether both operands are int8, whose products are summed exactly in int32."""
    rows = scheme.activation
    return rows is not None and rows.dtype == torch.int8 and not scheme.decoded


def takes_one_token(scheme: Scheme) -> bool:
    """Whether the M = 1 decode kernels take the scheme; they have no int8 products."""
    return operand_bytes(scheme) is not None and not sums_integers(scheme)


def takes(gemm: Gemm, scheme: Scheme, groups: ScaleGroups | None, device: Device) -> bool:
    """Whether Hopper's kernels can compute a GEMM of these sizes on the GPU.

    TMA boxes begin and end at multiples of 16 bytes, and hold 8 gate rows beside 8 up rows. A warp
    group multiplies up to 128 weight rows at a time, whose columns share scales: 128 columns, or 64
    with a gate. Sums of int8 products must not leave int32. Batch-invariant plans must use one
    kernel at every load.

    Args:
        gemm: sizes of the GEMM; ``itemsize`` is the operands'.
        scheme: scheme of the GEMM.
        groups: scale groups of the GEMM; None without scales.
        device: the GPU.
    """
    whole = gemm.k * gemm.itemsize % 16 == 0 and (gemm.halves == 1 or gemm.n % 8 == 0)
    if groups is not None and groups.k is not None:
        whole &= groups.k == ROW_BYTES and groups.n >= 128 // gemm.halves
    whole &= gemm.k <= LONGEST_INT8 or not sums_integers(scheme)
    served = operand_bytes(scheme) == gemm.itemsize and not gemm.rule.batch_invariant
    return device.arch == 90 and served and whole


def vector_pieces(k: int, itemsize: int, vectors: int) -> tuple[int, int]:
    """Columns that the M = 1 kernels make of ``vectors`` vectors, and stages per column."""
    columns = max(8, vectors)
    return columns, cdiv(cdiv(k * itemsize, PIECES * ROW_BYTES), columns // vectors)


def token_tiles(
    weight: tuple[int, int, int],
    itemsize: int,
    top_k: int,
    rule: Formula | None,
    scheme: Scheme,
    device: Device,
    *,
    summed: bool,
) -> HopperTiles | None:
    """Tiles of an M = 1 decode kernel; None if the kernel does not take the GEMM.

    One CTA of each GEMM fits on an SM. Activations with one scale for all rows, and vectors so long
    that too little shared memory is left for weights, are left to other kernels.

    Args:
        weight: ``(E, rows, K)``.
        itemsize: bytes per number of the weight.
        top_k: experts of the token.
        rule: the activation of the product; None without one.
        scheme: scheme of the GEMM.
        device: the GPU.
        summed: True for GEMM 2 with the sum, False for GEMM 1.
    """
    num_experts, rows, k = weight
    quant, gated = scheme.activation, rule is not None and rule.gated
    whole = k * itemsize % 16 == 0 and (not gated or rows % 16 == 0)
    if quant is not None:
        whole &= not quant.per_tensor and quant.shared_cols in (None, ROW_BYTES)
    served = device.arch == 90 and takes_one_token(scheme) and operand_bytes(scheme) == itemsize
    if not (served and whole and is_direct(top_k, num_experts)):
        return None
    columns, steps = vector_pieces(k, itemsize, next_power_of_2(top_k) if summed else 1)
    row = ROW_BYTES + (0 if quant is None or quant.shared_cols is None else 4)
    room = device.shared_memory // 2 - 1024 - OTHER_BYTES - PIECES * steps * columns * row
    stages = min(TOKEN_STAGES, room // (PIECES * TOKEN_ROWS * row + 16))
    if stages < LEAST_TOKEN_STAGES:
        return None
    return HopperTiles(TOKEN, 1, TOKEN_ROWS, 1, stages)


def widths(kernel: str, block_m: int, itemsize: int) -> tuple[int, ...]:
    """The values of ``block_n`` that a kernel has for a row tile; empty if it lacks the row tile.

    The swap-AB decode kernel takes 8-bit weights only.
    """
    if kernel == PACKED:
        if block_m == TALL_ROW_TILE:
            return (256,) if itemsize == 2 else ()
        return (128, 256) if block_m in (64, 128) else ()
    if block_m > 64 or itemsize > 1:
        return ()
    return (64,) if block_m == 64 else (64, 128)


def most_stages(tiles: HopperTiles, device: Device) -> int:
    """Largest stage count beside the epilogue buffer: one CTA per SM if packed, else two."""
    stage = (tiles.block_m + tiles.block_n) * ROW_BYTES
    if tiles.packed:
        return (device.shared_memory - 17 * 1024) // (stage + 4 * tiles.block_m)
    return ((device.shared_memory - 1024) // 2 - 3 * 1024) // stage


def unfit(tiles: HopperTiles, gemm: Gemm, device: Device) -> str | None:
    """Why a GEMM cannot use tiles that were tuned for another one; None: it can."""
    if tiles.packed and is_direct(gemm.num_slots, gemm.num_experts):
        return "packs rows, and so few have no plan"
    most = most_stages(tiles, device)
    if not LEAST_STAGES <= tiles.num_stages <= most:
        return f"has {tiles.num_stages} stages, shared memory holds {most}"
    return None


def packed_tiles(gemm: Gemm, block_m: int, device: Device) -> HopperTiles:
    """The largest tile whose accumulators stay in registers, with as many stages as fit."""
    size, load = gemm.itemsize, load_class(gemm.num_slots, gemm.num_experts)
    block_n = widths(PACKED, block_m, size)[-1]
    by_load = size == 1 and block_m == 128 and load <= ON_DEMAND_LOAD
    on_demand = by_load or block_m == TALL_ROW_TILE
    group_m = GROUP_ON_DEMAND[size] if on_demand else 16 // size
    tiles = HopperTiles(PACKED, block_m, block_n, group_m, LEAST_STAGES, on_demand)
    return replace(tiles, num_stages=most_stages(tiles, device))


def stream_tiles(gemm: Gemm, block_m: int, device: Device) -> HopperTiles:
    """Long TMA boxes, unless they are too few to keep all SMs busy."""
    boxes = gemm.active * cdiv(gemm.n * gemm.halves, 128)
    busy = 3 * boxes >= 2 * device.processors
    block_n = widths(STREAM, block_m, gemm.itemsize)[-1 if busy else 0]
    tiles = HopperTiles(STREAM, block_m, block_n, 1 if block_m <= 32 else 8, LEAST_STAGES)
    most = STREAM_STAGES * 128 // block_n
    return replace(tiles, num_stages=min(most, most_stages(tiles, device)))


@lru_cache(maxsize=4096)
def hopper_tiles(gemm: Gemm, device: Device) -> HopperTiles | None:
    """Hopper's tiles for a GEMM that `takes` accepts; None if the portable kernel is better.

    Args:
        gemm: sizes of the GEMM.
        device: the GPU.
    """
    load = load_class(gemm.num_slots, gemm.num_experts)
    block_m = gemm.row_tile
    many = load >= PACKED_LOAD[gemm.itemsize] or block_m == TALL_ROW_TILE
    planned = not is_direct(gemm.num_slots, gemm.num_experts)
    wide = gemm.n * gemm.halves >= LEAST_COLUMNS
    if many and planned and wide and widths(PACKED, block_m, gemm.itemsize):
        return packed_tiles(gemm, block_m, device)
    if block_m <= STREAM_ROWS and widths(STREAM, block_m, gemm.itemsize):
        return stream_tiles(gemm, block_m, device)
    return None


def packed_rows(num_slots: int, num_experts: int, block_m: int) -> int:
    """Rows allocated for packed rows: a multiple of 4, as TMA boxes of their scales need."""
    return 4 * cdiv(padded_slots(num_slots, num_experts, block_m), 4)
