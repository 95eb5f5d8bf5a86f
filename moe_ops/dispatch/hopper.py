"""Rules for the Hopper GEMM kernels: which of them takes a GEMM, if any, and with which tiles.

Host arithmetic, which runs inside operators, where sizes are numbers. The thresholds come from
GEMMs timed one by one on an H200: see `benchmarks/NOTES.md`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from moe_ops.dispatch.device import Device
from moe_ops.dispatch.tiles import TALL_ROW_TILE, Gemm, TileConfig, cdiv, padded_slots
from moe_ops.scheme import Scheme
from moe_ops.tensors import TensorSpec

PACKED, FETCH, STREAM = KERNELS = ("hopper_packed", "hopper_fetch", "hopper_stream")
"""The kernels for many rows, gathered in the order of the plan or fetched where they lie, and the
swap-AB kernel for few."""
TOKEN, TOKEN_SUM = "hopper_token", "hopper_token_sum"
"""The kernels for one token, of GEMM 1 and of GEMM 2 with the weighted sum."""
ON_DEMAND_LOAD = {1: 6, 2: 3}
"""Up to this bucket (683 rows per expert, or 85), by bytes per number, tiles of 128 rows have a
dynamic schedule: skipping padding outweighs running in step. Above it, few tiles have padding."""
GROUP_ON_DEMAND = {1: 4, 2: 3}
"""Row tiles per band with a dynamic schedule, by bytes per number: few, since CTAs are not in
step."""
ROW_BYTES = 128
"""Bytes of one row of a tile in shared memory: the span of the swizzle, and the step along K."""
GATHERED_LOAD = 3
"""The first bucket in which rows are gathered or fetched (more than 42 rows per expert). Below it,
a pass over the rows costs more than it saves."""
FETCH_TILE = 128
"""The row tile of the kernel that fetches rows."""
FETCHED_ROWS = 1536
"""Weight rows, for each byte per number, up to which rows are fetched inside the product. A wider
product reads each row more often, which takes longer than gathering it once."""
LEAST_COLUMNS = 65
"""Weight rows from which rows are gathered. A product with fewer, such as the rank of an adapter,
takes less time than the pass over its rows."""
STREAM_ROWS = 32
"""The largest row tile for which the swap-AB kernel is chosen without a tuned file."""
STREAM_STAGES = 5
"""Stages of 128 weight rows; more bring nothing."""
SHORT_BOX_STAGES = 8
"""Stages of 64 weight rows in a GEMM of many boxes; more were a percent slower."""
LONG_BOX_ROW = 2560
"""Bytes of a weight row from which many boxes have 64 of them: shorter rows begin too often."""
LONGEST_INT8 = (2**31 - 1) // 128**2
"""The largest K for which no sum of int8 products leaves int32."""
WGRAD_BLOCKS, WGRAD_STEP, WGRAD_STAGES = (128, 256), 64, 4
"""Rows and columns of a tile of a weight gradient, rows of a step, and stages. Two warp groups
multiply 64 x 256 each: tiles of 256 x 128 would read shared memory more often."""
WGRAD_BAND = 12
"""Rows of tiles per band: 132 tiles at once then read the fewest columns of both operands."""
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
    def alone(self) -> bool:
        """Whether a CTA has an SM to itself."""
        return self.kernel in (PACKED, FETCH)


KernelTiles = TileConfig | HopperTiles
"""Config of the portable kernel or of a Hopper kernel."""


def operand_bytes(scheme: Scheme) -> int | None:
    """Bytes per number of the operands in Hopper's kernels; None: they do not take the scheme."""
    weight, rows = scheme.weight, scheme.activation
    if weight is None:
        return 2
    if rows is None or scheme.dequantizes_both or weight.scale in ("input", "e8m0"):  # not float32
        return None
    taken = sums_integers(scheme) or rows.dtype == weight.dtype == torch.float8_e4m3fn
    return 1 if taken else None


def sums_integers(scheme: Scheme) -> bool:
    """Whether both operands are int8, whose products are summed exactly in int32."""
    rows = scheme.activation
    return rows is not None and rows.dtype == torch.int8 and not scheme.dequantizes_both


