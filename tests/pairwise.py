"""Few combinations of many factors, such that any two values that go together do so in one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Rules = Sequence[tuple[tuple[str, ...], Callable[..., bool]]]
"""Names of factors, and whether their values go together."""


def allowed(row: Mapping[str, Any], rules: Rules) -> bool:
    """Whether a row, which may still lack factors, breaks no rule."""
    return all(
        rule(*(row[n] for n in names)) for names, rule in rules if all(n in row for n in names)
    )


def every(factors: Mapping[str, Sequence[Any]], rules: Rules) -> Iterator[dict[str, Any]]:
    """The full product, as far as rules allow."""
    for values in product(*factors.values()):
        row = dict(zip(factors, values, strict=True))
        if allowed(row, rules):
            yield row


def cover(
    factors: Mapping[str, Sequence[Any]], rules: Rules, strength: int = 2
) -> list[dict[str, Any]]:
    """Rows in which every ``strength`` values of different factors meet, if rules let them.

    Greedy and deterministic: each row starts with a group that has not met, and takes for every
    other factor the value that brings most groups together.
    """
    left = {
        frozenset(group.items()): None
        for names in combinations(factors, strength)
        for group in every({n: factors[n] for n in names}, rules)
    }
    rows: list[dict[str, Any]] = []
    while left:
        start = next(iter(left))
        row = _completed(dict(start), factors, rules, left)
        met = [start, *_groups(row, row, strength)] if row else [start]
        rows += [row] if row else []
        for group in met:
            left.pop(group, None)
    return rows


def _completed(
    row: dict[str, Any], factors: Mapping[str, Sequence[Any]], rules: Rules, left: Mapping
) -> dict[str, Any] | None:
    """``row`` with the other factors; None where rules leave no value (the group cannot meet)."""
    strength = len(next(iter(left)))
    for turn, (name, values) in enumerate(factors.items()):
        if name in row:
            continue
        best, most = None, -1
        shift = (turn + len(left)) % len(values)  # ties go round
        for value in (*values[shift:], *values[:shift]):
            longer = {**row, name: value}
            if not allowed(longer, rules):
                continue
            new = sum(group in left for group in _groups(longer, (name,), strength))
            if new > most:
                best, most = longer, new
        if best is None:
            return None
        row = best
    return row


def _groups(row: Mapping[str, Any], around: Iterable[str], strength: int) -> list[frozenset]:
    """The groups of a row that hold one of the factors ``around``."""
    chosen = set(around)
    return [
        frozenset((n, row[n]) for n in names)
        for names in combinations(row, strength)
        if chosen.intersection(names)
    ]
