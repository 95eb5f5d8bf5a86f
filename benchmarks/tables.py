"""What the reports share: names, numbers of tokens, a record's source, and Markdown tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import truediv
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results")
"""Folder of the records."""
OURS = "moe_ops"
TOKENS = (1, 8, 64, 512, 4096, 16384)
Record = dict[str, Any]


def is_ours(impl: str) -> bool:
    """Whether an implementation's name is one of this library's."""
    return impl.startswith(OURS)


def source(record: Record) -> str:
    """A sentence with the GPU, the versions, the commits and the date of a record."""
    # A record may have rows of several runs, and each row names its commit.
    rows = record["rows"]
    commits = sorted({_short(row.get("commit", record["commit"])) for row in rows})
    return (
        f"{record['gpu']}, driver {record['driver']}, torch {record['torch']}, Triton"
        f" {record['triton']}; commit{'s' * (len(commits) > 1)} {', '.join(commits)};"
        f" {record['date'][:10]}."
    )


def _short(commit: str) -> str:
    name, dash, dirty = commit.partition("-")
    return f"{name[:7]}{dash}{dirty}"


def cell(
    value: float | None,
    ours: float | None,
    text: Callable[[float], str],
    ratio: Callable[[float, float], float] = truediv,
) -> str:
    """A number, and in brackets a ratio; a dash for what was not measured.

    Args:
        value: the number.
        ours: this library's number, for the ratio; None: there is none, or ``value`` is it.
        text: how a number is written.
        ratio: of ``ours`` and ``value``.
    """
    if value is None:
        return "-"
    return text(value) if ours is None else f"{text(value)} ({ratio(ours, value):.2f})"


def beside_ours(
    numbers: Mapping[tuple[Any, ...], float | None],
    impl: str,
    places: Sequence[tuple[Any, ...]],
    text: Callable[[float], str],
    ratio: Callable[[float, float], float] = truediv,
) -> list[str]:
    """The `cell` of each place of an implementation's line.

    Args:
        numbers: by implementation and place, ``(impl, *place)``.
        impl: the implementation.
        places: the columns.
        text: as for `cell`.
        ratio: of `OURS` and ``impl``, in the lines of other implementations.
    """
    ours = {} if impl == OURS else numbers
    return [
        cell(numbers.get((impl, *place)), ours.get((OURS, *place)), text, ratio) for place in places
    ]


def markdown(head: list[str], lines: list[list[str]], labels: int, once: int = 0) -> str:
    """A Markdown table.

    Args:
        head: names of the columns.
        lines: the cells of each line.
        labels: how many columns are texts; those behind them are numbers.
        once: how many columns stay empty in a line that has them as the line before.
    """
    rule = ["---"] * labels + ["--:"] * (len(head) - labels)
    shown = [
        [""] * once + line[once:] if line[:once] == before[:once] else line
        for before, line in zip([head, *lines], lines, strict=False)
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, rule, *shown])