def vector_pieces(k: int, itemsize: int, vectors: int) -> tuple[int, int]:
    """Columns that the M = 1 kernels make of ``vectors`` vectors, and stages per column."""
    columns = max(8, vectors)
    return columns, cdiv(cdiv(k * itemsize, PIECES * ROW_BYTES), columns // vectors)


def tile_widths(kernel: str, block_m: int, itemsize: int) -> tuple[int, ...]:
    """The values of ``block_n`` that a kernel has for a row tile; empty if it lacks the row tile.

    The swap-AB kernel takes 8-bit weights only.
    """
    if kernel == PACKED:
        tall = itemsize == 2 and block_m == TALL_ROW_TILE
        return (128, 256) if tall or block_m in (64, 128) else ()
    if kernel == FETCH:
        return (256,) if block_m == FETCH_TILE else ()
    if block_m > 64 or itemsize > 1:
        return ()
    return (64,) if block_m == 64 else (64, 128)


def most_stages(tiles: HopperTiles, device: Device) -> int:
    """Most stages beside the epilogue buffer, of one CTA per SM or of two."""
    stage = (tiles.block_m + tiles.block_n) * ROW_BYTES
    if tiles.alone:
        return (device.shared_memory - 17 * 1024) // (stage + 4 * tiles.block_m)
    return ((device.shared_memory - 1024) // 2 - 3 * 1024) // stage


def tall_tiles(kernel: str, gemm: Gemm, block_m: int, device: Device) -> HopperTiles:
    """The largest tile whose accumulators stay in registers, with as many stages as fit.

    It is half as wide where even then all tiles run at once.
    """
    size, wide = gemm.itemsize, tile_widths(kernel, block_m, gemm.itemsize)
    narrow = gemm.run_at_once(block_m, wide[0] // gemm.halves, device.processors)
    block_n = wide[0 if narrow else -1]
    by_load = block_m == 128 and gemm.load_class <= ON_DEMAND_LOAD[size]
    on_demand = by_load or block_m == TALL_ROW_TILE or kernel == FETCH
    group_m = GROUP_ON_DEMAND[size] if on_demand and kernel == PACKED else 16 // size
    tiles = HopperTiles(kernel, block_m, block_n, group_m, LEAST_STAGES, on_demand)
    return replace(tiles, num_stages=most_stages(tiles, device))


def stream_tiles(gemm: Gemm, block_m: int, device: Device) -> HopperTiles:
    """Long TMA boxes, unless they are too few to keep all SMs busy.

    The boxes of a gated weight with long rows are short as well, in fewer stages, if there are too
    many for all to run at once: programs then finish closer together.
    """
    boxes = gemm.active * cdiv(gemm.n * gemm.halves, 128)
    busy = 3 * boxes >= 2 * device.processors
    many = 2 * boxes > 3 * device.processors and block_m == 16
    short = many and gemm.halves == 2 and gemm.k >= LONG_BOX_ROW
    block_n = tile_widths(STREAM, block_m, gemm.itemsize)[-1 if busy and not short else 0]
    tiles = HopperTiles(STREAM, block_m, block_n, 1 if block_m <= 32 else 8, LEAST_STAGES)
    most = SHORT_BOX_STAGES if short else STREAM_STAGES * 128 // block_n
    return replace(tiles, num_stages=min(most, most_stages(tiles, device)))


def gathered_rows(num_slots: int, num_experts: int, block_m: int) -> int:
    """Rows allocated for gathered rows: a multiple of 4, as TMA boxes of their scales need."""
    return 4 * cdiv(padded_slots(num_slots, num_experts, block_m), 4)


def takes_wgrad(dy: TensorSpec, x: TensorSpec, tile: int, device: Device) -> bool:
    """Whether Hopper's kernel computes the weight gradient of contiguous rows ``dy`` and ``x``.

    It copies 16 bytes at a time, and whole steps of an expert's rows: ``tile`` is the row tile of
    the plan. A gradient of fewer rows or columns than a tile has, such as that of an adapter, is
    left to the portable kernel.
    """
    rows, columns = WGRAD_BLOCKS
    return (
        device.arch == 90
        and not device.portable_only
        and dy.dtype == x.dtype
        and x.dtype in (torch.bfloat16, torch.float16)
        and tile % WGRAD_STEP == 0
        and dy.address == x.address == dy.shape[1] % 8 == x.shape[1] % 8 == 0
        and dy.shape[1] >= rows
        and x.shape[1] >= columns
    )
