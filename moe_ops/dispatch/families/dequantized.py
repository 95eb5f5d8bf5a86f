"""Hopper's kernels for weights in fragment order, which are dequantized in registers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

import torch

from moe_ops.dispatch.device import Device
from moe_ops.dispatch.families.base import (
    DIRECT,
    NO_SUM,
    ONE_TOKEN,
    PLANNED,
    ROUTED,
    Family,
    Rule,
)
from moe_ops.dispatch.families.many_rows import Persistent, next_tile
from moe_ops.dispatch.hopper import HopperTiles, KernelTiles, packed_rows
from moe_ops.dispatch.hopper_decode import (
    DECODE_FEW,
    DECODE_MANY,
    DECODE_SLOT,
    DECODE_SUM,
    FEW_CTAS,
    FEW_STAGES,
    FEW_WEIGHT_ROWS,
    MANY_ROW_TILES,
    MANY_WEIGHT_ROWS,
    ONE_CTA,
    SUM_SLOTS,
    decode_slot_tiles,
    decode_sum_tiles,
    decodes,
    few_tiles,
    many_tiles,
    most_stages,
    with_stages,
)
from moe_ops.dispatch.plan import BufferSpec, GemmPlan, rows_of
from moe_ops.dispatch.problem import EACH, GemmProblem
from moe_ops.dispatch.tiles import ROW_TILES, Gemm, is_direct, load_class
from moe_ops.scheme import Quant, Scheme, get_scheme, packs
from moe_ops.scheme.packed import CHUNK

FEW_GROUPS = (1, 2, 4, 8)
"""Values of ``group_m`` to try for the kernel for few rows."""


def _quant(problem: GemmProblem) -> Quant:
    """The format of the weight, which is quantized."""
    return cast(Quant, get_scheme(problem.scheme).weight)


def _rounds(problem: GemmProblem) -> bool:
    """Whether rows are made of the values of the scheme's activations: in bf16, with scales."""
    return get_scheme(problem.scheme).activation is not None


def _widened(problem: GemmProblem) -> tuple[BufferSpec, ...]:
    """Buffers for dequantized rows in bf16 and, if the operator quantizes them, their scales."""
    if not _rounds(problem):
        return ()
    rows = problem.sizes.num_slots // problem.top_k
    scales = (BufferSpec("scales of rows", 4 * rows),) if problem.rows == EACH else ()
    return (*rows_of(problem, rows, "rows in bf16"), *scales)


def _in_place(family: Family, problem: GemmProblem, tiles: KernelTiles, source: str) -> GemmPlan:
    """The plan of a kernel that reads rows where they are."""
    return GemmPlan(family.kernel, tiles, problem.rows == EACH, 0, _widened(problem), source)


REFUSED = (
    "w must be in the plain form (see unpack_weight) for this{} GEMM on sm_{{device.arch}}, got "
    "{{scheme.name}} in the packed form"
)
RULES = (
    Rule("w must be in the packed form, got {scheme.name} in the plain form",
         lambda problem, _: problem.packed),
    Rule(REFUSED.format(" batch-invariant"),
         lambda problem, _: not problem.sizes.rule.batch_invariant),
    Rule(REFUSED.format(""), lambda _, device: device.arch == 90 and not device.portable_only),
    Rule("{problem.unread} (unpack_weight gives the plain form)",
         lambda problem, _: not problem.unread),
    Rule(REFUSED.format(""), lambda problem, _: problem.boxes),
)  # fmt: skip


@dataclass(frozen=True)
class InJobs(Family):
    """A kernel for few slots, whose warps divide the products: see `hopper_decode.Jobs`."""

    make: Callable[[Gemm, Quant, Device], HopperTiles | None] = decode_slot_tiles

    def tiles(self, problem: GemmProblem, device: Device) -> HopperTiles:
        """As many programs as find room."""
        return cast(HopperTiles, self.make(problem.sizes, _quant(problem), device))

    def plan(self, problem: GemmProblem, tiles: KernelTiles, source: str) -> GemmPlan:
        """Rows stay where they are."""
        return _in_place(self, problem, tiles, source)


def _has_room(make: Callable[[Gemm, Quant, Device], HopperTiles | None]) -> Rule:
    return Rule("all programs must find room on the GPU at once",
                lambda p, device: make(p.sizes, _quant(p), device) is not None)  # fmt: skip


