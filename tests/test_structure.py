"""The house: every operator has its parts, imports point downwards, sizes stay readable."""

import ast
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from moe_ops.ops import STAGES

ROOT = Path(__file__).parent.parent
PACKAGES = ("moe_ops", "fake_impls", "tests", "benchmarks", "examples")
SOURCES = sorted(
    path
    for package in PACKAGES
    for path in (ROOT / package).rglob("*.py")
    if "moe_ops/fake_impls" not in str(path.relative_to(ROOT))
)
STAGE_FILES = sorted(set(STAGES.values()))
MAX_FILE, MAX_FUNCTION, MAX_KERNEL_PARAMETERS, MAX_SCHEMA = 450, 60, 31, 14


def name_of(path):
    return str(path.relative_to(ROOT))


def tree(path):
    return ast.parse(path.read_text())


@pytest.mark.parametrize("qualified", STAGES)
def test_every_operator_has_all_its_parts(qualified):
    stage, name = STAGES[qualified], qualified.replace(".", "_")
    for folder in ("moe_ops/kernels", "moe_ops/reference", "fake_impls"):
        functions = [
            n.name
            for n in tree(ROOT / folder / f"{stage}.py").body
            if isinstance(n, ast.FunctionDef)
        ]
        assert name in functions, f"{folder}/{stage}.py has no {name}"
    plain = qualified.split(".")[0]
    for path in (ROOT / "tests/test_ops.py", ROOT / f"benchmarks/bench_{stage}.py"):
        assert re.search(rf"\b{plain}\b", path.read_text()), f"{name_of(path)} lacks {plain}"
    assert (ROOT / f"tests/test_{stage}.py").exists()


def test_stages_are_files_everywhere():
    shared = {"__init__", "grouped", "slots"}
    for folder in ("moe_ops/kernels", "moe_ops/reference", "fake_impls"):
        assert {p.stem for p in (ROOT / folder).glob("*.py")} - shared == set(STAGE_FILES)


