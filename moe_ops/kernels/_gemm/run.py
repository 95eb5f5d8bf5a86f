"""Run the plan of an expert GEMM: the one place where a kernel's name becomes a kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from torch import Tensor

from moe_ops.dispatch import tuned
from moe_ops.dispatch.device import Device, device_facts
from moe_ops.dispatch.gemm_plan import (
    BLOCK_SCALED,
    DENSE,
    DEQUANTIZE,
    SCALED,
    SLOT,
    TOKEN_SUM,
    plan_gemm,
)
from moe_ops.dispatch.hopper import PACKED, STREAM, TOKEN, KernelTiles
from moe_ops.dispatch.problem import STORED, GemmProblem
from moe_ops.kernels._gemm.block_scaled import BlockScaledGemm
from moe_ops.kernels._gemm.dense import DenseGemm
from moe_ops.kernels._gemm.operands import GemmOperands
from moe_ops.kernels._gemm.scaled import ScaledGemm
from moe_ops.kernels._gemm.scaled_slot import SlotGemm
from moe_ops.kernels._gemm.weight_only import DequantizeGemm
from moe_ops.kernels._hopper.gemm import HopperGemm
from moe_ops.kernels._hopper.token_gemm import TokenGemm
from moe_ops.kernels.quantize import moe_quantize
from moe_ops.scheme import Quant

Kernel = Callable[[Tensor, GemmOperands], None]
KERNELS: dict[str, Callable[..., Kernel]] = {
    DENSE: DenseGemm,
    SCALED: ScaledGemm,
    SLOT: SlotGemm,
    DEQUANTIZE: DequantizeGemm,
    BLOCK_SCALED: BlockScaledGemm,
    PACKED: HopperGemm,
    STREAM: HopperGemm,
    TOKEN: TokenGemm,
    TOKEN_SUM: TokenGemm,
}
"""Kernels by `GemmPlan.kernel`: built from a problem and a plan, called with out and operands."""


def run_gemm(
    out: Tensor, given: GemmOperands, problem: GemmProblem, config: KernelTiles | None = None
) -> Tensor:
    """``out``, filled by the kernel that `plan_gemm` chooses.

    Args:
        out: ``(slots, N)``, contiguous.
        given: the operands that ``problem`` describes.
        problem: sizes, formats and facts of the tensors.
        config: tiles to use instead of those of the plan.
    """
    if problem.sizes.num_slots == 0:
        return out
    kernel, quant = _ready(problem, device_facts(out.device), config, tuned.TABLES)
    if given.a.stride(1) != 1:
        given = given._replace(a=given.a.contiguous())
    if quant is not None:
        routing = given.tiles[1:]
        rows, scale = moe_quantize(
            given.a, given.a_scale, None, *routing, given.w.shape[0], quant.key
        )
        given = given._replace(a=rows, a_scale=scale)
    kernel(out, given)
    return out


@lru_cache(maxsize=8192)
def _ready(
    problem: GemmProblem, device: Device, config: KernelTiles | None, tables: tuned.Tables
) -> tuple[Kernel, Quant | None]:
    """The kernel, and how to quantize rows before it; None if there is nothing to quantize then."""
    plan = plan_gemm(problem, device, config=config)
    before = problem.rows != STORED and not plan.quantizes_rows
    make = KERNELS[plan.kernel]
    return make(problem, plan), problem.quant if before else None
