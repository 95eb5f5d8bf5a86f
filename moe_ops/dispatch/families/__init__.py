"""The families of kernels for expert GEMMs, in the order in which `plan_gemm` asks them."""

from __future__ import annotations

from moe_ops.dispatch.device import Device
from moe_ops.dispatch.families import dequantized, many_rows, one_token, portable
from moe_ops.dispatch.families.base import Condition, Family, Tunable
from moe_ops.dispatch.families.blackwell import BLOCK_SCALED
from moe_ops.dispatch.hopper import KernelTiles
from moe_ops.dispatch.problem import GemmProblem

FIXED: tuple[Family, ...] = (
    one_token.FIRST, one_token.SECOND, portable.SLOT, dequantized.SLOT, dequantized.SECOND,
    BLOCK_SCALED,
)  # fmt: skip
"""Families whose tiles no tuned file sets."""
TUNABLE: tuple[Tunable, ...] = (
    many_rows.FETCHED, many_rows.GATHERED, many_rows.SWAPPED, portable.DENSE, portable.SCALED,
    portable.DEQUANTIZE, dequantized.MANY, dequantized.FEW,
)  # fmt: skip
"""Families whose tiles may be tuned: the first that a tuned file names, or else that is preferred.

One of them takes any plain weight. The last one takes any packed weight that a kernel reads."""
FAMILIES: tuple[Family, ...] = (*FIXED, *TUNABLE)
BY_NAME = {family.kernel: family for family in FAMILIES}

__all__ = ["BY_NAME", "FAMILIES", "FIXED", "TUNABLE", "Condition", "Family", "serving"]


def serving(tiles: KernelTiles, problem: GemmProblem, device: Device) -> Family | str:
    """The family that computes a GEMM with set or tuned tiles, or why none does."""
    why = "has no kernel whose tiles can be set"
    for family in FAMILIES:
        if family.has(tiles):
            reason = family.why_not(problem, device)
            if reason is None:
                return family.unfit(tiles, problem, device) or family
            why = f"is for {family.kernel}, but {reason}"
    return why
