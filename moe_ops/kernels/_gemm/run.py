"""Run the plan of an expert GEMM: the one place where a family's launcher becomes a kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pkgutil import resolve_name
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from moe_ops.dispatch import tuned
from moe_ops.dispatch.device import Device, device_facts
from moe_ops.dispatch.families import BY_NAME, Family
from moe_ops.dispatch.gemm_plan import plan_gemm
from moe_ops.dispatch.hopper import KernelTiles
from moe_ops.dispatch.operands import SETTINGS, operands_of
from moe_ops.dispatch.problem import STORED, GemmProblem, problem_of, without_sum
from moe_ops.kernels._gemm.operands import GemmOperands
from moe_ops.kernels.quantize import moe_quantize
from moe_ops.kernels.weight_and_reduce import moe_fused_mul_sum_out
from moe_ops.scheme import Quant

Kernel = Callable[[Tensor, GemmOperands], None]


class Prepared(NamedTuple):
    """Cached facts of an expert GEMM call, reused by calls that look alike."""

    shape: torch.Size
    """Shape of the result."""
    dtype: torch.dtype
    kernel: Kernel | None
    """The kernel to run; None if the result has no rows."""
    quant: Quant | None
    """How rows are quantized before the GEMM; None if they are not."""
    keeps_product: bool
    """Whether the kernel stores the product before the activation if it is given a place."""


PREPARED: dict[Any, Prepared] = {}
"""Prepared calls, keyed by everything that checks and plans read of a call."""
MOST = 8192
"""The most calls that are cached. The number of tokens is part of a call."""


def call_gemm(
    operator: str,
    operands: GemmOperands,
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
        operator: one of `GEMMS`.
        operands: the operands.
        settings: the arguments in `SETTINGS`, and what else decides.
        empty: checks the sizes, and returns the result, not filled yet.
        config: tiles to use instead of those of the plan.
        out: the tensor to write to; None: a new one.
    """
    facts = device_facts(operands.a.device)
    key = (operator, operands.facts, settings, facts, config, tuned.TABLES)
    prepared = PREPARED.get(key)
    if prepared is None:
        result = empty()
        named = operands._asdict() | dict(zip(SETTINGS, settings, strict=False))
        problem = problem_of(operands_of(operator, named))
        prepared = Prepared(
            result.shape, result.dtype, *_ready(problem, facts, config, tuned.TABLES)
        )
        if len(PREPARED) >= MOST:
            PREPARED.clear()
        PREPARED[key] = prepared
    else:
        result = operands.a.new_empty(prepared.shape, dtype=prepared.dtype) if out is None else out
    if operands.product is not None and not prepared.keeps_product:
        operands = _product_apart(operands, settings)
    _run(result, operands, prepared.kernel, prepared.quant)
    return result


def _product_apart(operands: GemmOperands, settings: tuple[Any, ...]) -> GemmOperands:
    """Compute ``operands.product`` by a GEMM of its own; return the operands without it."""
    product, operands = operands.product, operands._replace(product=None)
    named = dict(zip(SETTINGS, settings, strict=True)) | {"activation": "", "expert_order": False}
    alone = tuple(named[name] for name in SETTINGS)
    call_gemm("expert_product", operands, alone, lambda: cast(Tensor, product), out=product)
    return operands


def _run(out: Tensor, operands: GemmOperands, kernel: Kernel | None, quant: Quant | None) -> None:
    """Fill ``out``, after quantizing the rows if ``quant`` is given."""
    if kernel is None:
        return
    if operands.a.stride(1) != 1:
        operands = operands._replace(a=operands.a.contiguous())
    if quant is not None:
        routing = operands.tiles[1:]
        rows, scale = moe_quantize(
            operands.a, operands.a_scale, None, *routing, operands.num_experts, quant.key
        )
        operands = operands._replace(a=rows, a_scale=scale)
    kernel(out, operands)


def launcher(family: Family) -> Callable[..., Kernel]:
    """What makes a kernel of a problem and a plan: imported when a plan first asks for it."""
    return resolve_name(f"moe_ops.kernels.{family.launcher}")


@lru_cache(maxsize=8192)
def _ready(
    problem: GemmProblem, device: Device, config: KernelTiles | None, tables: tuned.Tables
) -> tuple[Kernel | None, Quant | None, bool]:
    """The kernel, how to quantize rows before it, and whether it stores products.

    None for a step that is not needed.
    """
    if problem.sizes.num_slots == 0:
        return None, None, True
    plan = plan_gemm(problem, device, config=config)
    before = problem.rows != STORED and not plan.quantizes_rows
    family, quant = BY_NAME[plan.kernel], problem.quant if before else None
    make = launcher(family)
    if problem.summed and not family.sums:
        return SumAfter(make(without_sum(problem), plan)), quant, False
    return make(problem, plan), quant, family.keeps_product(problem)


class SumAfter:
    """A GEMM kernel that writes to a temporary tensor, followed by the weighted-sum kernel."""

    def __init__(self, gemm: Kernel) -> None:
        self.gemm = gemm

    def __call__(self, out: Tensor, operands: GemmOperands) -> None:
        """``out[t] = sum_j topk_weights[t, j] * product[t * k + j]``."""
        product = out.new_empty(operands.a.shape[0], out.shape[1])
        self.gemm(product, operands._replace(topk_weights=None))
        _, topk_ids, expert_map = operands.tiles
        weights, num_experts = operands.topk_weights, operands.num_experts
        moe_fused_mul_sum_out(product, weights, topk_ids, expert_map, None, num_experts, out=out)
