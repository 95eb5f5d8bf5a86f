"""The plan of an expert GEMM as a value, and the buffers that it names."""

from __future__ import annotations

from typing import NamedTuple

from moe_ops.dispatch.hopper import KernelTiles
from moe_ops.dispatch.problem import STORED, GemmProblem

DEFAULT = "analytic default"
"""The source of tiles that follow from sizes and the GPU."""


class BufferSpec(NamedTuple):
    """Scratch memory that an operator frees again before it returns."""

    name: str
    nbytes: int


class GemmPlan(NamedTuple):
    """How an expert GEMM is computed."""

    kernel: str
    """Name of the family of kernels: see `moe_ops.dispatch.families`."""
    config: KernelTiles
    quantizes_rows: bool
    """Whether the kernel, or the pass that gathers its rows, quantizes rows that are not stored."""
    gathered_rows: int
    """Rows allocated for gathering in the order of the plan; 0: rows are not gathered."""
    scratch: tuple[BufferSpec, ...]
    source: str
    """Where the tiles come from and, if a tuned file exists but is not used, why not."""


def quantized_rows(problem: GemmProblem) -> tuple[BufferSpec, ...]:
    """Buffers for rows that the operator quantizes before the GEMM; empty for stored rows."""
    if problem.rows == STORED:
        return ()
    return rows_of(problem, problem.sizes.num_slots // problem.top_k, "quantized rows")


def rows_of(problem: GemmProblem, rows: int, name: str) -> tuple[BufferSpec, ...]:
    """Buffers for rows in the form that the kernel multiplies, and for their scales."""
    quant, k = problem.quant, problem.sizes.k
    if quant is None:
        return (BufferSpec(name, rows * k * problem.sizes.itemsize),)
    groups = 1 if problem.shared_scale else quant.row_scale_shape(1, k)[-1]
    scales = BufferSpec(f"scales of {name}", rows * groups * 4)
    return BufferSpec(name, rows * k * quant.dtype.itemsize), scales