def test_contributing_names_what_there_is():
    """Every path, for each stage where it says so; every stage; and every make target."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    quoted = re.findall(r"`([^`]+)`", text)
    paths = [q for q in quoted if re.fullmatch(r"[\w./<>-]+(\.py|/)", q) and "/" in q]
    assert len(paths) > 15
    for path in paths:
        for stage in STAGE_FILES if "<stage>" in path else [""]:
            assert (ROOT / path.replace("<stage>", stage)).exists(), path
    bare = [q for q in quoted if q.endswith(".py") and "/" not in q]
    assert not bare, f"without their folder: {bare}"
    assert set(STAGE_FILES) <= set(quoted)
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {t for q in quoted if q.startswith("make ") for t in q.split()[1:] if "=" not in t}
    assert named and named <= targets


LAYERS = {
    "moe_ops.layer": 5, "moe_ops.layers": 5, "moe_ops.loading": 5, "moe_ops.integrations": 5,
    "moe_ops": 6, "moe_ops.testing": 6, "moe_ops.bench": 6,
    "moe_ops.pipeline": 4, "moe_ops.alignment": 4, "moe_ops.quantization": 4,
    "moe_ops.routing": 3, "moe_ops.parallel": 3, "moe_ops.ops": 2,
    "moe_ops.gradients": 1, "moe_ops.kernels": 1, "moe_ops.reference": 1,
    "moe_ops.fake_impls": 1, "moe_ops.support": 1,
    "moe_ops.checks": 0, "moe_ops.tensors": 0, "moe_ops.scheme": 0, "moe_ops.dispatch": 0,
    "moe_ops.activation": 0, "moe_ops.version": 0, "moe_ops.sizes": 0, "moe_ops.tuning": 5,
    "moe_ops.cli": 7, "moe_ops.__main__": 8,
}  # fmt: skip
"""A module imports from its own layer or a lower one."""


def module_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = ("moe_ops", *parts) if parts[0] == "fake_impls" else parts
    return ".".join(p for p in parts if p != "__init__")


def group_of(module):
    return ".".join(module.split(".")[:2])


def imports(path):
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("moe_ops"):
            if node.module == "moe_ops":
                yield from (f"moe_ops.{alias.name}" for alias in node.names)
            else:
                yield node.module
        elif isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.startswith("moe_ops"))


LIBRARY = [p for p in SOURCES if name_of(p).startswith(("moe_ops/", "fake_impls/"))]


@pytest.mark.parametrize("path", LIBRARY, ids=name_of)
def test_imports_point_downwards(path):
    importer = group_of(module_of(path))
    for imported in map(group_of, imports(path)):
        assert LAYERS[imported] <= LAYERS[importer], f"{importer} imports {imported}"
        assert {importer, imported} != {"moe_ops.kernels", "moe_ops.reference"}
        if importer == "moe_ops.fake_impls":
            assert imported not in ("moe_ops.kernels", "moe_ops.reference")


@pytest.mark.parametrize("path", LIBRARY, ids=name_of)
def test_only_the_registry_imports_inside_functions(path):
    if path.name == "ops.py":
        return
    for node in ast.walk(tree(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            inner = [n for n in ast.walk(node) if isinstance(n, (ast.Import, ast.ImportFrom))]
            assert not inner, f"{node.name} imports inside"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_sizes_stay_readable(path):
    lines = path.read_text().splitlines()
    assert len(lines) <= MAX_FILE, f"{len(lines)} lines"
    for node in ast.walk(tree(path)):
        if not isinstance(node, ast.FunctionDef):
            continue
        docstring = node.body[0] if isinstance(node.body[0], ast.Expr) else None
        documented = docstring.end_lineno - docstring.lineno + 1 if docstring else 0
        code = node.end_lineno - node.lineno + 1 - documented
        assert code <= MAX_FUNCTION, f"{node.name}: {code} lines of code"
        decorated = any("triton.jit" in ast.unparse(d) for d in node.decorator_list)
        if decorated:
            assert len(node.args.args) <= MAX_KERNEL_PARAMETERS, node.name
        assert not any(isinstance(n, ast.Assert) for n in ast.walk(node)) or "tests" in path.parts


def test_schemas_stay_short():
    import torch

    for qualified in STAGES:
        name, _, which = qualified.partition(".")
        schema = getattr(getattr(torch.ops.moe_ops, name), which or "default")._schema
        assert len(schema.arguments) <= MAX_SCHEMA, f"{schema}"


def test_public_functions_are_documented():
    import moe_ops

    for name in moe_ops.__all__:
        value = getattr(moe_ops, name)
        if inspect.isfunction(value) or inspect.isclass(value):
            assert inspect.getdoc(value), f"{name} has no docstring"


def test_import_is_light(tmp_path):
    """A sixteenth of what torch takes at most once its bytecode is cached, no Triton, no warning.

    That is 50 ms where torch takes 0.8 s. Time of the process, not of the clock, and relative to
    torch's: other tests run beside, and processors differ.
    """
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(tmp_path)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    code = (
        "import sys, time; start = time.process_time(); import torch; before = set(sys.modules);"
        "t = time.process_time(); import moe_ops; print((time.process_time() - t) / (t - start));"
        "assert 'triton' not in sys.modules or 'triton' in before"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-W", "error", "-c", code],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=environment,
        )
        for _ in range(3)
    ]
    for run in runs:
        assert run.returncode == 0 and not run.stderr, run.stderr
    assert min(float(run.stdout) for run in runs) < 1 / 16


def test_runs_without_triton():
    code = (
        "import sys; sys.modules['triton'] = None; import torch, moe_ops;"
        "w1, w2 = torch.ones(4, 6, 8), torch.ones(4, 8, 3);"
        "print(moe_ops.fused_moe(torch.ones(2, 8), w1, w2, torch.rand(2, 4), 2).shape)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
