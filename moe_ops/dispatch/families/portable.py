"""The kernels for every GPU: rows and weights as they are, both quantized, or weights alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

from moe_ops.dispatch.device import Device
from moe_ops.dispatch.families.base import (
    DIRECT,
    FOLLOWS_LOAD,
    NO_SUM,
    PLAIN,
    ROUTED,
    Family,
    Rule,
    Tunable,
)
from moe_ops.dispatch.hopper import KernelTiles
from moe_ops.dispatch.plan import BufferSpec, GemmPlan, quantized_rows
from moe_ops.dispatch.portable import (
    LONGEST_SLOT,
    SLOT_TILES,
    ScaleGroups,
    gemm_tiles,
    scaled_gemm_tiles,
    scaled_group,
    shared_bytes,
    weight_only_tiles,
)
from moe_ops.dispatch.problem import EACH, GemmProblem
from moe_ops.dispatch.tiles import (
    ROW_TILES,
    TALL_ROW_TILE,
    TileConfig,
    load_class,
    one_row_tile,
    own_plan,
    plan_sizes,
    with_own_plan,
)
from moe_ops.scheme import get_scheme

ACCUMULATORS = 128
"""The most registers per thread for accumulators, of 255."""
GROUPS = (1, 8, 32)
"""Values of ``group_m`` to try."""
TALL = one_row_tile(ROW_TILES[-1])
"""Row tile of the dense kernel where Hopper's kernels take 192 rows."""
PIPELINE_LIMIT = 64
"""Row tile from which Triton 3.6 cannot pipeline a Blackwell product with a computed operand."""


