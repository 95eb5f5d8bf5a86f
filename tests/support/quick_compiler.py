"""Triton's code generator, quicker: the same code in less time.

A kernel's Python becomes IR node by node, and questions whose answers repeat take half of that
time. What stands here answers each of them once, and changes no answer. All of it is for Triton 3.6
to 3.8; 3.9 asks fewer of these questions, and the rest costs nothing there.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from triton.compiler import code_generator
from triton.runtime.jit import JITCallable


def _instead_of(module: Any, **changed: Any) -> SimpleNamespace:
    """A module in which some names are other values."""
    return SimpleNamespace(**{**vars(module), **changed})


def _patch_warnings() -> None:
    """Leave the filters of warnings as they are: Triton sets two at every node, until 3.8."""
    nothing = nullcontext()
    code_generator.warnings = _instead_of(
        warnings, catch_warnings=lambda: nothing, simplefilter=lambda *args: None
    )


def _patch_signatures() -> None:
    """Look at the arguments of a function, or of a method, once."""
    signature = functools.cache(inspect.signature)

    def names(fn: Callable) -> inspect.Signature:
        return signature(getattr(fn, "__func__", fn))

    code_generator.inspect = _instead_of(inspect, signature=names)


def _patch_parsing() -> None:
    """Parse a source text once: a tree is read, and what is noted in it is the same each time."""
    parse, trees = JITCallable.parse, {}

    def parse_once(self):
        if self.src not in trees:
            trees[self.src] = parse(self)
        return trees[self.src]

    JITCallable.parse = parse_once


def _patch_scopes() -> None:
    """Look for names in the globals themselves, and map them once for each kernel."""
    generator = code_generator.CodeGenerator
    scope_of, init, to_ttir = (
        JITCallable.get_capture_scope, generator.__init__, code_generator.ast_to_ttir
    )  # fmt: skip
    mapped: dict[int, dict[str, Any]] = {}

    def get_capture_scope(self):
        return scope_of(self) if self.fn.__closure__ else self.__globals__

    def init_once(self, context, prototype, gscope, *args, **kwargs):
        known = mapped.get(id(gscope))
        init(self, context, prototype, {} if known else gscope, *args, **kwargs)
        self.gscope = mapped.setdefault(id(gscope), known or self.gscope)

    @functools.wraps(to_ttir)
    def ast_to_ttir(*args, **kwargs):
        mapped.clear()
        return to_ttir(*args, **kwargs)

    JITCallable.get_capture_scope = get_capture_scope
    generator.__init__ = init_once
    code_generator.ast_to_ttir = ast_to_ttir


def install() -> None:
    """Patch the code generator of this process."""
    _patch_warnings()
    _patch_signatures()
    _patch_parsing()
    _patch_scopes()