JOBS = "_hopper.decode_jobs_gemm:DecodeJobs"
SLOT = InJobs(DECODE_SLOT, JOBS, (
    *RULES, NO_SUM, ROUTED, DIRECT, _has_room(decode_slot_tiles),
), fragments=True, make=decode_slot_tiles)  # fmt: skip
SUM = InJobs(DECODE_SUM, JOBS, (
    *RULES, Rule("GEMM 2 must have the weighted sum", lambda p, _: p.summed), ONE_TOKEN,
    Rule(f"slots must be at most {SUM_SLOTS}, got {{problem.sizes.num_slots}}",
         lambda problem, _: problem.sizes.num_slots <= SUM_SLOTS),
    _has_room(decode_sum_tiles),
), sums=True, fragments=True, make=decode_sum_tiles)  # fmt: skip


class Dequantizing(Persistent):
    """A kernel whose tiles files may set."""

    WIDTH: ClassVar[int]
    """Weight rows of a tile."""
    ROWS: ClassVar[Collection[int]]
    """Row tiles that files may set."""

    def widths(self, block_m: int, scheme: Scheme) -> tuple[int, ...]:
        """The values of ``block_n`` for a row tile; empty if it lacks the row tile or scheme."""
        served = packs(scheme, CHUNK, CHUNK) and decodes(scheme, torch.bfloat16)
        return (self.WIDTH,) if served and block_m in self.ROWS else ()

    def most_stages(self, tiles: KernelTiles, problem: GemmProblem, device: Device) -> int:
        """The most stages that fit."""
        return most_stages(cast(HopperTiles, tiles), _quant(problem), device)

    def in_stages(self, tiles: HopperTiles, problem: GemmProblem, device: Device) -> HopperTiles:
        """Tiles of another size in as many stages as fit and bring anything."""
        return with_stages(tiles, _quant(problem), device)

    def worth(self, tiles: KernelTiles, problem: GemmProblem) -> bool:
        """Whether the stages are not more than bring anything."""
        return tiles.num_stages <= FEW_STAGES


class FewRows(Dequantizing):
    """The kernel for few rows, which gathers them itself."""

    DYNAMIC, WIDTH, ROWS = False, FEW_WEIGHT_ROWS, FEW_CTAS.keys()

    def ctas(self, block_m: int) -> tuple[int, ...]:
        """The values of ``ctas``: those for which registers suffice."""
        return (1,) * (block_m in ONE_CTA) + tuple(sorted(FEW_CTAS.get(block_m, {2: 1.0})))

    def groups(self, problem: GemmProblem) -> Sequence[int]:
        """None if there is one row tile per expert."""
        load = load_class(problem.sizes.num_slots, problem.sizes.num_experts)
        return FEW_GROUPS if load else ()

    def allowed_widths(self, tiles: HopperTiles, problem: GemmProblem) -> tuple[int, ...]:
        """For slots without a plan also with a row tile that was asked for."""
        direct = is_direct(problem.sizes.num_slots, problem.sizes.num_experts)
        asked = direct and tiles.block_m in ROW_TILES
        return (self.WIDTH,) if asked else super().allowed_widths(tiles, problem)

    def tiles(self, problem: GemmProblem, device: Device) -> HopperTiles:
        """As many CTAs as keep the last round of tiles full."""
        return few_tiles(problem.sizes, _quant(problem), device)

    def plan(self, problem: GemmProblem, tiles: KernelTiles, source: str) -> GemmPlan:
        """Rows stay where they are."""
        return _in_place(self, problem, tiles, source)


class ManyRows(Dequantizing):
    """The kernel for many rows, which are packed in the order of the plan."""

    WIDTH, ROWS = MANY_WEIGHT_ROWS, MANY_ROW_TILES

    def tiles(self, problem: GemmProblem, device: Device) -> HopperTiles:
        """The row tile of the plan, with a dynamic schedule."""
        return many_tiles(problem.sizes, _quant(problem), device)

    def plan(self, problem: GemmProblem, tiles: KernelTiles, source: str) -> GemmPlan:
        """Packed rows, and their scales if rows are rounded."""
        tiles, sizes = cast(HopperTiles, tiles), problem.sizes
        rows = packed_rows(sizes.num_slots, sizes.num_experts, tiles.block_m)
        scratch = (*next_tile(tiles), *rows_of(problem, rows, "packed rows"))
        if _rounds(problem):
            scratch += (BufferSpec("scales of packed rows", 4 * rows),)
        return GemmPlan(self.kernel, tiles, problem.rows == EACH, rows, scratch, source)


LAUNCHER = "_hopper.decode_gemm:DecodeGemm"
MANY = ManyRows(DECODE_MANY, LAUNCHER, (*RULES, NO_SUM, PLANNED), fragments=True, preferred=(
    Rule(f"the row tile must be more than {max(FEW_CTAS)}, got {{problem.sizes.row_tile}}",
         lambda problem, _: problem.sizes.row_tile not in FEW_CTAS),
))  # fmt: skip
FEW = FewRows(DECODE_FEW, LAUNCHER, (*RULES, NO_SUM), fragments=True)
