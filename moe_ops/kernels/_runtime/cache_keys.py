"""Triton cache keys that do not depend on which kernel is used first, nor miss what kernels read.

Triton finds a compiled kernel on disk by its `cache_key`, a hash of its source, of the functions it
calls and of the global constants that all of them use. Triton 3.6 merges the constants of a called
function before it computes that function's own key, so the constants are missing if the called
function had no key yet. A kernel's key then depends on which kernels were used before it, and the
next process compiles again what is on disk. If the keys of called functions are computed first,
the constants are always included (Triton 3.9 does this itself).

Constant arguments are in the key as text. The text of a dataclass has its fields alone, so
`KeyedConstants` adds the properties and class attributes that kernels read.
"""

from __future__ import annotations

import ast
from functools import cached_property
from threading import RLock
from types import ModuleType
from typing import Any

from triton.runtime.jit import JITCallable, JITFunction


class KeyedConstants:
    """Base of a dataclass that is a constant of kernels.

    Without it, a version of this library in which a property has another formula would find the
    kernels that an older one compiled.
    """

    @cached_property
    def cache_key(self) -> str:
        """Fields, class attributes in capitals, and values of properties; Triton asks for it."""
        members = [item for kind in type(self).__mro__ for item in vars(kind).items()]
        read = [name for name, to in members if name.isupper() or isinstance(to, property)]
        return f"{self} {[(name, getattr(self, name)) for name in read]}"


_DONE: set[int] = set()
"""Ids of functions that have their final key, or will have it when the running call returns.

Ids and not functions, because hashing a function computes its key.
"""
_LOCK = RLock()


def compute_cache_key(kernel: JITFunction) -> None:
    """Compute a kernel's key after the keys of all functions that it calls, directly or not.

    Must run before anything else asks for the key, ``hash(kernel)`` included.
    """
    with _LOCK:
        if id(kernel) in _DONE:
            return
        _DONE.add(id(kernel))
        for called in _called(kernel):
            compute_cache_key(called)
        kernel.cache_key  # noqa: B018 (a property that caches its result)


def _called(kernel: JITFunction) -> list[JITFunction]:
    """Triton functions that a kernel's source names (also as ``module.name``), and methods."""
    scope = kernel.fn.__globals__

    def value(node: ast.AST) -> Any:
        if isinstance(node, ast.Name):
            return scope.get(node.id)
        owner = value(node.value) if isinstance(node, ast.Attribute) else None
        return getattr(owner, node.attr, None) if isinstance(owner, ModuleType) else None

    named = [value(node) for node in ast.walk(kernel.parse())]
    methods = [m for v in named for m in getattr(v, "hash_attrs", ())]
    return [function for function in named + methods if isinstance(function, JITCallable)]
