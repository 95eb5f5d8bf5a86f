"""Hopper's kernels for many rows of a plain weight: packed rows, or swap-AB tiles of few rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, cast

from moe_ops.dispatch.device import Device
from moe_ops.dispatch.families.base import (
    BOXES,
    FOLLOWS_LOAD,
    NO_SUM,
    PLAIN,
    PLANNED,
    Rule,
    Tunable,
    served_by,
)
from moe_ops.dispatch.hopper import (
    LEAST_COLUMNS,
    LEAST_STAGES,
    LONGEST_INT8,
    PACKED,
    PACKED_LOAD,
    ROW_BYTES,
    STREAM,
    STREAM_ROWS,
    HopperTiles,
    KernelTiles,
    most_stages,
    operand_bytes,
    packed_rows,
    packed_tiles,
    stream_tiles,
    sums_integers,
    widths,
)
from moe_ops.dispatch.plan import BufferSpec, GemmPlan, quantized_rows, rows_of
from moe_ops.dispatch.problem import EACH, GemmProblem
from moe_ops.dispatch.tiles import TALL_ROW_TILE, load_class
from moe_ops.scheme import Scheme, get_scheme

PACKED_GROUPS = (3, 4, 8, 16, 32)
"""Values of ``group_m`` to try for the persistent kernels that pack rows."""


class Persistent(Tunable):
    """A kernel whose tiles have `HopperTiles`: the sizes that files and the tuner may set."""

    LEAST_STAGES = LEAST_STAGES
    DYNAMIC: ClassVar[bool] = True
    """Whether the kernel has a dynamic schedule, too."""

    def has(self, tiles: KernelTiles) -> bool:
        """Whether tiles name the kernel."""
        return isinstance(tiles, HopperTiles) and tiles.kernel == self.kernel

    def widths(self, block_m: int, scheme: Scheme) -> tuple[int, ...]:
        """The values of ``block_n`` for a row tile; empty if it lacks the row tile or scheme."""
        itemsize = operand_bytes(scheme)
        return () if itemsize is None else widths(self.kernel, block_m, itemsize)

    def ctas(self, block_m: int) -> tuple[int, ...]:
        """The values of ``ctas``: those for which registers suffice."""
        return (1,)

    def groups(self, problem: GemmProblem) -> Sequence[int]:
        """The values of ``group_m`` that the tuner tries."""
        return PACKED_GROUPS

    def most_stages(self, tiles: KernelTiles, problem: GemmProblem, device: Device) -> int:
        """The most stages that fit beside the epilogue."""
        return most_stages(cast(HopperTiles, tiles), device)

    def in_stages(self, tiles: HopperTiles, problem: GemmProblem, device: Device) -> HopperTiles:
        """Tiles of another size in as many stages as fit and bring anything."""
        return replace(tiles, num_stages=self.most_stages(tiles, problem, device))

    def allowed_widths(self, tiles: HopperTiles, problem: GemmProblem) -> tuple[int, ...]:
        """The values of ``block_n`` for a GEMM that the kernel takes."""
        return self.widths(tiles.block_m, get_scheme(problem.scheme))

    def unfit(self, tiles: KernelTiles, problem: GemmProblem, device: Device) -> str | None:
        """Why a GEMM that the family takes cannot have these tiles; None: it can."""
        tiles = cast(HopperTiles, tiles)
        wide, allowed = self.allowed_widths(tiles, problem), self.ctas(tiles.block_m)
        if tiles.block_n not in wide:
            return f"has {tiles.block_n} weight rows, {self.kernel} has {wide} for this row tile"
        if tiles.on_demand and not self.DYNAMIC:
            return f"has a dynamic schedule, {self.kernel} has none"
        if tiles.ctas not in allowed:
            return f"has {tiles.ctas} CTAs per SM, registers allow {allowed}"
        return super().unfit(tiles, problem, device)

    def steps(
        self, tiles: KernelTiles, size: str, problem: GemmProblem, device: Device
    ) -> Sequence[KernelTiles]:
        """Other widths or CTAs come with their most stages."""
        tiles = cast(HopperTiles, tiles)
        values: Mapping[str, Sequence[Any]] = {
            "block_n": self.widths(tiles.block_m, get_scheme(problem.scheme)),
            "ctas": self.ctas(tiles.block_m),
            "num_stages": [tiles.num_stages + step for step in (-2, -1, 1, 2)],
            "group_m": self.groups(problem),
            "on_demand": (False, True) if self.DYNAMIC else (),
        }
        now = getattr(tiles, size, None)
        found = [replace(tiles, **{size: v}) for v in values.get(size, ()) if v != now]
        if size in ("block_n", "ctas"):
            return [self.in_stages(other, problem, device) for other in found]
        return found


def _whole_boxes(problem: GemmProblem, _: Device) -> bool:
    gemm = problem.gemm
    return gemm.k * gemm.itemsize % 16 == 0 and (gemm.halves == 1 or gemm.n % 8 == 0)


def _one_scale(problem: GemmProblem, _: Device) -> bool:
    groups = problem.groups
    if groups is None or groups.k is None:
        return True
    return groups.k == ROW_BYTES and groups.n >= 128 // problem.sizes.halves


def _exact(problem: GemmProblem, _: Device) -> bool:
    return problem.sizes.k <= LONGEST_INT8 or not sums_integers(get_scheme(problem.scheme))


OPERANDS = Rule(
    "operands must be 16-bit, or fp8 or int8 with float32 scales, got {scheme.name}",
    lambda problem, _: operand_bytes(get_scheme(problem.scheme)) == problem.gemm.itemsize,
)
WHOLE_BOXES = Rule(
    "TMA boxes must hold 16 bytes along K, and 8 gate rows beside 8 up rows, "
    "got K {problem.sizes.k} and {problem.sizes.n} columns",
    _whole_boxes,
)
RULES = (
    OPERANDS, PLAIN, served_by(90), NO_SUM, FOLLOWS_LOAD, BOXES, WHOLE_BOXES,
    Rule("128 weight rows (64 with a gate) must share scales", _one_scale),
    Rule("sums of int8 products must fit in int32, got K {problem.sizes.k}", _exact),
    Rule("rows must not have one scale for each expert", lambda p, _: not p.expert_scales),
)  # fmt: skip


def _has_rows(kernel: str) -> Rule:
    """The kernel has tiles with the row tile of the plan."""
    return Rule(f"{kernel} must have tiles of {{problem.sizes.row_tile}} rows",
                lambda p, _: widths(kernel, p.sizes.row_tile, p.gemm.itemsize) != ())  # fmt: skip


def _many(problem: GemmProblem, _: Device) -> bool:
    gemm = problem.gemm
    load = load_class(gemm.num_slots, gemm.num_experts)
    return load >= PACKED_LOAD[gemm.itemsize] or gemm.row_tile == TALL_ROW_TILE


class Packing(Persistent):
    """The kernel for many rows, which are packed in the order of the plan."""

    def tiles(self, problem: GemmProblem, device: Device) -> HopperTiles:
        """The largest tile whose accumulators stay in registers."""
        return packed_tiles(problem.gemm, problem.sizes.row_tile, device)

    def plan(self, problem: GemmProblem, tiles: KernelTiles, source: str) -> GemmPlan:
        """Packed rows, which the pass that packs them quantizes if each has its own scale."""
        tiles, sizes = cast(HopperTiles, tiles), problem.sizes
        quantizes = problem.rows == EACH
        scratch = () if quantizes else quantized_rows(problem)
        scratch += next_tile(tiles)
        rows = 0
        if problem.permuted != "a":
            rows = packed_rows(sizes.num_slots, sizes.num_experts, tiles.block_m)
            scratch += rows_of(problem, rows, "packed rows")
        return GemmPlan(self.kernel, tiles, quantizes, rows, scratch, source)


def next_tile(tiles: HopperTiles) -> tuple[BufferSpec, ...]:
    """The counter of a dynamic schedule."""
    return (BufferSpec("next tile", 4),) if tiles.on_demand else ()


class Streaming(Persistent):
    """The swap-AB decode kernel, whose programs read rows where they are."""

    DYNAMIC = False

    def groups(self, problem: GemmProblem) -> Sequence[int]:
        """None: weights are read once."""
        return ()

    def tiles(self, problem: GemmProblem, device: Device) -> HopperTiles:
        """Long TMA boxes, unless they are too few."""
        return stream_tiles(problem.gemm, problem.sizes.row_tile, device)

    def plan(self, problem: GemmProblem, tiles: KernelTiles, source: str) -> GemmPlan:
        """Rows are quantized before."""
        return GemmPlan(self.kernel, tiles, False, 0, quantized_rows(problem), source)


LAUNCHER = "_hopper.gemm:HopperGemm"
GATHERED = Packing(PACKED, LAUNCHER, (*RULES, _has_rows(PACKED), PLANNED), preferred=(
    Rule("experts must have more rows for packing to pay", _many),
    Rule(f"there must be {LEAST_COLUMNS} weight rows for packing to pay",
         lambda problem, _: problem.weight[1] >= LEAST_COLUMNS),
))  # fmt: skip
SWAPPED = Streaming(STREAM, LAUNCHER, (*RULES, _has_rows(STREAM)), preferred=(
    Rule(f"the row tile must be at most {STREAM_ROWS}, got {{problem.sizes.row_tile}}",
         lambda problem, _: problem.sizes.row_tile <= STREAM_ROWS),
))  # fmt: skip
