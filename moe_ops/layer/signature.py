"""What type checkers and ``help`` say of the arguments of a layer."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Concatenate, ParamSpec, TypeVar

from moe_ops.layer.options import FORMER, FusedMoEOptions


@dataclass(frozen=True, eq=False, repr=False)
class LayerArguments(FusedMoEOptions):
    """The arguments of a layer, for type checkers."""

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int


P = ParamSpec("P")
Layer = TypeVar("Layer", bound=type)


def typed_as(arguments: Callable[P, Any]) -> Callable[[Any], Callable[Concatenate[Any, P], None]]:
    """Tell type checkers that an ``__init__`` takes what ``arguments`` takes."""
    return lambda init: init


def takes_options(cls: Layer) -> Layer:
    """Give a class whose ``__init__`` ends with ``**options`` a signature with every option.

    The former name of ``scheme`` is among them.
    """
    own = list(inspect.signature(cls.__init__).parameters.values())[1:-1]  # type: ignore[misc]
    keywords = [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default)
        for f in fields(FusedMoEOptions)
    ]
    keywords.append(inspect.Parameter(FORMER, inspect.Parameter.KEYWORD_ONLY, default=None))
    cls.__signature__ = inspect.Signature([*own, *keywords])  # type: ignore[attr-defined]
    return cls
