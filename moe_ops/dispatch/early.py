"""The promise with which a caller of both expert GEMMs lets the second one read early.

With one token the kernel of the second GEMM may read the ids, the expert map, and the weight with
its scales and zero points before the first GEMM ends: see `moe_ops.kernels._runtime.dependent`.
Only the caller knows that all of these were written before it called the first GEMM. An argument
of the operator would stay in graphs that are traced, where a compiler may run other kernels between
the two.
"""

from __future__ import annotations

from contextvars import ContextVar

EARLY: ContextVar[bool] = ContextVar("early", default=False)
"""Whether the operator that is being called has this promise."""
