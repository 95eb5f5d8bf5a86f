"""What `make test` leaves to `make test-all`."""

from types import SimpleNamespace

from conftest import COMPILED_FOR, of_other_architectures


def item(name, arch, keywords=("aot",)):
    """What the choice reads of a collected item."""
    params = {} if arch is None else {"arch": arch}
    return SimpleNamespace(
        name=f"{name}[{arch}]", path="test_aot.py", originalname=name, keywords=keywords,
        callspec=SimpleNamespace(params=params),
    )  # fmt: skip


def test_one_item_of_each_test_stays_for_every_other_architecture():
    items = [item(name, arch) for name in ("a", "b") for arch in (80, 90, 100, 120) * 3]
    items += [item("c", None), item("c", None), item("c", 120)]
    left = of_other_architectures(items)
    assert [i.name for i in left] == ["a[80]", "a[120]"] * 2 + ["b[80]", "b[120]"] * 2
    assert not {i.callspec.params["arch"] for i in left} & set(COMPILED_FOR)


def test_tests_that_compile_nothing_stay():
    """Rules of every architecture take no time."""
    assert of_other_architectures([item("a", 80, ()), item("a", 80, ())]) == []
