"""Run the plan of an expert GEMM: the one place where a kernel's name becomes a kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
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
from moe_ops.dispatch.hopper_decode import DECODE_FEW, DECODE_MANY, DECODE_SLOT, DECODE_SUM
from moe_ops.dispatch.operands import SETTINGS, operands_of
from moe_ops.dispatch.problem import STORED, GemmProblem, problem_of, without_sum
from moe_ops.kernels._gemm.block_scaled import BlockScaledGemm
from moe_ops.kernels._gemm.dense import DenseGemm
from moe_ops.kernels._gemm.operands import GemmOperands
from moe_ops.kernels._gemm.scaled import ScaledGemm
from moe_ops.kernels._gemm.scaled_slot import SlotGemm
from moe_ops.kernels._gemm.weight_only import DequantizeGemm
from moe_ops.kernels._hopper.dequantized_gemm import DecodeGemm
from moe_ops.kernels._hopper.dequantized_jobs_gemm import DecodeJobs
from moe_ops.kernels._hopper.gemm import HopperGemm
from moe_ops.kernels._hopper.one_token_gemm import TokenGemm
from moe_ops.kernels.quantize import moe_quantize
from moe_ops.kernels.weight_and_reduce import moe_fused_mul_sum_out
from moe_ops.scheme import Quant

SUMMING = (TOKEN_SUM, DECODE_SUM)
"""Kernels that compute the weighted sum."""
Kernel = Callable[[Tensor, GemmOperands], None]
KERNELS: dict[str, Callable[..., Kernel]] = {
    DENSE: DenseGemm,
    SCALED: ScaledGemm,
    SLOT: SlotGemm,
    DEQUANTIZE: DequantizeGemm,
    BLOCK_SCALED: BlockScaledGemm,
    PACKED: HopperGemm,
    STREAM: HopperGemm,
    DECODE_FEW: DecodeGemm,
    DECODE_MANY: DecodeGemm,
    DECODE_SLOT: DecodeJobs,
    DECODE_SUM: DecodeJobs,
    TOKEN: TokenGemm,
    TOKEN_SUM: TokenGemm,
}
"""Kernels by `GemmPlan.kernel`: built from a problem and a plan, called with out and operands."""


class Prepared(NamedTuple):
    """Cached facts of an expert GEMM call, reused by calls that look alike."""

    shape: torch.Size
    """Shape of the result."""
    dtype: torch.dtype
    kernel: Kernel | None
    """The kernel to run; None if the result has no rows."""
    quant: Quant | None
    """How rows are quantized before the GEMM; None if they are not."""


PREPARED: dict[Any, Prepared] = {}
"""Prepared calls, keyed by everything that checks and plans read of a call."""
MOST = 8192
"""The most calls that are cached. The number of tokens is part of a call."""


def call_gemm(
    given: GemmOperands,
    settings: tuple[Any, ...],
    empty: Callable[[], Tensor],
    config: KernelTiles | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Run an expert GEMM and return its result.

    Checking sizes, describing the problem and planning take longer than a launch, so they are done
    once for calls that look alike.

    Args:
        given: the operands.
        settings: the operator's name, its arguments in `SETTINGS`, and what else decides.
        empty: checks the sizes, and returns the result, not filled yet.
        config: tiles to use instead of those of the plan.
        out: the tensor to write to; None: a new one.
    """
    facts = device_facts(given.a.device)
    key = (given.facts, settings, facts, config, tuned.TABLES)
    known = PREPARED.get(key)
    if known is None:
        result = empty()
        named = given._asdict() | dict(zip(SETTINGS[settings[0]], settings[1:], strict=False))
        problem = problem_of(operands_of(settings[0], named, result.dtype))
        known = Prepared(result.shape, result.dtype, *_ready(problem, facts, config, tuned.TABLES))
        if len(PREPARED) >= MOST:
            PREPARED.clear()
        PREPARED[key] = known
    else:
        result = given.a.new_empty(known.shape, dtype=known.dtype) if out is None else out
    _run(result, given, known.kernel, known.quant)
    return result


def _run(out: Tensor, given: GemmOperands, kernel: Kernel | None, quant: Quant | None) -> None:
    """Fill ``out``, after quantizing the rows if ``quant`` is given."""
    if kernel is None:
        return
    if given.a.stride(1) != 1:
        given = given._replace(a=given.a.contiguous())
    if quant is not None:
        routing = given.tiles[1:]
        rows, scale = moe_quantize(
            given.a, given.a_scale, None, *routing, given.w.shape[0], quant.key
        )
        given = given._replace(a=rows, a_scale=scale)
    kernel(out, given)


@lru_cache(maxsize=8192)
def _ready(
    problem: GemmProblem, device: Device, config: KernelTiles | None, tables: tuned.Tables
) -> tuple[Kernel | None, Quant | None]:
    """The kernel, and how to quantize rows before it; None for a step that is not needed."""
    if problem.sizes.num_slots == 0:
        return None, None
    plan = plan_gemm(problem, device, config=config)
    before = problem.rows != STORED and not plan.quantizes_rows
    make, quant = KERNELS[plan.kernel], problem.quant if before else None
    if problem.summed and plan.kernel not in SUMMING:
        return SumAfter(make(without_sum(problem), plan)), quant
    return make(problem, plan), quant


class SumAfter:
    """A GEMM kernel that writes to a temporary tensor, followed by the weighted-sum kernel."""

    def __init__(self, gemm: Kernel) -> None:
        self.gemm = gemm

    def __call__(self, out: Tensor, given: GemmOperands) -> None:
        """``out[t] = sum_j topk_weights[t, j] * product[t * k + j]``."""
        product = out.new_empty(given.a.shape[0], out.shape[1])
        self.gemm(product, given._replace(topk_weights=None))
        _, topk_ids, expert_map = given.tiles
        skipped = (topk_ids, expert_map, None, given.w.shape[0])
        moe_fused_mul_sum_out(product, given.topk_weights, *skipped, out=out)
