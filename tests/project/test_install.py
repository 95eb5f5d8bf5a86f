"""The built distribution, installed away from the checkout: `make test-install` runs this file.

The wheel and the source distribution are built from a copy of this tree without symbolic links. The
wheel goes into a virtual environment of its own, which sees the packages of this Python, torch for
one, but neither the checkout nor its folder.
"""

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_string
from pathlib import Path
from typing import NamedTuple

import pytest

from moe_ops import cli
from moe_ops.bench.harness import CONSOLE_SCRIPT
from moe_ops.demo import MODEL
from moe_ops.doctor import DISTRIBUTION, EXTRAS
from moe_ops.version import __version__

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.install]
LEFT_OUT = (".git", ".venv*", "__pycache__", "*.pyc", ".*_cache", ".hypothesis", "build", "dist",
            "*.egg-info", "shared", ".coverage*")  # fmt: skip
"""Files that no distribution holds."""
BUILD = """
import os, sys
from setuptools import build_meta
source, out = sys.argv[1:]
os.chdir(source)
build_meta.build_wheel(out)
build_meta.build_sdist(out)
"""
IN_ONE_PROCESS = """
import contextlib, io, json, shlex, sys
import moe_ops
from moe_ops.cli import main

said = {"file": moe_ops.__file__}
for line in sys.stdin.read().splitlines():
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(shlex.split(line))
        except SystemExit as left:
            code = left.code
    said[line] = (code, out.getvalue(), err.getvalue())
print(json.dumps(said))
"""


