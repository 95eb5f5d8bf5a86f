"""Scratch memory of operator calls: what they allocate on a GPU and free before they return."""

from __future__ import annotations

from typing import Any

from moe_ops.dispatch.device import Device
from moe_ops.dispatch.gemm_plan import plan_gemm
from moe_ops.dispatch.operands import GEMMS, operands_of
from moe_ops.dispatch.problem import GemmProblem, problem_of


def scratch_sizes(func: Any, operands: tuple[Any, ...], device: Device) -> tuple[int, ...]:
    """Bytes of each tensor that an operator allocates besides its result; empty for most operators.

    Args:
        func: any operator.
        operands: its positional arguments.
        device: the GPU on which it would run.
    """
    problem = problem_of_call(func, operands)
    if problem is None or problem.sizes.num_slots == 0:
        return ()
    return tuple(buffer.nbytes for buffer in plan_gemm(problem, device).scratch)


def problem_of_call(func: Any, operands: tuple[Any, ...]) -> GemmProblem | None:
    """The problem that an operator's launcher plans; None if the operator is not an expert GEMM.

    Args:
        func: any operator.
        operands: its positional arguments.
    """
    namespace, _, name = func.name().partition("::")
    if namespace != "moe_ops" or name not in GEMMS:
        return None
    named = dict(zip((x.name for x in func._schema.arguments), operands, strict=False))
    return problem_of(operands_of(name, named))
