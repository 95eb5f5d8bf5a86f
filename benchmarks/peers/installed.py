"""What of other packages is installed here, and what of them is called."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any


def package(name: str) -> str | None:
    """What is missing if a package is not installed."""
    return None if find_spec(name) else f"the package {name}"


def reason(load: Callable[[], Any]) -> str | None:
    """The first line of the error with which ``load`` fails; None if it does not."""
    try:
        load()
    except Exception as error:  # packages of kernels fail with errors of any kind
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    return None


@cache
def lacks(name: str, *modules: str) -> str | None:
    """What is missing of a package, or of what its modules import."""
    return package(name) or reason(lambda: [import_module(module) for module in modules])


def named(path: str) -> Any:
    """A name of a module: ``package.module.name``."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)
