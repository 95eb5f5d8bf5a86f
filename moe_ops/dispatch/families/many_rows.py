"""Hopper's kernels for many rows of a plain weight: gathered rows, or swap-AB tiles of few rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moe_ops.dispatch.device import Device
from moe_ops.dispatch.families.base import (
    BOXES,
    NO_SUM,
    PLAIN,
    PLANNED,
    Condition,
    Tunable,
    served_by,
)
from moe_ops.dispatch.hopper import (
    FETCH,
    FETCH_TILE,
    FETCHED_ROWS,
    GATHERED_LOAD,
    LEAST_COLUMNS,
    LEAST_STAGES,
    LONGEST_INT8,
    PACKED,
    ROW_BYTES,
    STREAM,
    STREAM_ROWS,
    HopperTiles,
    KernelTiles,
    gathered_rows,
    most_stages,
    operand_bytes,
    stream_tiles,
    sums_integers,
    tall_tiles,
    tile_widths,
)
from moe_ops.dispatch.plan import BufferSpec, GemmPlan, quantized_rows, rows_of
from moe_ops.dispatch.problem import EACH, GemmProblem
from moe_ops.dispatch.tiles import TALL_ROW_TILE
from moe_ops.scheme import Scheme, get_scheme

GATHERED_GROUPS = (3, 4, 8, 16, 32)
"""Values of ``group_m`` to try for the persistent kernels that gather rows first."""


@dataclass(frozen=True)
class Persistent(Tunable):
    """A kernel in Gluon for Hopper, whose tiles are `HopperTiles`."""

    LEAST_STAGES = LEAST_STAGES
    gathers: bool = False
    """Whether rows are gathered in the order of the plan."""
    fetches: bool = False
    """Whether rows are fetched where they lie."""
    groups: Callable[[GemmProblem], Sequence[int]] = lambda problem: GATHERED_GROUPS
    """Values of ``group_m`` that the tuner tries."""
    enough: int = 64
    """Stages beyond which the tuner tries no more."""

    @property
    def on_demand(self) -> tuple[bool, ...]:
        """Whether the schedule may be dynamic."""
        return (False, True) if self.gathers or self.fetches else (False,)

    def has(self, tiles: KernelTiles) -> bool:
        """Whether tiles name the kernel."""
        return isinstance(tiles, HopperTiles) and tiles.kernel == self.kernel

    def widths(self, block_m: int, scheme: Scheme) -> tuple[int, ...]:
        """The values of ``block_n`` for a row tile; empty if it lacks the row tile or scheme."""
        itemsize = operand_bytes(scheme)
        return () if itemsize is None else tile_widths(self.kernel, block_m, itemsize)

    def ctas(self, block_m: int) -> tuple[int, ...]:
        """The values of ``ctas``: those for which registers suffice."""
        return (1,)

    def most_stages(self, tiles: HopperTiles, problem: GemmProblem, device: Device) -> int:
        """The most stages that fit beside the epilogue."""
        return most_stages(tiles, device)

    def in_stages(self, tiles: HopperTiles, problem: GemmProblem, device: Device) -> HopperTiles:
        """Tiles of another size in the most stages that fit and are tried."""
        most = self.most_stages(tiles, problem, device)
        return replace(tiles, num_stages=min(self.enough, most))

    def allowed_widths(self, tiles: HopperTiles, problem: GemmProblem) -> tuple[int, ...]:
        """The values of ``block_n`` for a GEMM that the kernel takes."""
        return self.widths(tiles.block_m, get_scheme(problem.scheme))

    def unfit(self, tiles: HopperTiles, problem: GemmProblem, device: Device) -> str | None:
        """Why a GEMM that the family takes cannot have these tiles; None: it can."""
        wide, allowed = self.allowed_widths(tiles, problem), self.ctas(tiles.block_m)
        if tiles.block_n not in wide:
            return f"has {tiles.block_n} weight rows, {self.kernel} has {wide} for this row tile"
        if tiles.on_demand not in self.on_demand:
            return f"has a dynamic schedule, {self.kernel} has none"
        if tiles.ctas not in allowed:
            return f"has {tiles.ctas} CTAs per SM, registers allow {allowed}"
        return super().unfit(tiles, problem, device)

    def worth(self, tiles: HopperTiles, problem: GemmProblem) -> bool:
        """Whether the stages are not more than `enough`."""
        return tiles.num_stages <= self.enough

    def steps(
        self, tiles: HopperTiles, size: str, problem: GemmProblem, device: Device
    ) -> Sequence[HopperTiles]:
        """Other widths or CTAs come with their most stages."""
        values: Mapping[str, Sequence[Any]] = {
            "block_n": self.widths(tiles.block_m, get_scheme(problem.scheme)),
            "ctas": self.ctas(tiles.block_m),
            "num_stages": [tiles.num_stages + step for step in (-2, -1, 1, 2)],
            "group_m": self.groups(problem),
            "on_demand": self.on_demand,
        }
        now = getattr(tiles, size, None)
        others = [replace(tiles, **{size: v}) for v in values.get(size, ()) if v != now]
        whole = size in ("block_n", "ctas")
        return [self.in_stages(t, problem, device) for t in others] if whole else others

    def quantizes_rows(self, problem: GemmProblem) -> bool:
        """Not if slots share a row, which is quantized once, before it is gathered for each."""
        shared = self.gathers and not self.fragments and problem.top_k > 1
        return super().quantizes_rows(problem) and not shared

    def plan(self, problem: GemmProblem, tiles: HopperTiles, source: str) -> GemmPlan:
        """With the counter of a dynamic schedule and, if rows are gathered first, their buffers."""
        plan, sizes = super().plan(problem, tiles, source), problem.sizes
        scratch = (*plan.scratch, *([BufferSpec("next tile", 4)] if tiles.on_demand else ()))
        if not self.gathers or (problem.permuted == "a" and not self.fragments):
            return plan._replace(scratch=scratch)
        rows = gathered_rows(sizes.num_slots, sizes.num_experts, tiles.block_m)
        scratch = (*scratch, *rows_of(problem, rows, "gathered rows"))
        if problem.row_scales == "channel":
            scratch = (*scratch, BufferSpec("scales of gathered rows", 4 * rows))
        return plan._replace(gathered_rows=rows, scratch=scratch)


def _one_scale(problem: GemmProblem, _: Device) -> bool:
    groups = problem.groups
    if groups is None or groups.k is None:
        return True
    return groups.k == ROW_BYTES and groups.n >= 128 // problem.sizes.halves


OPERANDS = Condition(
    "operands must be 16-bit, or fp8 or int8 with float32 scales, got {scheme.name}",
    lambda problem, _: operand_bytes(get_scheme(problem.scheme)) == problem.gemm.itemsize,
)
WHOLE_BOXES = Condition(
    "TMA boxes must hold 16 bytes along K, and 8 gate rows beside 8 up rows, "
    "got K {problem.sizes.k} and {problem.sizes.n} columns",
    lambda p, _: (
        p.sizes.k * p.gemm.itemsize % 16 == 0 and (p.sizes.halves == 1 or p.sizes.n % 8 == 0)
    ),
)
KIND = (OPERANDS, PLAIN, NO_SUM)
COMMON = (
    served_by(90),
    Condition("128 weight rows (64 with a gate) must share scales", _one_scale),
    Condition("sums of int8 products must fit in int32, got K {problem.sizes.k}",
              lambda p, _: p.sizes.k <= LONGEST_INT8 or not sums_integers(get_scheme(p.scheme))),
    Condition("rows must not have one scale for each expert", lambda p, _: not p.expert_scales),
)  # fmt: skip
CONDITIONS = (BOXES, WHOLE_BOXES, *COMMON)
EITHER_WAY = (
    Condition(BOXES.must, lambda p, _: p.boxes or p.transposed),
    Condition(
        "a transposed weight must have 16-bit numbers, no activation, and multiples of 8 rows and "
        "columns, got {problem.sizes.n} and {problem.sizes.k}",
        lambda p, _: (
            not p.transposed
            or (p.gemm.itemsize == 2 and p.rule is None and p.sizes.n % 8 == p.sizes.k % 8 == 0)
        ),
    ),
    Condition(WHOLE_BOXES.must, lambda p, gpu: p.transposed or WHOLE_BOXES.holds(p, gpu)),
)


def _has_rows(kernel: str) -> Condition:
    """The kernel has tiles with the row tile of the plan."""
    return Condition(
        f"row tiles must be of a size that {kernel} has, got {{problem.sizes.row_tile}}",
        lambda p, _: tile_widths(kernel, p.sizes.row_tile, p.gemm.itemsize) != (),
    )


def _many(problem: GemmProblem, _: Device) -> bool:
    """Whether experts have many rows, for tiles of 64 one bucket later than for taller ones.

    In the first bucket the portable kernel is faster with tiles of 64, which 8-bit rows have there.
    """
    sizes = problem.sizes
    first = GATHERED_LOAD if sizes.row_tile > 64 else GATHERED_LOAD + 1
    return sizes.load_class >= first


def _has_one_sum(problem: GemmProblem) -> bool:
    """Whether products are added up unscaled.

    Products of scale groups take a second set of registers. The kernel's loop would spill if the
    kernel stored a product as well.
    """
    return problem.quant is None or problem.quant.shared_cols is None


def _of_slots(problem: GemmProblem) -> bool:
    """Whether each slot has a row of its own, which is not quantized yet."""
    return problem.rows == EACH and problem.top_k == 1


LAUNCHER = "_hopper.gemm:HopperGemm"
GATHERED = Persistent(
    PACKED,
    LAUNCHER,
    KIND,
    (*CONDITIONS, _has_rows(PACKED), PLANNED),
    lambda p, device: tall_tiles(PACKED, p.gemm, p.sizes.row_tile, device),
    preferred=(
        Condition("experts must have more rows for packing to pay", _many),
        Condition(
            f"there must be {LEAST_COLUMNS} weight rows for packing to pay",
            lambda problem, _: problem.weight[1] >= LEAST_COLUMNS,
        ),
    ),
    quantizes=(EACH,),
    gathers=True,
    keeps_product=_has_one_sum,
    buffers=lambda problem: () if _of_slots(problem) else quantized_rows(problem),
)
"""The kernel for many rows, which are gathered in the order of the plan."""


def _sorts(problem: GemmProblem) -> bool:
    """Whether slots are sorted again, by the routing, for tiles of `FETCH_TILE` rows."""
    tall = problem.sizes.row_tile == TALL_ROW_TILE
    return problem.transposed and problem.num_tokens is not None and tall


FETCHED = Persistent(
    FETCH,
    LAUNCHER,
    KIND,
    (
        *EITHER_WAY,
        *COMMON,
        Condition(
            f"tiles must have {FETCH_TILE} rows; slots are sorted again for a transposed weight",
            lambda p, _: p.sizes.row_tile == FETCH_TILE or _sorts(p),
        ),
        PLANNED,
        Condition(
            "rows must be aligned, fewer than 2**31 numbers, and in the order of tokens or slots",
            lambda p, _: p.within_reach and p.permuted != "a",
        ),
    ),
    lambda p, device: tall_tiles(FETCH, p.gemm, FETCH_TILE, device),
    preferred=(
        Condition("experts must have more rows for wide tiles to pay", _many),
        Condition(
            "rows must not be quantized while they are gathered",
            lambda problem, _: not _of_slots(problem),
        ),
        Condition(
            f"at most {FETCHED_ROWS} weight rows a byte must read each row",
            lambda p, _: p.transposed or p.weight[1] <= FETCHED_ROWS * p.gemm.itemsize,
        ),
    ),
    fetches=True,
    sorts=True,
    keeps_product=_has_one_sum,
)
"""The kernel for many rows, which fetches them where they lie."""
SWAPPED = Persistent(
    STREAM,
    LAUNCHER,
    KIND,
    (*CONDITIONS, _has_rows(STREAM)),
    lambda p, device: stream_tiles(p.gemm, p.sizes.row_tile, device),
    preferred=(
        Condition(
            f"the row tile must be at most {STREAM_ROWS}",
            lambda problem, _: problem.sizes.row_tile <= STREAM_ROWS,
        ),
    ),
    groups=lambda problem: (),
)
"""The swap-AB kernel for few rows, whose programs read rows where they are."""
