"""The experts modules of a model that a function changes in place: finding and choosing them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from importlib import import_module
from typing import Any, Protocol, TypeVar

from torch import nn

from moe_ops import checks

try:
    from tqdm import tqdm
except ImportError:  # the progress bar is optional
    tqdm = None

Modules = str | Iterable[str] | Callable[[str, nn.Module], bool]
"""A name as in ``named_modules``, a pattern of `fnmatch`, several, or a function of both."""
SHOWN = 4
"""Number of names that an error quotes."""


class Named(Protocol):
    """A module with experts, and its name in the model."""

    @property
    def name(self) -> str:
        """The path of the module, as in ``named_modules``."""

    @property
    def module(self) -> Any:
        """The module."""


TargetT = TypeVar("TargetT", bound=Named)


def found_in(
    model: nn.Module, finders: list[Callable[[nn.Module], Iterator[TargetT]]]
) -> Iterator[TargetT]:
    """Yield what ``finders`` find in a model, in the order of ``named_modules``.

    Classes of transformers are known to `moe_ops.integrations.transformers`, which is imported for
    a model that has some: transformers has been imported by then.
    """
    if any(_is_of_transformers(module) for module in model.modules()):
        import_module("moe_ops.integrations.transformers")
    targets = {target.name: target for finder in finders for target in finder(model)}
    for name, _ in model.named_modules():
        parts = name.split(".")
        outer = (".".join(parts[:i]) for i in range(len(parts)))
        if name in targets and (not name or not any(path in targets for path in outer)):
            yield targets[name]


def _is_of_transformers(module: nn.Module) -> bool:
    """Whether a class is from transformers, or decorated by its ``use_experts_implementation``."""
    decorated = all(hasattr(module, name) for name in ("has_gate", "has_bias", "is_transposed"))
    return decorated or any(c.__module__.startswith("transformers.") for c in type(module).__mro__)


def targets_chosen(targets: list[TargetT], modules: Modules | None) -> list[TargetT]:
    """Return the targets that ``modules`` means, at least one."""
    names = ", ".join(target.name for target in targets[:SHOWN])
    if not targets:
        raise ValueError("model must have experts that moe_ops runs (see check), got none")
    if modules is None:
        return targets
    if callable(modules):
        chosen = [target for target in targets if modules(target.name, target.module)]
    else:
        checks.instance("modules", modules, Iterable)
        patterns = [modules] if isinstance(modules, str) else list(modules)
        for pattern in patterns:
            checks.instance("modules", pattern, str)
            if not any(fnmatchcase(target.name, pattern) for target in targets):
                raise ValueError(
                    f"modules must fit names of experts modules ({names}, ...), got {pattern!r}"
                )
        chosen = [t for t in targets if any(fnmatchcase(t.name, pattern) for pattern in patterns)]
    if not chosen:
        raise ValueError(f"modules must choose some experts modules ({names}, ...), got none")
    return chosen


def with_progress(items: Iterable[Any], text: str, *, progress: bool) -> Any:
    """Return the items, with a progress bar around them if that is wanted and possible."""
    if not progress or tqdm is None:
        return items
    return tqdm(items, desc=text, unit="layer", leave=False)
