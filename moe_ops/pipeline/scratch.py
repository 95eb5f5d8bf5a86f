"""Scratch memory of operator calls: what they allocate on a GPU and free before they return."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moe_ops.dispatch.device import Device
from moe_ops.dispatch.gemm_plan import plan_gemm
from moe_ops.dispatch.problem import (
    GemmProblem,
    dense_problem,
    scaled_problem,
    stored_problem,
    sum_problem,
)


def scratch_sizes(func: Any, given: tuple[Any, ...], out: Any, device: Device) -> tuple[int, ...]:
    """Bytes of each tensor that an operator allocates besides ``out``; empty for most operators.

    Args:
        func: any operator.
        given: its positional arguments.
        out: its result.
        device: the GPU on which it would run.
    """
    problem = problem_of_call(func, given, out)
    if problem is None or problem.sizes.num_slots == 0:
        return ()
    return tuple(buffer.nbytes for buffer in plan_gemm(problem, device).scratch)


def problem_of_call(func: Any, given: tuple[Any, ...], out: Any) -> GemmProblem | None:
    """The problem that an operator's launcher plans; None if the operator is not an expert GEMM.

    Args:
        func: any operator.
        given: its positional arguments.
        out: its result.
    """
    namespace, _, name = func._schema.name.partition("::")
    if namespace != "moe_ops" or name not in _PROBLEMS:
        return None
    names = (argument.name for argument in func._schema.arguments)
    return _PROBLEMS[name](dict(zip(names, given, strict=False)), out)


def _dense(given: dict[str, Any], out: Tensor) -> GemmProblem:
    return dense_problem(
        given["a"], given["w"], given["tiles"], given.get("top_k", 1),
        given.get("activation", ""), weighted=given["topk_weights"] is not None,
        expert_order=given.get("expert_order", False),
        batch_invariant=given.get("batch_invariant", False),
    )  # fmt: skip


def _scaled(given: dict[str, Any], out: Tensor) -> GemmProblem:
    return scaled_problem(
        given["a"], given["a_scale"], given["w"], given["w_scale"], given["tiles"],
        given.get("top_k", 1), given["scheme"], given.get("activation", ""),
        out_dtype=out.dtype, batch_invariant=given.get("batch_invariant", False),
    )  # fmt: skip


def _stored(given: dict[str, Any], out: Tensor) -> GemmProblem:
    return stored_problem(
        given["a"], given["w"], given["tiles"], given.get("top_k", 1), given["scheme"],
        given.get("activation", ""), w_scale=given["w_scale"],
        batch_invariant=given.get("batch_invariant", False),
    )  # fmt: skip


def _summed(given: dict[str, Any], out: Tensor) -> GemmProblem:
    gemm = (_dense if given["w_scale"] is None else _scaled)(given, out)
    return sum_problem(gemm, given["topk_weights"] is not None, out.element_size())


def _stored_sum(given: dict[str, Any], out: Tensor) -> GemmProblem:
    weighted = given["topk_weights"] is not None
    return sum_problem(_stored(given, out), weighted, out.element_size())


_PROBLEMS = {
    "expert_matmul": _dense,
    "scaled_matmul": _scaled,
    "weight_only_matmul": _stored,
    "gemm_sum": _summed,
    "weight_only_sum": _stored_sum,
}
"""Problem builders by operator."""
