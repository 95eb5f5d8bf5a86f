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
from moe_ops.dispatch.operands import COLUMNS, SETTINGS, operands_of
from moe_ops.dispatch.problem import STORED, GemmProblem, problem_of, without_sum
from moe_ops.dispatch.tiles import TileRule, own_plan, with_own_plan
from moe_ops.kernels._gemm.operands import GemmOperands
from moe_ops.kernels._gemm.waves import waves
from moe_ops.kernels.align import sorted_slots
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
    quant: Quant | None = None
    """How rows are quantized before the GEMM; None if they are not."""
    sorts_by: TileRule | None = None
    """The rule of the plan if slots are sorted again; None: the kernel reads the call's plan."""
    keeps_product: bool = True
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
        settings: the arguments in `SETTINGS` (and in `COLUMNS`), and what else decides.
        empty: checks the sizes, and returns the result, not filled yet.
        config: tiles to use instead of the plan's.
        out: the tensor to write to; None: a new one.
    """
    facts = device_facts(operands.a.device)
    key = (operator, operands.facts, settings, facts, config, tuned.TABLES)
    prepared = PREPARED.get(key)
    if prepared is None:
        result = empty()
        named = operands._asdict() | dict(zip((*SETTINGS, *COLUMNS), settings, strict=False))
        problem = problem_of(operands_of(operator, named))
        result_of = Prepared(result.shape, result.dtype, None)
        waits = operands.weight.host is not None
        prepared = _prepared(result_of, problem, facts, config, tuned.TABLES, in_waves=waits)
        if len(PREPARED) >= MOST:
            PREPARED.clear()
        PREPARED[key] = prepared
    elif out is None:  # sizes one by one: PyTorch takes a `torch.Size` apart more slowly
        result = operands.a.new_empty(*prepared.shape, dtype=prepared.dtype)
    else:
        result = out
    if prepared.kernel is None:
        return result
    if operands.product is not None and not prepared.keeps_product:
        operands = _product_apart(operands, settings)
    _run(result, operands, prepared, prepared.kernel)
    return result


def _product_apart(operands: GemmOperands, settings: tuple[Any, ...]) -> GemmOperands:
    """Compute ``operands.product`` by a GEMM of its own; return the operands without it."""
    product, operands = operands.product, operands._replace(product=None)
    named = dict(zip(SETTINGS, settings, strict=True)) | {"activation": "", "expert_order": False}
    alone = tuple(named[name] for name in SETTINGS)
    call_gemm("expert_product", operands, alone, lambda: cast(Tensor, product), out=product)
    return operands


def _run(out: Tensor, operands: GemmOperands, prepared: Prepared, kernel: Kernel) -> None:
    """Fill ``out``, after all that comes before the kernel."""
    if operands.a.stride(1) != 1:
        operands = operands._replace(a=operands.a.contiguous())
    _, ids, expert_map = operands.tiles
    if prepared.quant is not None:
        rows, scale = moe_quantize(
            operands.a, operands.a_scale, None, ids, expert_map, operands.num_experts,
            prepared.quant.key,
        )  # fmt: skip
        operands = operands._replace(a=rows, a_scale=scale)
    if prepared.sorts_by is not None:
        plan = sorted_slots(ids, expert_map, operands.num_experts, prepared.sorts_by)
        operands = operands._replace(tiles=(plan, ids, expert_map))
    kernel(out, operands)


def launcher(family: Family) -> Callable[..., Kernel]:
    """What makes a kernel of a problem and a plan: imported when a plan first asks for it."""
    return resolve_name(f"moe_ops.kernels.{family.launcher}")


@lru_cache(maxsize=8192)
def _prepared(
    result: Prepared,
    problem: GemmProblem,
    device: Device,
    config: KernelTiles | None,
    tables: tuned.Tables,
    *,
    in_waves: bool,
) -> Prepared:
    """The kernel of a problem, and the steps before it."""
    if problem.sizes.num_slots == 0:
        return result
    plan, sizes = plan_gemm(problem, device, config=config), problem.sizes
    before = problem.rows != STORED and not plan.quantizes_rows
    family, quant = BY_NAME[plan.kernel], problem.quant if before else None
    sorts = family.sorts and own_plan(sizes, plan.config)
    if sorts:
        sizes = with_own_plan(sizes, plan.config)
    apart = problem.summed and not family.sums
    kernel = launcher(family)(without_sum(problem) if apart else problem, plan)
    if in_waves:
        kernel = InWaves(kernel, sizes.row_tile)
    if apart:
        kernel = SumAfter(kernel)
    return result._replace(
        kernel=kernel,
        quant=quant,
        sorts_by=sizes.rule if sorts else None,
        keeps_product=not apart and family.keeps_product(problem),
    )


class InWaves:
    """A GEMM kernel that runs in each wave of a weight in host memory, into the same rows."""

    def __init__(self, gemm: Kernel, row_tile: int) -> None:
        self.gemm, self.row_tile = gemm, row_tile

    def __call__(self, out: Tensor, operands: GemmOperands) -> None:
        """Launch the kernel for each wave."""
        for wave in waves(operands, self.row_tile):
            self.gemm(out, wave)


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
