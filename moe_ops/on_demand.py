"""Modules that are imported when they are needed: by a name (PEP 562), or by another package."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def on_demand(
    package: str, later: Mapping[str, str], unlisted: Mapping[str, Iterable[str]] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The ``__getattr__`` and ``__dir__`` of a package.

    Args:
        package: its name.
        later: by name, the module below the package that has it. Such modules are found, too.
        unlisted: by such a module, more names, which ``dir`` does not list.
    """
    modules = {module.partition(".")[0] for module in later.values()}
    places = {name: module for module, names in (unlisted or {}).items() for name in names}
    places.update(later)

    def find(name: str) -> Any:
        if name in modules:
            return import_module(f"{package}.{name}")
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"{package}.{places[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *later})

    return find, names


def import_after(other: str, module: str) -> None:
    """Import ``module`` as soon as ``other``, a module of another package, has been imported.

    That is at once if ``other`` has been imported before, and never if it never is. If ``module``
    cannot be imported, the log says why, and ``other`` stays as it is.
    """
    if other in sys.modules:
        _import_or_say(module)
    else:
        sys.meta_path.insert(0, _After(other, module))


class _After(MetaPathFinder):
    """Finds ``other`` as the finders behind it do, and imports ``module`` once it has run."""

    def __init__(self, other: str, module: str) -> None:
        self.other, self.module = other, module

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of ``other``, whose loader then also imports ``module``."""
        if fullname != self.other:
            return None
        behind = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(fullname, path, target) for finder in behind)
        spec = next(filter(None, specs), None)
        if spec is not None and spec.loader is not None:
            self._follow(spec.loader)
        return spec

    def _follow(self, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module  # the class's own is left
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                _import_or_say(self.module)

        loader.exec_module = exec_module


def _import_or_say(module: str) -> None:
    try:
        import_module(module)
    except Exception as error:  # whatever it is, the other package must still be imported
        logging.getLogger("moe_ops").warning("%s is not in use: %s", module, error)
