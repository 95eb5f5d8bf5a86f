"""What `make test` leaves to `make test-all`, and the parts of `make gpu-test`."""

import inspect
import json
import re
from itertools import combinations, product
from pathlib import Path
from types import SimpleNamespace

import pytest
import record
import torch
from conftest import (
    COMPILED_FOR,
    HAS_CUDA,
    MOST_COMPILED,
    check_compiled,
    runs_here,
    shown_by_others,
)
from pairwise import half_exhaustive
from strategies import quants, weights_under
from table_items import every_row

from moe_ops import get_scheme
from moe_ops.scheme import refusal


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
    assert shown_by_others(items) == [items[1], items[2], items[5]]
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


def test_weights_are_drawn_of_all_that_operators_compute():
    for scheme in ("unquantized", "fp8_channel", "mxfp4"):
        activation = get_scheme(scheme).activation
        weights = tuple(w for w in quants() if refusal(activation, w) is None)
        assert weights and weights_under(activation) == weights


def test_items_that_cannot_run_here_are_left_out():
    def marked(*marks):
        found = [mark.mark for mark in (pytest.mark.kernel, *marks)]
        of_name = lambda name=None: [m for m in found if name in (None, m.name)]  # noqa: E731
        return SimpleNamespace(iter_markers=of_name)

    assert runs_here(marked()) and runs_here(marked(pytest.mark.skipif(False, reason="a rule")))
    assert not runs_here(marked(pytest.mark.skipif(True, reason="a rule")))
    assert runs_here(marked(pytest.mark.gpu)) == HAS_CUDA


def failures(test):
    """The report of a test that fails."""
    with pytest.raises(pytest.fail.Exception) as failed:
        test()
    return str(failed.value)


def test_all_rows_of_a_table_that_fail_are_named():
    """And the others run; what raises no error where one is due fails as well."""
    seen = []

    @every_row("dtype", [torch.int8, torch.int16])
    @every_row(("number", "text"), [(1, "a"), (2, "b" * 99), (3, "c")])
    def test(number, text, dtype, device="cpu"):
        seen.append((number, dtype))
        assert number != 2 or dtype == torch.int16
        with pytest.raises(ValueError, match="odd" if number == 3 else ""):
            if dtype == torch.int8:
                raise ValueError(text)

    report = failures(test)
    assert seen == [(n, d) for d in (torch.int8, torch.int16) for n in (1, 2, 3)]
    assert report.count("DID NOT RAISE") == 3 and "2 of 2 rows failed" in report
    assert "dtype = torch.int8: Failed: 2 of 3 rows failed" in report
    assert f"number = 2, text = '{'b' * 59}...: AssertionError" in report
    assert "number = 3, text = 'c': AssertionError" in report and "number = 1, text" in report
    assert [*inspect.signature(test).parameters] == ["device"]
    every_row("n", [1, 2])(lambda n: None)()
    assert "2 of 2 rows failed" in failures(every_row("n", [1, 2])(lambda n: pytest.skip("no")))
    with pytest.raises(ValueError, match="rows of n must not be empty"):
        every_row("n", [])


ROOT = Path(__file__).parents[2]


def test_every_file_is_in_one_part_of_the_gpu_suite():
    """And what all parts leave out is there; the file that needs two GPUs runs on two."""
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    lists = dict(re.findall(r"^(GPU_\S+) := (.*)$", makefile, re.MULTILINE))
    parts = [lists[f"GPU_PART_{i}/2"].split() for i in (1, 2)]
    left_out, pair = lists["GPU_LEFT_OUT"].split(), lists["GPU_PAIR"].split()
    files = [path.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(files) > 100 and all((ROOT / path).is_file() for path in (*left_out, *pair))
    for file in files:
        folders = {str(folder) for folder in file.parents}
        assert sum(len(folders.intersection(part)) for part in parts) == 1, file
    assert "tests/layer/test_layer_distributed.py" in {*left_out} & {*pair}


def ran(monkeypatch, path, part, outcomes, *, maxfail=0, code=pytest.ExitCode.OK, **of_worker):
    """The record after a run of tests with these outcomes by their names."""
    monkeypatch.setenv("MOE_OPS_RECORD", str(path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.delenv("MOE_OPS_PART", raising=False)
    if part is not None:
        monkeypatch.setenv("MOE_OPS_PART", part)
    stats = {}
    for name, outcome in outcomes.items():
        stats.setdefault(outcome, []).append(SimpleNamespace(nodeid=name, user_properties=[]))
    reporter = SimpleNamespace(stats=stats, write_line=lambda text: None)
    config = SimpleNamespace(
        option=SimpleNamespace(maxfail=maxfail),
        invocation_params=SimpleNamespace(args=["-n", "2"]),
        **of_worker,
    )
    record.pytest_terminal_summary(reporter, code, config)
    return json.loads(path.read_text())


def test_the_parts_of_a_record(monkeypatch, tmp_path):
    """A record is complete once all parts of one number ran to their end, at one commit."""
    monkeypatch.setenv("MOE_OPS_COMMIT", "abc")
    one, two = {"a.py::x": "passed"}, {"b.py::y": "passed", "b.py::z": "passed"}

    def run(*given, **how):
        found = ran(monkeypatch, tmp_path / "gpu_tests.json", *given, **how)
        return found["complete"], [*found["parts"]], found["passed"], found["failed"]

    assert run("1/2", one) == (False, ["1/2"], 1, 0)
    failed = pytest.ExitCode.TESTS_FAILED
    broken = {"b.py::y": "failed", "b.py::z": "passed"}
    assert run("2/2", broken, code=failed) == (True, ["1/2", "2/2"], 2, 1)
    assert run("2/2", two) == (True, ["1/2", "2/2"], 3, 0)
    assert run("2/2", {"b.py::z": "passed"}, maxfail=1) == (False, [], 2, 0)
    assert run("1/2", one)[:2] == (False, ["1/2"])
    assert run("2/2", two, code=pytest.ExitCode.INTERRUPTED)[:2] == (False, [])
    assert run("1/2", one) and run("2/2", two)[0]
    assert run(None, {"a.py::x": "passed"})[:2] == (False, [])
    assert run("1/3", one)[:2] == (False, ["1/3"])
    assert run("1/1", {**one, **two}) == (True, ["1/1"], 3, 0)
    assert run("1/2", one, workerinput={}) == (True, ["1/1"], 3, 0)  # written by the others
    monkeypatch.setenv("MOE_OPS_COMMIT", "def")
    assert run("1/2", one) == (False, ["1/2"], 1, 0)


def test_a_record_needs_a_commit(monkeypatch, tmp_path):
    """Two copies without git would merge, whatever their code is."""
    monkeypatch.chdir(tmp_path)
    for name in ("MOE_OPS_COMMIT", "MOE_OPS_RECORD"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    record.pytest_configure(None)  # writes no record
    monkeypatch.setenv("MOE_OPS_RECORD", str(tmp_path / "gpu_tests.json"))
    for path in ("", str(tmp_path)):  # with git, and without
        with pytest.raises(pytest.UsageError, match="MOE_OPS_COMMIT must name the commit"):
            record.pytest_configure(None)
        monkeypatch.setenv("PATH", path or str(tmp_path))
    monkeypatch.setenv("MOE_OPS_COMMIT", "abc")
    record.pytest_configure(None)
