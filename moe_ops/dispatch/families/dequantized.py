"""Hopper's kernels for weights in fragment order, which are dequantized in registers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from moe_ops.dispatch.device import Device
from moe_ops.dispatch.families.base import (
    DIRECT,
    FOLLOWS_LOAD,
    NO_SUM,
    ONE_TOKEN,
    PLANNED,
    ROUTED,
    SUM,
    Condition,
    Family,
)
from moe_ops.dispatch.families.many_rows import Persistent
from moe_ops.dispatch.hopper import HopperTiles
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
    decodes_to_fp8,
    dequantizes,
    few_tiles,
    many_tiles,
    most_decode_stages,
    slot_tiles,
    sum_tiles,
)
from moe_ops.dispatch.plan import BufferSpec, rows_of
from moe_ops.dispatch.problem import EACH, GemmProblem
from moe_ops.dispatch.tiles import ROW_TILES, Gemm, is_direct
from moe_ops.scheme import Quant, Scheme, get_scheme, packs
from moe_ops.scheme.packed import CHUNK

FEW_GROUPS = (1, 2, 4, 8)
"""Values of ``group_m`` to try for the kernel for few rows."""
REFUSED = (
    "w must be in the plain form (see unpack_weight) for this{mode} GEMM on sm_{device.arch}, got "
    "{scheme.name} in the packed form"
)
FRAGMENTS = Condition(
    "w must be in the packed form, got {scheme.name} in the plain form",
    lambda problem, _: problem.fragments,
)
CONDITIONS = (
    Condition(REFUSED, lambda _, device: device.arch == 90 and not device.portable_only),
    Condition(REFUSED, lambda problem, _: not problem.sizes.rule.batch_invariant
              or not decodes_to_fp8(DECODE_MANY, get_scheme(problem.scheme))),
    Condition("{problem.unread} (unpack_weight gives the plain form)",
         lambda problem, _: not problem.unread),
    Condition(REFUSED, lambda problem, _: problem.boxes),
)  # fmt: skip
READS: dict[str, Any] = {"fragments": True, "quantizes": (EACH,)}
"""What all these families have in common."""
Make = Callable[[Gemm, Quant, Device], HopperTiles | None]


def _weight_quant(problem: GemmProblem) -> Quant:
    """The format of the weight, which is quantized."""
    return cast(Quant, get_scheme(problem.scheme).weight)


def _widened(problem: GemmProblem) -> tuple[BufferSpec, ...]:
    """Buffers for dequantized rows in bf16 and, if the operator quantizes them, their scales."""
    if not problem.row_scales:
        return ()
    rows = problem.sizes.num_slots // problem.top_k
    scales = (BufferSpec("scales of rows", 4 * rows),) if problem.rows == EACH else ()
    return (*rows_of(problem, rows, "rows in bf16"), *scales)


def _in_jobs(
    kernel: str, make: Make, product: Condition, *more: Condition, sums: bool = False
) -> Family:
    """A family for few slots, whose warps divide the products: see `hopper_decode.Jobs`."""

    def tiles(problem: GemmProblem, device: Device) -> HopperTiles | None:
        return make(problem.sizes, _weight_quant(problem), device)

    room = Condition(
        "all programs must find room on the GPU at once",
        lambda problem, device: tiles(problem, device) is not None,
    )
    launcher, kind = "_hopper.dequantized_jobs_gemm:DecodeJobs", (FRAGMENTS, product)
    conditions = (*CONDITIONS, FOLLOWS_LOAD, *more, room)
    return Family(kernel, launcher, kind, conditions, tiles, buffers=_widened, sums=sums, **READS)


SLOT = _in_jobs(DECODE_SLOT, slot_tiles, NO_SUM, ROUTED, DIRECT)
SECOND = _in_jobs(DECODE_SUM, sum_tiles, SUM, ONE_TOKEN, sums=True)


@dataclass(frozen=True)
class Dequantizing(Persistent):
    """A kernel whose tiles files may set."""

    width: int = FEW_WEIGHT_ROWS
    """Weight rows of a tile."""
    row_tiles: tuple[int, ...] = tuple(FEW_CTAS)
    """Row tiles that files may set."""

    def widths(self, block_m: int, scheme: Scheme) -> tuple[int, ...]:
        """The values of ``block_n`` for a row tile; empty if it lacks the row tile or scheme."""
        served = packs(scheme, CHUNK, CHUNK) and dequantizes(scheme, torch.bfloat16)
        return (self.width,) if served and block_m in self.row_tiles else ()

    def ctas(self, block_m: int) -> tuple[int, ...]:
        """The values of ``ctas``: those for which registers suffice."""
        if self.gathers:
            return (1,)
        return (1,) * (block_m in ONE_CTA) + tuple(sorted(FEW_CTAS.get(block_m, {2: 1.0})))

    def allowed_widths(self, tiles: HopperTiles, problem: GemmProblem) -> tuple[int, ...]:
        """For slots without a plan also with a row tile that was asked for."""
        direct = is_direct(problem.sizes.num_slots, problem.sizes.num_experts)
        asked = direct and tiles.block_m in ROW_TILES
        return (self.width,) if asked else super().allowed_widths(tiles, problem)

    def most_stages(self, tiles: HopperTiles, problem: GemmProblem, device: Device) -> int:
        """The most stages that fit."""
        return most_decode_stages(tiles, get_scheme(problem.scheme), device)


def _few_groups(problem: GemmProblem) -> Sequence[int]:
    """None if there is one row tile per expert."""
    return FEW_GROUPS if problem.sizes.load_class else ()


LAUNCHER = "_hopper.dequantized_gemm:DecodeGemm"
MANY = Dequantizing(
    DECODE_MANY,
    LAUNCHER,
    (FRAGMENTS, NO_SUM),
    (*CONDITIONS, PLANNED),
    lambda problem, device: many_tiles(problem.sizes, get_scheme(problem.scheme), device),
    preferred=(
        Condition(
            f"the row tile must be more than {max(FEW_CTAS)}",
            lambda problem, _: problem.sizes.row_tile not in FEW_CTAS,
        ),
    ),
    buffers=lambda problem: (),
    gathers=True,
    enough=FEW_STAGES,
    width=MANY_WEIGHT_ROWS,
    row_tiles=MANY_ROW_TILES,
    **READS,
)
"""The kernel for many rows, which are gathered in the order of the plan."""
FEW = Dequantizing(
    DECODE_FEW,
    LAUNCHER,
    (FRAGMENTS, NO_SUM),
    CONDITIONS,
    lambda problem, device: few_tiles(problem.sizes, get_scheme(problem.scheme), device),
    buffers=_widened,
    groups=_few_groups,
    enough=FEW_STAGES,
    **READS,
)
"""The kernel for few rows, which gathers them itself."""
