"""Shared memory of the Hopper kernels, for each release of Gluon."""

from typing import Any

from triton.experimental.gluon import language as gl
from triton.language.core import builtin

METHOD = "reinterpret" if hasattr(gl.shared_memory_descriptor, "reinterpret") else "_reinterpret"
"""Gluon's name for `reinterpret`: public from Triton 3.9 on."""


@builtin
def reinterpret(memory: Any, dtype: Any, shape: Any, layout: Any, _semantic: Any = None) -> Any:
    """Shared memory seen with another dtype, shape or layout."""
    return getattr(memory, METHOD)(dtype, shape, layout, _semantic=_semantic)
