"""Copies to shared memory and barriers, under the names that each release of Gluon has for them."""

from typing import Any

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language.core import builtin

METHOD = "reinterpret" if hasattr(gl.shared_memory_descriptor, "reinterpret") else "_reinterpret"
"""Gluon's name for `reinterpret`: public from Triton 3.9 on."""
load_box = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
"""Copy a TMA box: ``async_load`` from Triton 3.9 on, ``async_copy_global_to_shared`` before."""
load_rows = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
"""Copy from pointers (cp.async), under the same names as `load_box`."""
wait_for_group = getattr(gl, "barrier", None) or gl.thread_barrier
"""A barrier of a partition: ``gl.barrier`` from Triton 3.7 on, ``gl.thread_barrier`` before."""


@builtin
def reinterpret(memory: Any, dtype: Any, shape: Any, layout: Any, _semantic: Any = None) -> Any:
    """Shared memory seen with another dtype, shape or layout."""
    return getattr(memory, METHOD)(dtype, shape, layout, _semantic=_semantic)
