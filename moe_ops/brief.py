"""How values with many fields print, on one screen; and how tables do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import MISSING, Field, fields
from typing import Any

from torch import Tensor


def brief(value: Any) -> str:
    """The ``repr`` of a dataclass with the fields that differ from their defaults.

    A tensor prints as its dtype and shape.
    """
    shown = []
    for field in fields(value):
        content, default = getattr(value, field.name), _default(field)
        same = content is default or (type(content) is type(default) and content == default)
        if field.repr and (default is MISSING or not same):
            shown.append(f"{field.name}={described(content)}")
    return f"{type(value).__name__}({', '.join(shown)})"


def _default(field: Field[Any]) -> Any:
    make = field.default_factory
    return field.default if make is MISSING else make()


def described(content: Any) -> str:
    """A tensor as its dtype and shape, anything else as it prints."""
    if isinstance(content, Tensor):
        return f"<{str(content.dtype).removeprefix('torch.')} {tuple(content.shape)}>"
    return repr(content)


def aligned(
    lines: Iterable[Sequence[str]], left: int = 0, widths: Sequence[int] | None = None
) -> str:
    """Lines of cells as a table: the first ``left`` columns to the left, the others to the right.

    Args:
        lines: cells as text; every line has the same number.
        left: columns of text.
        widths: widths of the columns; None: as wide as their longest cells.
    """
    lines = list(lines)
    columns = zip(*lines, strict=True)
    widths = [max(map(len, column)) for column in columns] if widths is None else widths
    return "\n".join(
        "  ".join(
            cell.ljust(width) if place < left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def byte_count(number: int | None) -> str:
    """A number of bytes with four digits and its unit; None: "-"."""
    if number is None:
        return "-"
    size, units = float(number), ["B", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.4g} {units[0]}"
