"""What `make test` leaves to `make test-all`."""

from types import SimpleNamespace

from conftest import COMPILED_FOR, SAMPLED, of_other_architectures


def item(name, arch, keywords=("aot",), **params):
    """What the choice reads of a collected item."""
    params |= {} if arch is None else {"arch": arch}
    return SimpleNamespace(
        name=f"{name}[{arch}]", path="test_aot.py", originalname=name, keywords=keywords,
        callspec=SimpleNamespace(params=params),
    )  # fmt: skip


def test_one_item_of_each_test_stays_for_every_other_architecture():
    items = [item(name, arch) for name in ("a", "b") for arch in (80, 90, 103, 120) * 3]
    items += [item("c", None), item("c", None), item("c", 120)]
    left = of_other_architectures(items)
    names = [f"{name}[{arch}]" for name in ("a", "b") for _ in range(2) for arch in (80, 103, 120)]
    assert [i.name for i in left] == names
    assert COMPILED_FOR not in {i.callspec.params["arch"] for i in left}


def test_every_value_stays_for_the_sampled_architecture():
    """Every tile and every scheme, but not each of them with each of the others."""
    schemes, tiles = ("fp8", "int8", "mxfp4"), (16, 64)
    items = [item("a", SAMPLED, scheme=s, tile=t) for s in schemes for t in tiles]
    assert of_other_architectures(items) == [items[3], items[5]]
    assert of_other_architectures([item("a", SAMPLED), item("b", SAMPLED)]) == []


def test_tests_that_compile_nothing_stay():
    """Rules of every architecture take no time."""
    assert of_other_architectures([item("a", 80, ()), item("a", 80, ())]) == []
