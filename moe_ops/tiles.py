"""Tile sizes: how many rows a tile has, how large plans get, and which tiles a GEMM uses.

All of it is host arithmetic on sizes. Sizes of tensors (`padded_slots`, `num_tiles`) also run on
symbolic integers, and then add no guards; the choices (`pick_row_tile`, `gemm_tiles`) run inside an
operator, where sizes are numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch

from moe_ops.activation import Formula

ROW_TILES = (16, 32, 64, 128)
"""The row tiles of expert GEMMs, by load: the i-th serves experts with up to ``16 * 2**i / 1.5``
rows on average, the last one all others."""
EIGHT_BIT_ROW_TILES = (16, 32, 64, 64, 64, 64, 128)
"""Those of products of 8-bit operands, which take more registers a row: 128 rows pay only where
nearly every tile is full."""


@dataclass(frozen=True)
class TileConfig:
    """How one expert GEMM is cut up; ``block_n`` counts output columns."""

    block_m: int
    block_n: int
    block_k: int
    group_m: int
    num_warps: int
    num_stages: int


class Device(NamedTuple):
    """What the choice of tiles asks of a GPU."""

    arch: int
    """Compute capability times ten: 90 is Hopper."""
    shared_memory: int
    """Of a block, in bytes."""
    processors: int
    """Streaming multiprocessors."""


SINGLE_LAUNCH_SLOTS = 1024
"""Up to here one launch aligns: each of its programs counts all experts itself."""


MANY_TOKENS = 2048
"""From here on a program of top-k routes several tokens: else it would end before others begin."""
ONE_LAUNCH_LOGITS = 1024
"""Up to so many logits (8 tokens of 128 experts), routing them again in every program of alignment
takes less time than another launch."""


@cache
def device_facts(device: torch.device) -> Device:
    """The facts of the GPU; those of an H200 where there is none (the interpreter)."""
    if device.type != "cuda":
        return Device(90, 232448, 132)
    major, minor = torch.cuda.get_device_capability(device)
    properties: Any = torch.cuda.get_device_properties(device)
    return Device(
        10 * major + minor,
        properties.shared_memory_per_block_optin,
        properties.multi_processor_count,
    )


ACCUMULATES_WIDE = (90, 100, 103)
"""Architectures whose matrix instructions read operands from shared memory: the registers are left
for two accumulators of 128 x 128."""


class Gemm(NamedTuple):
    """One expert GEMM: what the choice of tiles asks of it."""

    num_slots: int
    num_experts: int
    n: int
    """Output columns."""
    k: int
    """Contraction."""
    itemsize: int
    """Bytes of a weight."""
    halves: int
    """Weight tiles for each output tile: 2 where gate and up are computed together."""
    row_tiles: tuple[int, ...]


def cdiv(a, b):
    """``ceil(a / b)``, also for symbolic integers."""
    return (a + b - 1) // b


def padded_slots(num_slots, num_experts, row_tiles: Sequence[int]):
    """Upper bound of the rows in a plan, whichever of ``row_tiles`` is picked.

    No expert is padded by more than ``tile - 1`` rows, and no slot to more than ``tile`` rows.
    """
    tile = max(row_tiles)
    bounds = num_slots * tile, num_slots + num_experts * (tile - 1)
    if isinstance(bounds[0], int):
        return min(bounds)
    # No guard on symbols: PyTorch proves that the larger of 0 and anything is a size, and not that
    # products of sizes are. (It would guard on that, and a graph from its cache on the minimum.)
    return torch.sym_max(0, torch.sym_min(*bounds))


def num_tiles(num_slots, num_experts, row_tiles: Sequence[int]):
    """Upper bound of the tiles in a plan, whichever of ``row_tiles`` is picked."""
    tile = min(row_tiles)
    return cdiv(padded_slots(num_slots, num_experts, (tile,)), tile)


def pick_row_tile(row_tiles: Sequence[int], num_slots: int, num_experts: int) -> int:
    """The row tile for ``num_slots`` routed rows over ``num_experts`` experts, by load.

    In `ROW_TILES` it is the smallest that holds 1.5 times the average expert's rows: one tile then
    covers most experts (their weights are read once), and few rows are padding.
    """
    wanted = 1.5 * num_slots / num_experts
    served = (tile for i, tile in enumerate(row_tiles) if ROW_TILES[0] << i >= wanted)
    return next(served, row_tiles[-1])


@lru_cache(maxsize=4096)
def gemm_tiles(gemm: Gemm, device: Device) -> TileConfig:
    """The tiles of one expert GEMM on a device.

    Few rows: the weights' bandwidth counts, so long rows of K and many blocks at once. Many rows:
    the largest output tile whose accumulators stay in registers. float32 products run on the
    ordinary cores, whose unrolled loops fit the registers with small tiles only.
    """
    block_m = pick_row_tile(gemm.row_tiles, gemm.num_slots, gemm.num_experts)
    small, gated = block_m <= 32, gemm.halves == 2
    hopper = device.arch in ACCUMULATES_WIDE
    block_n, block_k, num_warps, group_m = 128, 64, 8, 8 if block_m == 128 else 16
    if gemm.itemsize == 4:
        block_n, block_k = 64, 16
    elif small:
        block_n, block_k, num_warps, group_m = 64 if gated else 128, 128, 4, 1
        # One token of a layer with few, large experts: more and smaller blocks to load with.
        active = min(gemm.num_slots, gemm.num_experts)
        while block_n > 64 and 2 * active * cdiv(gemm.n, block_n) < device.processors:
            block_n //= 2
    elif gated:
        block_n, block_k = (128, 64) if hopper or block_m == 64 else (64, 32)
    elif block_m == 128 and hopper:
        block_n = 256
    elif block_m == 64:
        num_warps = 4
    stage = (block_m + gemm.halves * block_n) * block_k * gemm.itemsize
    num_stages = max(1, min(4, device.shared_memory // stage))
    return TileConfig(block_m, block_n, block_k, group_m, num_warps, num_stages)


EVERY_COLUMN = 2**30
"""More columns than any weight has rows, a power of two."""


class ScaleGroups(NamedTuple):
    """How the scales of a GEMM of two 8-bit operands lie, where tiles depend on it."""

    k: int | None
    """Elements along K that share one, which a K block does not cross; None: all."""
    n: int
    """Output columns whose weight rows (and up rows) share one, a power of two."""


def scale_groups(n: int, k: int | None, weight_rows: int, rule: Formula | None) -> ScaleGroups:
    """How scales lie for ``n`` output columns.

    Args:
        n: output columns.
        k: elements along K that share a scale; None: all.
        weight_rows: rows of the weight that share one.
        rule: the activation of the product, where the GEMM has one.
    """
    gated, interleaved = rule is not None and rule.gated, rule is not None and rule.interleaved
    if weight_rows >= (2 * n if gated else n) or (weight_rows == n and not interleaved):
        return ScaleGroups(k, EVERY_COLUMN)
    if gated and not interleaved and n % weight_rows:
        return ScaleGroups(k, 1)  # up rows begin inside a group
    return ScaleGroups(k, max(1, (weight_rows & -weight_rows) // (2 if interleaved else 1)))


@lru_cache(maxsize=4096)
def scaled_gemm_tiles(gemm: Gemm, groups: ScaleGroups, device: Device) -> TileConfig:
    """The tiles of an expert GEMM of two 8-bit operands on a device.

    Products are added up in registers that the matrix instructions do not use, so accumulators take
    twice the room. Tiles are small where those instructions also read their operands from registers
    (everywhere but on Hopper), and where every column has scales of its own to hold.

    Args:
        gemm: its sizes.
        groups: its scales.
        device: the GPU.
    """
    block_m = pick_row_tile(gemm.row_tiles, gemm.num_slots, gemm.num_experts)
    small, gated = block_m <= 32, gemm.halves == 2
    block_n, num_warps, group_m = 128, 4, 8 if block_m == 128 else 16
    if small:
        block_n, group_m = 64 if gated else 128, 1
        active = min(gemm.num_slots, gemm.num_experts)
        while block_n > 32 and active * cdiv(gemm.n, block_n) < 2 * device.processors:
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
    stage = (block_m + gemm.halves * block_n) * block_k
    most = 3 if gated and block_m == 128 else 4
    num_stages = max(1, min(most, device.shared_memory // stage))
    return TileConfig(block_m, block_n, block_k, group_m, num_warps, num_stages)


@lru_cache(maxsize=4096)
def weight_only_tiles(gemm: Gemm, bits: int, device: Device) -> TileConfig:
    """The tiles of an expert GEMM whose weights take ``bits`` each and become what rows are.

    Few rows: as many blocks as fit at once, since each waits for memory and dequantizes in turn.
    Many rows: large tiles, which dequantize a weight for as many rows as possible.

    Args:
        gemm: its sizes; ``itemsize`` is that of activations.
        bits: of a stored weight.
        device: the GPU.
    """
    block_m = pick_row_tile(gemm.row_tiles, gemm.num_slots, gemm.num_experts)
    block_n, block_k, num_warps, group_m = 128, 64, 8, 8
    hopper = device.arch == 90
    if gemm.itemsize == 4:
        block_n, block_k = 64, 16
    elif block_m <= 32:
        block_n, block_k, num_warps, group_m = 128 // gemm.halves, 128, 4, 1
        active = min(gemm.num_slots, gemm.num_experts)
        while block_n > 32 and active * cdiv(gemm.n, block_n) < device.processors:
            block_n //= 2
    elif gemm.halves == 2:
        block_n, num_warps = 64, 4 if hopper else 8
    elif block_m == 64 and hopper:
        num_warps = 4
    stage = (block_m * gemm.itemsize + gemm.halves * block_n * bits / 8) * block_k
    num_stages = max(1, min(4, int(device.shared_memory // stage)))
    return TileConfig(block_m, block_n, block_k, group_m, num_warps, num_stages)


def max_programs(gemm: Gemm, config: TileConfig) -> int:
    """Upper bound of the programs that a plan may need."""
    tiles = num_tiles(gemm.num_slots, gemm.num_experts, (config.block_m,))
    return tiles * cdiv(gemm.n, config.block_n)


class Scan(NamedTuple):
    """How the programs of a counting sort walk over the slots."""

    chunk: int
    """Slots in a step."""
    num_warps: int


def scan_sizes(num_slots: int) -> Scan:
    """Many slots in a step where there are many, since every step waits for a sum."""
    if num_slots > SINGLE_LAUNCH_SLOTS:
        return Scan(4096, 16)
    return Scan(1024 if num_slots > 256 else 256, 4)


def sort_block(num_slots: int) -> int:
    """Slots that one program of a counting sort places.

    More where there would be many programs, each of which adds up what all of them counted.
    """
    return 256 if num_slots <= 32768 else 1024 if num_slots <= 262144 else 4096


def few_tokens(num_tokens: int, num_experts: int) -> int:
    """Tokens, rounded up, that one launch routes and aligns; 0 where two launches do."""
    rounded = 1 << max(num_tokens - 1, 0).bit_length()
    logits = rounded << max(num_experts - 1, 0).bit_length()
    return rounded if 0 < num_tokens <= 8 and logits <= ONE_LAUNCH_LOGITS else 0