class Built(NamedTuple):
    """Both distributions, and the environment with the wheel."""

    wheel: Path
    sdist: Path
    python: Path
    away: Path
    """An empty folder to run in."""

    def run(self, *command, **more):
        """Run a command of the environment, away from the checkout."""
        variables = {name: v for name, v in os.environ.items() if name != "PYTHONPATH"}
        variables |= {"CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
        program = self.python.with_name(command[0])
        return subprocess.run(
            [program, *command[1:]],
            capture_output=True, text=True, cwd=self.away, env=variables, **more,
        )  # fmt: skip


def without_links(source, to):
    shutil.copytree(source, to, symlinks=False, ignore=shutil.ignore_patterns(*LEFT_OUT))
    return to


def build(source, out):
    """Build both distributions of a tree."""
    out.mkdir()
    command = [sys.executable, "-c", BUILD, str(source), str(out)]
    subprocess.run(command, check=True, capture_output=True, cwd=source)
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, sdist


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("install")
    wheel, sdist = build(without_links(ROOT, folder / "source"), folder / "out")
    environment, away = folder / "environment", folder / "away"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    python = environment / "bin" / "python"
    (packages,) = environment.glob("lib/python*/site-packages")
    seen = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (packages / "seen.pth").write_text("\n".join(seen) + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    subprocess.run([*pip, "--no-index", "--no-deps", "--force-reinstall", str(wheel)], check=True)
    away.mkdir()
    return Built(wheel, sdist, python, away)


def tracked():
    """What the source distribution must hold: what git tracks, or without git all of this tree."""
    if not (ROOT / ".git").exists():
        return files_of(ROOT)
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    assert listed.returncode == 0, listed.stderr
    return {name for name in listed.stdout.splitlines() if (ROOT / name).exists()}


def files_of(tree):
    """Paths of a tree's files, without those that no distribution holds."""
    copied = (path for path in tree.rglob("*") if path.is_file())
    ignore = shutil.ignore_patterns(*LEFT_OUT)
    return {
        str(path.relative_to(tree))
        for path in copied
        if not any(ignore("", [part]) for part in path.relative_to(tree).parts)
    }


def test_the_wheel_holds_the_package(built):
    """Every file of ``moe_ops`` and of ``fake_impls``, and nothing else."""
    ours = {f"moe_ops/{name}" for name in files_of(ROOT / "moe_ops")}
    ours |= {f"moe_ops/fake_impls/{name}" for name in files_of(ROOT / "fake_impls")}
    with zipfile.ZipFile(built.wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
        stages = archive.read("moe_ops/fake_impls/__init__.py").decode()
    assert {name for name in names if ".dist-info/" not in name} == ours
    assert stages == (ROOT / "fake_impls" / "__init__.py").read_text()
    assert built.wheel.stat().st_size < 10e6


def metadata_of(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return message_from_string(archive.read(name).decode())


def test_metadata(built):
    found = metadata_of(built.wheel)
    assert (found["Name"], found["Version"]) == (DISTRIBUTION, __version__)
    assert found["License-Expression"] == "Apache-2.0 AND PSF-2.0"
    assert len(found.get_all("License-File")) == 2
    assert {*EXTRAS, "test", "dev"} <= set(found.get_all("Provides-Extra"))
    assert found["Requires-Python"] == ">=3.10" and found["Keywords"] and found["Summary"]
    description = found.get_payload()
    assert description.startswith("# moe_ops") and "pip install" in description
    relative = re.findall(r"\]\((?!https?:|#)[^)]*\)", description)
    assert not relative, "an index shows neither files nor pictures of the repository"


def test_engines_find_their_plug_ins(built):
    """The entry points of the installed wheel are functions, which need no engine."""
    code = (
        "from importlib.metadata import entry_points;"
        "found = [e for g in ('vllm.general_plugins', 'sglang.srt.plugins')"
        " for e in entry_points(group=g) if e.name == 'moe_ops'];"
        "assert len({e.value for e in found}) == 2, found; [e.load()() for e in found]"
    )
    run = built.run("python", "-c", code)
    assert run.returncode == 0, run.stderr


def test_the_name_is_no_other_packages():
    """An index refuses names that look alike: without punctuation, 0 is o, and 1 and i are l."""

    def seen(name):
        return re.sub(r"[-_.]", "", name.lower()).translate(str.maketrans("01i", "oll"))

    assert seen("MOE_0ps") == seen("moe-ops") != seen(DISTRIBUTION)


def test_the_source_distribution_holds_the_tree(built, tmp_path):
    """With its tests, some of which run there; and the wheel made from it is the same."""
    with tarfile.open(built.sdist) as archive:
        safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # from 3.11.4 on
        archive.extractall(tmp_path, **safely)
    (tree,) = tmp_path.iterdir()
    assert tracked() - files_of(tree) == set()
    again, _ = build(tree, tmp_path / "out")
    with zipfile.ZipFile(again) as one, zipfile.ZipFile(built.wheel) as other:
        assert sorted(one.namelist()) == sorted(other.namelist())
    shutil.rmtree(tree / "build", ignore_errors=True)
    tests = [
        "tests/project/test_structure.py",
        "tests/ops/test_activation.py",
        "-k",
        "stages or act",
    ]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *tests]
    variables = {**os.environ, "PYTHONPATH": str(tree)}
    run = subprocess.run(command, capture_output=True, text=True, cwd=tree, env=variables)
    assert run.returncode == 0, run.stdout


def examples():
    """The examples that the help of each command ends with, without the demo's."""
    found = []
    for name in cli.COMMANDS:
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            cli.main([name, "--help"])
        lines = out.getvalue().partition("examples:\n")[2].splitlines()
        found += [line.partition(" moe_ops ")[2] for line in lines if name != "demo"]
    return found


README = (ROOT / "README.md").read_text()
COMMANDS = {
    "--version": 0,
    "--help": 0,
    **{f"{name} --help": 0 for name in cli.COMMANDS},
    **dict.fromkeys(re.findall(r"`(?:python -m moe_ops|moe-ops) (explain [^`]*)`", README), 0),
    "explain --model Qwen/Qwen3-30B-A3B --scheme fp8_block128 --device sm_90 --json": 0,
    "explain --sizes 128,8,2048,768 --device sm_100": 0,
    "explain --model mixtral --device h100": 0,
    "explain --model mixtral --scheme fp8": 2,
    "explain --sizes 8,2,64,9999999999": 2,
    "tune --model tiny --device h200 --time-budget-s -1": 2,
    **dict.fromkeys(examples(), 0),
    f"explain --config {MODEL / 'config.json'}": 0,
    "explain --model qwen4-1b": 2,
    "tune --model qwen3-30b --scheme fp8_channel --device sm_90 --tokens 1 --dry-run": 0,
    "tune --sizes 8,2,256,128 --device sm_90 --tokens 1 --dry-run --json": 0,
    "bench --sizes 8,2,64,32 --tokens 1 --impls moe_ops": 0,
    "demo --model nowhere": 2,
    "doctor --json": 0,
}
"""Command lines and their exit statuses."""


def test_every_command_runs(built):
    run = built.run("python", "-c", IN_ONE_PROCESS, input="\n".join(COMMANDS))
    assert run.returncode == 0, run.stderr
    said = json.loads(run.stdout)
    assert Path(said.pop("file")).is_relative_to(built.python.parents[1])
    assert {line: code for line, (code, *_) in said.items()} == COMMANDS, said
    assert json.loads(said["doctor --json"][1])["ok"]
    assert not list(built.away.iterdir()), "nothing is written"


def test_the_console_script(built):
    version = built.run(CONSOLE_SCRIPT, "--version")
    assert (version.returncode, version.stdout) == (0, f"moe_ops {__version__}\n"), version.stderr
    wrong = built.run(CONSOLE_SCRIPT, "explain", "--model", "mixtrall")
    assert wrong.returncode == 2 and f"usage: {CONSOLE_SCRIPT} explain" in wrong.stderr
    assert "did you mean 'mixtral'?" in wrong.stderr
    module = built.run("python", "-m", "moe_ops", "--help")
    assert module.returncode == 0 and "usage: python -m moe_ops " in module.stdout


def test_every_readme_snippet_runs(built):
    snippets = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    run = built.run("python", "-", input="\n".join(snippets))
    assert snippets and run.returncode == 0, run.stderr
    assert not list(built.away.iterdir()), "nothing is written"
