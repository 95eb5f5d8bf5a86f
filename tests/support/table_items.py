"""Tables of cases in one item of pytest: every row runs, and all rows that fail are named.

An item costs pytest and its workers more than most calls that must raise an error take. So a table
of such calls is one item: `every_row` stands where ``pytest.mark.parametrize`` would.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from legs import HAS_CUDA

OUTCOMES = (pytest.fail.Exception, pytest.skip.Exception)
"""What a row may raise besides errors; a row that is skipped fails, for nobody would see it."""
LONGEST = 60
"""Characters that a report shows of a value."""


def shown(value: Any) -> str:
    """A value in a report: its name, or the beginning of its repr in one line."""
    text = " ".join(str(getattr(value, "__name__", None) or repr(value)).split())
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def every_row(names: str | Sequence[str], rows: Iterable[Any]) -> Callable[[Any], Any]:
    """Decorator of a test: call it with the values of each row, and fail with all rows that failed.

    Two decorators make the product of their rows. Fixtures are made once for all rows: a test that
    changes one of them has to be an item a row.

    Args:
        names: of the arguments, as a sequence; or the name of the only one.
        rows: the values of these arguments; of one name, its values.

    Raises:
        ValueError: there is no row.
    """
    single = isinstance(names, str)
    named = (names,) if single else tuple(names)
    table = [dict(zip(named, (row,) if single else row, strict=True)) for row in rows]
    if not table:
        raise ValueError(f"rows of {', '.join(named)} must not be empty")

    def decorate(test: Any) -> Any:
        @functools.wraps(test)
        def of_all_rows(**fixtures: Any) -> None:
            failed = []
            for row in table:
                try:
                    test(**fixtures, **row)
                except (Exception, *OUTCOMES) as error:
                    where = ", ".join(f"{name} = {shown(value)}" for name, value in row.items())
                    failed.append(f"{where}: {type(error).__name__}: {error}")
            if failed:
                count = f"{len(failed)} of {len(table)} rows failed"
                pytest.fail("\n\n".join([count, *failed]), pytrace=False)

        inside = inspect.signature(test)
        left = [p for name, p in inside.parameters.items() if name not in named]
        of_all_rows.__signature__ = inside.replace(parameters=left)  # type: ignore[attr-defined]
        return of_all_rows

    return decorate


def an_item_a_kernel(names: str | Sequence[str], rows: Iterable[Any]) -> Callable[[Any], Any]:
    """`every_row`, but an item a row on a GPU, where workers share the kernels to compile."""
    return pytest.mark.parametrize(names, [*rows]) if HAS_CUDA else every_row(names, rows)
