"""What the plug-ins of serving engines share: log lines, look-ups, shapes of scales."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import cache
from importlib import import_module
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from moe_ops.scheme import Scheme


@cache
def say_once(engine: str, text: str, level: int = logging.INFO) -> None:
    """Write a line to an engine's log, once per process.

    The logger is below the engine's own, which has handlers; the root logger may have none.
    """
    logging.getLogger(f"{engine}.moe_ops").log(level, "moe_ops: %s", text)


def say_that_it_serves(engine: str, scheme: Scheme, activation: str) -> None:
    """Write to an engine's log which experts of this library run, once per kind of layer."""
    if not torch.compiler.is_compiling():
        say_once(engine, f"runs the experts: {scheme.name}, {activation}")


def or_say(engine: str, instead: str, register: Callable[[], str | None]) -> None:
    """Call a plug-in's registration; whatever it raises is one line of the engine's log.

    Everything but an interrupt is caught: an engine ends if a plug-in raises, and panics of
    compiled extensions are no `Exception`.

    Args:
        engine: name of the engine's package.
        instead: what the engine does without the plug-in.
        register: returns why nothing was registered, or None.
    """
    try:
        reason = register()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
    if reason:
        say_once(engine, f"{instead}: {reason}")


def attribute_of(module: str, name: str) -> Any:
    """Return what a module calls ``name``, which may have dots, or None if it has no such name."""
    try:
        value: Any = import_module(module)
        for part in name.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError):
        return None
    return value


def split_name(name: str) -> tuple[str, str]:
    """Return the module of a dotted name and the rest, which begins at the first capital letter."""
    parts = name.split(".")
    classes = [i for i, part in enumerate(parts) if part[0].isupper()]
    end = classes[0] if classes else len(parts) - 1
    return ".".join(parts[:end]), ".".join(parts[end:])


def first_missing(
    names: dict[str, tuple[str, ...]], forms: dict[tuple[str, str], tuple[str, ...]]
) -> str | None:
    """Return the first name that an engine lacks, or whose parts are others; None: no such name.

    Args:
        names: names by module.
        forms: parts by module and name: fields of a class, or parameters of a function.
    """
    for module, needed in names.items():
        for name in needed:
            if attribute_of(module, name) is None:
                return f"{module}.{name}"
    for (module, name), parts in forms.items():
        value = attribute_of(module, name)
        if value is None or _part_names(value) != parts:
            return f"{module}.{name}"
    return None


def _part_names(value: Any) -> tuple[str, ...]:
    """Names of a dataclass's fields, of a NamedTuple's, or of a function's parameters."""
    if is_dataclass(value):
        return tuple(field.name for field in fields(value))
    return tuple(getattr(value, "_fields", ())) or tuple(signature(value).parameters)


def weight_scales(scale: Tensor, num_local_experts: int, scheme: Scheme) -> Tensor:
    """Return scales of a weight, as engines keep them, in the shape that a scheme takes.

    The memory is the engine's. Engines keep one scale per expert as ``(El,)`` or ``(El, 1)``, of
    gate and up as ``(El, 2)``, and scales per row as ``(El, N)`` or ``(El, N, 1)``. Scales of
    blocks and groups stay as they are.
    """
    quant = scheme.weight
    if quant is None or not (quant.per_tensor or quant.per_row):
        return scale
    rows = scale.reshape(num_local_experts, -1)
    if quant.per_tensor:
        return rows.squeeze(1)
    return rows if quant.scale == "vector" else rows[..., None]


def block_name(element: str, shape: tuple[int, ...]) -> str:
    """Return the name of the scheme with square or oblong blocks of an element."""
    rows, cols = shape
    return f"{element}_block{rows}" if rows == cols else f"{element}_block{rows}x{cols}"
