"""Names of a package whose modules are imported when the names are first used (PEP 562)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any
from warnings import warn


def on_demand(
    package: str, later: Mapping[str, str], moved: Mapping[str, Iterable[str]] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The ``__getattr__`` and ``__dir__`` of a package.

    Args:
        package: its name.
        later: by name, the module below the package that has it. Such modules are found, too.
        moved: by module below the package, names that the package itself used to have. They are
            found, with a DeprecationWarning that says where they are.
    """
    modules = {module.partition(".")[0] for module in later.values()}
    old = {name: module for module, names in (moved or {}).items() for name in names}

    def find(name: str) -> Any:
        if name in old:
            place = f"{package}.{old[name]}"
            warn(f"{package}.{name} is now {place}.{name}", DeprecationWarning, stacklevel=2)
            return getattr(import_module(place), name)
        if name in modules:
            return import_module(f"{package}.{name}")
        if name not in later:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"{package}.{later[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *later})

    return find, names
