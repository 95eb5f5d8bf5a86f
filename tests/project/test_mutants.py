"""The lists of planted faults hold, and the script that plants them sees what it should."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import mutants
import pytest

ROOT = Path(__file__).parents[2]
FAULTS = mutants.read_faults(ROOT / "tests" / "faults")
PLANTED = (
    "moe_ops/kernels/**/*.py",
    "moe_ops/reference/*.py",
    "fake_impls/*.py",
    "moe_ops/*check*.py",
    "moe_ops/windows.py",
    "moe_ops/functional/*.py",
    "moe_ops/pipeline/**/*.py",
    "moe_ops/inspect/*.py",
    "moe_ops/layer/weight_loader.py",
    "moe_ops/layer/steps.py",
    "moe_ops/layer/placing.py",
    "moe_ops/layer/checkpoint.py",
    "moe_ops/loading/*.py",
    "moe_ops/routing/*.py",
    "moe_ops/parallel/*.py",
)
"""Files that have a fault."""
WITHOUT = {
    "moe_ops/kernels/_gemm/operands.py": "a tuple of tensors: nothing is computed",
    "moe_ops/pipeline/prepare_finalize.py": "an interface: nothing is computed",
}


def test_every_fault_can_be_planted():
    """Its old text occurs once, and what results is a program."""
    for fault in FAULTS:
        ast.parse(fault.apply(ROOT), f"{fault.where} {fault.file}")


def test_every_fault_names_tests_that_are_there():
    for test in {test for fault in FAULTS for test in fault.tests}:
        file, *names = mutants.located(ROOT, test.partition("[")[0]).split("::")
        text = (ROOT / file).read_text()
        assert all(f"def {name}(" in text or f"class {name}:" in text for name in names), test
    assert all(fault.tests and fault.environment for fault in FAULTS)


def test_every_file_has_a_fault():
    files = {str(p.relative_to(ROOT)) for pattern in PLANTED for p in ROOT.glob(pattern)}
    files = {file for file in files if not file.endswith("__init__.py")}
    assert files - {fault.file for fault in FAULTS} - set(WITHOUT) == set()


@pytest.fixture
def tree(tmp_path):
    """A library of one function, a test that sees only part of what it does, and faults."""
    for name, text in {
        "library.py": "def double(x):\n    return 2 * x\n\n\ndef half(x):\n    return x / 2\n",
        "tests/test_library.py": (
            "import library\ndef test_double(): assert library.double(2) == 4\n"
        ),
        "tests/faults/list.txt": (
            "file library.py\non reference: test_library.py::test_double\n"
            "- 2 * x\n+ 3 * x\n- 2 * x\n+ x + x\n= the same\n- 2 * x\n+ x ** 2\n- 4 * x\n+ x\n"
            "file library.py\non gpu: test_library.py::test_double\n- x / 2\n+ x\n"
        ),
    }.items():
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "tree"


def run(*arguments, **variables):
    """The exit status of the script, and what it printed."""
    command = [sys.executable, ROOT / "tests/support/mutants.py", *arguments]
    variables = {**os.environ, **variables}
    run = subprocess.run(command, capture_output=True, text=True, env=variables)
    return run.returncode, run.stdout


def planted(tree, *arguments):
    """The exit status, and the verdict on each new text."""
    status, output = run("--root", tree, *arguments, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    found = {}
    for line in (line for line in output.splitlines() if " -> " in line):
        kind = next((k for k in ("caught", "survived", "timed out") if line.startswith(k)), None)
        if kind and ": list.txt" not in line:
            found[line.partition(" -> ")[2].partition("  ")[0]] = kind
    return status, found


def test_what_becomes_of_faults(tree):
    before = (tree / "library.py").read_text()
    status, found = planted(tree, "-j", "2")
    assert found == {"3 * x": "caught", "x ** 2": "survived"}
    assert status == 2, "a text that is not there cannot be planted"
    assert (tree / "library.py").read_text() == before


def test_exit_status(tree):
    assert planted(tree, "--only", "3 * x") == (0, {"3 * x": "caught"})
    assert planted(tree, "--only", "** 2") == (1, {"x ** 2": "survived"})
    assert planted(tree, "--only", "gpu") == (1, {"x": "survived"})
    assert planted(tree, "--only", "3 * x", "--timeout", "0") == (1, {"3 * x": "timed out"})
    assert planted(tree, "--only", "nowhere") == (2, {})


def test_faults_are_not_planted_where_tests_fail_without_them(tree):
    path = tree / "tests" / "test_library.py"
    path.write_text(path.read_text().replace("== 4", "== 5"))
    assert planted(tree, "--only", "3 * x") == (2, {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("file a.py\nin reference: test_a.py\n", "list.txt:2"),
        ("file a.py\non mars: test_a.py\n", "list.txt:2"),
        ("+ new\n", "list.txt:1"),
        ("file a.py\n= why\n", "list.txt:2"),
    ],
)
def test_lists_that_cannot_be_read(text, message, tmp_path):
    (tmp_path / "list.txt").write_text(text)
    with pytest.raises(ValueError, match=f"{message}: no such line can be here"):
        mutants.read_faults(tmp_path)


def test_texts_of_several_lines(tmp_path):
    text = "# a list\nfile a.py\non interpreter: t.py::x t.py::y\n- a\n-     b\n+ c\n+\n+ d\n- e\n"
    (tmp_path / "list.txt").write_text(text)
    first, second = mutants.read_faults(tmp_path)
    assert (first.old, first.new, first.where) == ("a\n    b", "c\n\nd", "list.txt:4")
    assert (second.old, second.new, second.tests) == ("e", "", ("t.py::x", "t.py::y"))
    assert second.environment == "interpreter" and second.file == "a.py"


def test_one_fault_of_the_library_is_caught():
    """In a copy of this very tree, by the tests of its module."""
    status, output = run("--only", "held = range(ep_rank, global")
    assert status == 0 and "1 of 1 caught" in output, output
