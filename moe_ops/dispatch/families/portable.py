"""The kernels for every GPU: rows and weights as they are, both quantized, or weights alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from moe_ops.dispatch.device import Device
from moe_ops.dispatch.families.base import (
    DIRECT,
    FOLLOWS_LOAD,
    NO_SUM,
    PLAIN,
    ROUTED,
    Condition,
    Family,
    Tunable,
)
from moe_ops.dispatch.hopper import KernelTiles
from moe_ops.dispatch.portable import (
    LONGEST_SLOT,
    SLOT_TILES,
    gemm_tiles,
    scaled_gemm_tiles,
    scaled_group,
    shared_bytes,
    weight_only_tiles,
)
from moe_ops.dispatch.problem import EACH, GemmProblem
from moe_ops.dispatch.tiles import ROW_TILES, TALL_ROW_TILE, TileConfig, one_row_tile
from moe_ops.scheme import get_scheme

ACCUMULATORS = 128
"""The most registers per thread for accumulators, of 255."""
GROUPS = (4, 8, 32)
"""Values of ``group_m`` to try.

Not 1, which may win with the uniform routing that is timed: each row tile of an expert reads the
weight again then, so that layers under skewed routing took up to 1.25 times as long.
"""
TALL = one_row_tile(ROW_TILES[-1])
"""Row tile of the dense kernel where Hopper's kernels take 192 rows."""
PIPELINE_LIMIT = 64
"""Row tile from which Triton 3.6 cannot pipeline a Blackwell product with a computed operand."""


@dataclass(frozen=True)
class Portable(Tunable):
    """A kernel in Triton, whose tiles are a `TileConfig`."""

    keeps_product: Callable[[GemmProblem], bool] = lambda problem: True

    def has(self, tiles: KernelTiles) -> bool:
        """Whether a kernel in Triton has such tiles."""
        return isinstance(tiles, TileConfig)

    def unfit(self, tiles: TileConfig, problem: GemmProblem, device: Device) -> str | None:
        """Why a GEMM that the family takes cannot have these tiles; None: it can."""
        if tiles.block_m not in ROW_TILES:
            return f"has {tiles.block_m} rows, {self.kernel} has {ROW_TILES}"
        return super().unfit(tiles, problem, device)

    def most_stages(self, tiles: TileConfig, problem: GemmProblem, device: Device) -> int:
        """The most stages whose operands fit in shared memory, and that Triton can pipeline."""
        if _computed(problem, device) and tiles.block_m >= PIPELINE_LIMIT:
            return 1
        one = replace(tiles, num_stages=1)
        return device.shared_memory // shared_bytes(one, problem.gemm, problem.weight_bits)

    def worth(self, tiles: TileConfig, problem: GemmProblem) -> bool:
        """Whether blocks suit the scales, and accumulators stay in registers."""
        group = scaled_group(get_scheme(problem.scheme))
        sums = tiles.block_m * tiles.block_n * problem.sizes.halves // (32 * tiles.num_warps)
        if problem.gemm.itemsize == 1:  # the product of a step of K takes registers of its own
            sums *= 2
        return (
            16 <= tiles.block_n <= 256
            and min(32, group or 32) <= tiles.block_k <= min(256, group or 256)
            and 2 <= tiles.num_warps <= 16
            and tiles.num_stages <= 6
            and sums <= ACCUMULATORS
        )

    def steps(
        self, tiles: TileConfig, size: str, problem: GemmProblem, device: Device
    ) -> Sequence[KernelTiles]:
        """Half and twice a block or the warps, a stage more or less, another group."""
        now, sizes = getattr(tiles, size, 0), problem.sizes  # a TileConfig has no "on_demand"
        values: Sequence[int] = (now // 2, now * 2) if now else ()
        if size == "num_stages":
            values = (now - 1, now + 1)
        elif size == "group_m":  # with one row tile per expert there is nothing to group
            values = GROUPS if sizes.load_class else ()
        return [replace(tiles, **{size: value}) for value in values if value != now]


def _computed(problem: GemmProblem, device: Device) -> bool:
    """Whether the first operand of Blackwell's matrix instructions is computed."""
    return get_scheme(problem.scheme).dequantizes_both and device.arch in (100, 103)


def _dense_tiles(problem: GemmProblem, device: Device) -> TileConfig:
    """Analytic tiles of the dense kernel.

    Only Hopper's kernels take 192 rows. If the routing is known, two launches sort the slots again,
    and the weight is read from L2 half as often as by tiles of 64 rows. Where products are added to
    every other column, each number's address takes registers.
    """
    sizes = problem.sizes
    sorts = problem.num_tokens is not None and sizes.row_tile == TALL_ROW_TILE
    tiles = gemm_tiles(sizes._replace(rule=TALL) if sorts else sizes, device)
    return replace(tiles, block_n=min(tiles.block_n, 128)) if problem.adds > 1 else tiles


def _dequantizing_tiles(problem: GemmProblem, device: Device) -> TileConfig:
    tiles = weight_only_tiles(problem.gemm, problem.weight_bits, device)
    pipelined = not _computed(problem, device) or tiles.block_m < PIPELINE_LIMIT
    return tiles if pipelined else replace(tiles, num_stages=1)


UNQUANTIZED = Condition(
    "weights must not be quantized, got {scheme.name}",
    lambda p, _: get_scheme(p.scheme).weight is None,
)
QUANTIZED = Condition(
    "both operands must be quantized, got {scheme.name}",
    lambda problem, _: problem.quant is not None,
)
DEQUANTIZED = Condition(
    "weights must be dequantized, got {scheme.name}",
    lambda p, _: get_scheme(p.scheme).weight is not None and p.quant is None,
)
DENSE = Portable(
    "dense", "_gemm.dense:DenseGemm", (UNQUANTIZED, NO_SUM), (), _dense_tiles, sorts=True
)
SCALED = Portable(
    "scaled",
    "_gemm.scaled:ScaledGemm",
    (QUANTIZED, NO_SUM),
    (),
    lambda problem, device: scaled_gemm_tiles(problem.gemm, problem.groups, device),
)
DEQUANTIZE = Portable(
    "dequantize",
    "_gemm.weight_only:DequantizeGemm",
    (PLAIN, DEQUANTIZED, NO_SUM),
    (),
    _dequantizing_tiles,
)
SLOT = Family(
    "scaled_slot",
    "_gemm.scaled_slot:SlotGemm",
    (QUANTIZED, NO_SUM),
    (
        Condition(
            "a row must have one scale",
            lambda problem, _: problem.quant is not None and problem.quant.shared_cols is None,
        ),
        FOLLOWS_LOAD,
        ROUTED,
        DIRECT,
        Condition(
            "rows must be quantized by the GEMM, each by itself", lambda p, _: p.rows == EACH
        ),
        Condition(
            f"K must be at most {LONGEST_SLOT}, got {{problem.sizes.k}}",
            lambda problem, _: problem.sizes.k <= LONGEST_SLOT,
        ),
    ),
    lambda *_: SLOT_TILES,
    quantizes=(EACH,),
    buffers=lambda problem: (),
)
"""For few slots: it is faster to quantize a row in the GEMM if it has one scale and is not long.

On an H200 it took 12.9 us against 13.5 (8 slots of 2 x 768 rows, K 2048) and 59.0 against 63.1 (8
of 2 x 2048, K 7168), but 16.8 against 12.4 with groups of 128 columns, and 47 against 37 with K
14336 (2 of 4096).
"""