@dataclass(frozen=True)
class Portable(Tunable):
    """A kernel in Triton, whose tiles have a `TileConfig`."""

    make: Callable[[GemmProblem, Device], TileConfig] = lambda problem, device: SLOT_TILES
    """Analytic tiles."""

    def tiles(self, problem: GemmProblem, device: Device) -> TileConfig:
        """Tiles by `make`, in no more stages than the kernel can have."""
        tiles = self.make(problem, device)
        most = self.most_stages(tiles, problem, device)
        return replace(tiles, num_stages=max(1, min(tiles.num_stages, most)))

    def plan(self, problem: GemmProblem, tiles: KernelTiles, source: str) -> GemmPlan:
        """Rows that are quantized first, and the kernel's own plan if its tiles do not divide."""
        scratch, tiles = quantized_rows(problem), cast(TileConfig, tiles)
        if own_plan(problem.sizes, tiles):
            own = with_own_plan(problem.sizes, tiles)
            entries = plan_sizes(own.num_slots, own.num_experts, own.rule).entries
            scratch = (*scratch, BufferSpec("plan", 4 * entries))
        return GemmPlan(self.kernel, tiles, False, 0, scratch, source)

    def has(self, tiles: KernelTiles) -> bool:
        """Whether tiles are those of a kernel in Triton."""
        return isinstance(tiles, TileConfig)

    def unfit(self, tiles: KernelTiles, problem: GemmProblem, device: Device) -> str | None:
        """Why a GEMM that the family takes cannot have these tiles; None: it can."""
        if tiles.block_m not in ROW_TILES:
            return f"has {tiles.block_m} rows, {self.kernel} has {ROW_TILES}"
        return super().unfit(tiles, problem, device)

    def most_stages(self, tiles: KernelTiles, problem: GemmProblem, device: Device) -> int:
        """The most stages whose operands fit in shared memory."""
        one = replace(cast(TileConfig, tiles), num_stages=1)
        return device.shared_memory // shared_bytes(one, problem.gemm, problem.weight_bits)

    def worth(self, tiles: KernelTiles, problem: GemmProblem) -> bool:
        """Whether blocks suit the scales, and accumulators stay in registers."""
        tiles, group = cast(TileConfig, tiles), scaled_group(get_scheme(problem.scheme))
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
        self, tiles: KernelTiles, size: str, problem: GemmProblem, device: Device
    ) -> Sequence[KernelTiles]:
        """Half and twice a block or the warps, a stage more or less, another group."""
        now = getattr(tiles, size, 0)  # a TileConfig has no "on_demand"
        values: Sequence[int] = (now // 2, now * 2) if now else ()
        if size == "num_stages":
            values = (now - 1, now + 1)
        elif size == "group_m":  # with one row tile per expert there is nothing to group
            sizes = problem.sizes
            values = GROUPS if load_class(sizes.num_slots, sizes.num_experts) else ()
        return [replace(tiles, **{size: value}) for value in values if value != now]


class Dequantizing(Portable):
    """The kernel that dequantizes weights, or both operands, to 16 bits."""

    def most_stages(self, tiles: KernelTiles, problem: GemmProblem, device: Device) -> int:
        """One if Triton cannot pipeline the product."""
        computed = get_scheme(problem.scheme).decoded and device.arch in (100, 103)
        fitting = super().most_stages(tiles, problem, device)
        return min(1, fitting) if computed and tiles.block_m >= PIPELINE_LIMIT else fitting


def _dense_tiles(problem: GemmProblem, device: Device) -> TileConfig:
    """Analytic tiles of the dense kernel.

    Only Hopper's kernels take 192 rows. If the routing is known, two launches sort the slots again,
    and the weight is read from L2 half as often as by tiles of 64 rows.
    """
    sizes = problem.sizes
    sorts = problem.num_tokens is not None and sizes.row_tile == TALL_ROW_TILE
    return gemm_tiles(sizes._replace(rule=TALL) if sorts else sizes, device)


def _scaled_tiles(problem: GemmProblem, device: Device) -> TileConfig:
    return scaled_gemm_tiles(problem.gemm, cast(ScaleGroups, problem.groups), device)


def _dequantizing_tiles(problem: GemmProblem, device: Device) -> TileConfig:
    return weight_only_tiles(problem.gemm, problem.weight_bits, device)


QUANTIZED = Rule("both operands must be quantized, got {scheme.name}",
                 lambda problem, _: problem.quant is not None)  # fmt: skip
DEQUANTIZED = Rule(
    "weights must be dequantized, got {scheme.name}",
    lambda p, _: get_scheme(p.scheme).weight is not None and p.quant is None,
)
UNQUANTIZED = Rule("weights must not be quantized, got {scheme.name}",
                   lambda p, _: get_scheme(p.scheme).weight is None)  # fmt: skip
DENSE = Portable("dense", "_gemm.dense:DenseGemm", (UNQUANTIZED, NO_SUM), make=_dense_tiles)
SCALED = Portable("scaled", "_gemm.scaled:ScaledGemm", (QUANTIZED, NO_SUM), make=_scaled_tiles)
DEQUANTIZE = Dequantizing(
    "dequantize", "_gemm.weight_only:DequantizeGemm", (DEQUANTIZED, PLAIN, NO_SUM),
    make=_dequantizing_tiles,
)  # fmt: skip


class OneSlot(Family):
    """The kernel with one slot per tile, whose programs quantize the slot's row."""

    def tiles(self, problem: GemmProblem, device: Device) -> TileConfig:
        """The tiles of every GEMM."""
        return SLOT_TILES

    def plan(self, problem: GemmProblem, tiles: KernelTiles, source: str) -> GemmPlan:
        """No scratch memory."""
        return GemmPlan(self.kernel, tiles, True, 0, (), source)


def _whole_rows(problem: GemmProblem, _: Device) -> bool:
    return problem.quant is not None and problem.quant.shared_cols is None


SLOT = OneSlot("scaled_slot", "_gemm.scaled_slot:SlotGemm", (
    QUANTIZED,
    Rule("a row must have one scale", _whole_rows),
    NO_SUM, FOLLOWS_LOAD, ROUTED, DIRECT,
    Rule("rows must be quantized by the GEMM, each by itself", lambda p, _: p.rows == EACH),
    Rule(f"K must be at most {LONGEST_SLOT}, got {{problem.sizes.k}}",
         lambda problem, _: problem.sizes.k <= LONGEST_SLOT),
))  # fmt: skip
"""For few slots: it is faster to quantize a row in the GEMM if it has one scale and is not long.

On an H200 it took 12.9 us against 13.5 (8 slots of 2 x 768 rows, K 2048) and 59.0 against 63.1 (8
of 2 x 2048, K 7168), but 16.8 against 12.4 with groups of 128 columns, and 47 against 37 with K
14336 (2 of 4096).
"""
