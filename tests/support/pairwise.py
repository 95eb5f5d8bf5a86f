"""Pairwise testing: few combinations of many factors that contain every allowed pair of values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest

Rules = Sequence[tuple[tuple[str, ...], Callable[..., bool]]]
"""Names of factors, and a predicate that says whether their values go together."""


def allowed(row: Mapping[str, Any], rules: Rules) -> bool:
    """Whether a row, which may be incomplete, satisfies all rules."""
    return all(
        rule(*(row[n] for n in names)) for names, rule in rules if all(n in row for n in names)
    )


def every(factors: Mapping[str, Sequence[Any]], rules: Rules) -> Iterator[dict[str, Any]]:
    """All rows of the full product that the rules allow."""
    for values in product(*factors.values()):
        row = dict(zip(factors, values, strict=True))
        if allowed(row, rules):
            yield row


def cover(
    factors: Mapping[str, Sequence[Any]], rules: Rules, strength: int = 2
) -> list[dict[str, Any]]:
    """Rows that contain every allowed group of ``strength`` values of different factors.

    Greedy and deterministic: each row starts with a group that is not covered yet, and takes for
    every other factor the value that covers the most new groups.
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


def half_exhaustive(*factors: Iterable[Any], where: bool = True) -> list[Any]:
    """Parameters of a test: the full product, of which `make test` runs every other combination.

    Two of three or more factors meet in all their values. Unless ``where``, everything runs.
    """
    rows = product(*(enumerate(values) for values in factors))
    return [
        pytest.param(
            *(value for _, value in row),
            marks=[pytest.mark.exhaustive] * (where and sum(i for i, _ in row) % 2),
        )
        for row in rows
    ]


def _completed(
    row: dict[str, Any], factors: Mapping[str, Sequence[Any]], rules: Rules, left: Mapping
) -> dict[str, Any] | None:
    """``row`` completed with the other factors; None if the rules leave no value for a factor."""
    strength = len(next(iter(left)))
    for turn, (name, values) in enumerate(factors.items()):
        if name in row:
            continue
        best, most = None, -1
        about = [rule for rule in rules if name in rule[0]]  # the row satisfies the others
        shift = (turn + len(left)) % len(values)  # rotate which value wins ties
        for value in (*values[shift:], *values[:shift]):
            longer = {**row, name: value}
            if not allowed(longer, about):
                continue
            new = sum(group in left for group in _groups(longer, (name,), strength))
            if new > most:
                best, most = longer, new
        if best is None:
            return None
        row = best
    return row


def _groups(row: Mapping[str, Any], around: Iterable[str], strength: int) -> list[frozenset]:
    """The groups of a row that contain one of the factors ``around``."""
    chosen = set(around)
    return [
        frozenset((n, row[n]) for n in names)
        for names in combinations(row, strength)
        if chosen.intersection(names)
    ]
