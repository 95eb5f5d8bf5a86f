"""What `make test` leaves to `make test-all`."""

from itertools import combinations, product
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import (
    COMPILED_FOR,
    MOST_COMPILED,
    check_compiled,
    shown_by_others,
)
from pairwise import half_exhaustive


def item(name, arch, marks=("aot",), **params):
    """What the choice reads of a collected item."""
    params |= {} if arch is None else {"arch": arch}
    return SimpleNamespace(
        name=f"{name}[{arch}]", path=Path("test_aot.py"), originalname=name,
        callspec=SimpleNamespace(params=params),
        get_closest_marker=lambda mark: mark if mark in marks else None,
    )  # fmt: skip


def test_one_item_of_each_test_stays_for_one_other_architecture():
    """And tests share the architectures out."""
    names, archs = [f"test {i}" for i in range(20)], (80, 100, 103, 120)
    items = [item(name, arch, i=i) for name in names for i in range(3) for arch in archs]
    left = {id(i) for i in shown_by_others(items)}
    stay = [i for i in items if id(i) not in left]
    assert [i.originalname for i in stay] == names
    assert {i.callspec.params["arch"] for i in stay} == {*archs}
    assert {i.callspec.params["i"] for i in stay} == {0}
    both = [item("a", arch) for arch in (COMPILED_FOR, 80)]
    assert shown_by_others(both) == []


@pytest.mark.parametrize("arch", [None, COMPILED_FOR])
def test_every_value_stays_for_one_architecture(arch):
    """Every tile and every scheme, but not each of them with each of the others."""
    schemes, tiles = ("fp8", "int8", "mxfp4"), (16, 64)
    items = [item("a", arch, scheme=s, tile=t) for s in schemes for t in tiles]
    assert shown_by_others(items) == [items[3], items[5]]
    assert shown_by_others([item("a", arch), item("b", arch)]) == []


def test_tests_that_compile_nothing_stay():
    """Rules of every architecture take no time."""
    assert shown_by_others([item("a", 80, ()), item("a", 80, ())]) == []


def test_as_many_items_compile_as_there_is_time_for():
    items = [item("a", 90)] * MOST_COMPILED
    check_compiled([*items, item("b", 90, ())])
    with pytest.raises(pytest.UsageError, match=rf"got {MOST_COMPILED + 1}: mark .*exhaustive"):
        check_compiled([*items, item("a", 90)])


def test_every_two_values_meet_in_half_of_the_product():
    factors = ["abcde", range(4), (False, True)]
    cases = half_exhaustive(*factors)
    assert [case.values for case in cases] == list(product(*factors))
    kept = [case.values for case in cases if not case.marks]
    assert len(kept) == len(cases) / 2
    for i, j in combinations(range(3), 2):
        pairs = {(row[i], row[j]) for row in kept}
        assert pairs == set(product(factors[i], factors[j]))
    assert not any(case.marks for case in half_exhaustive(*factors, where=False))
