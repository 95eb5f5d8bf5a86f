"""Mutation tests: plant faults one at a time, and check that their tests fail.

    make mutants                      every fault that this machine can see
    make mutants ONLY=kernels/slots   faults whose environment, file or texts contain this
    make mutants ONLY=gpu             faults that only a GPU can see

A fault is an edit of one file: its old text, which occurs there once, becomes the new text. Faults
are planted in copies of the tree, never in the checkout. The tests run without any fault first; a
test that fails then cannot judge a fault. Then each fault's own tests must fail. The exit status is
1 if a fault survives, 2 if a fault cannot be planted or judged.

`tests/faults/*.txt` list the faults:

    file moe_ops/kernels/_runtime/slots.py
    on interpreter: test_align.py::test_expert_map test_permute.py
    - mapped < num_local_experts
    + mapped <= num_local_experts

``file`` and ``on`` apply to all faults that follow. ``on`` names the environment (`ENVIRONMENTS`)
and the tests that pytest runs there, by the names of their files, which are unique below
``tests/``. Several ``-`` or ``+`` lines are one text; without ``+`` the old text is removed.
``= why`` after a fault means that the fault changes no result: it is not planted.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = {
    "reference": ({}, []),  # operators are their references, unless tests compile for a GPU
    "interpreter": ({"TRITON_INTERPRET": "1"}, ["-m", "kernel"]),
    "gpu": ({}, []),
}
"""Environment variables and pytest options of each environment."""
LEFT_OUT = (".*", "__pycache__", "build", "*.egg-info")
"""Patterns of files that a copy of the tree leaves out."""
PRELOADED = ("torch", "torch._dynamo", "triton", "hypothesis", "pytest")
"""Modules imported once per environment: tests run in forks, which inherit them."""


@dataclass(frozen=True)
class Fault:
    """An edit of a file, and the tests that must fail with it."""

    where: str
    """The list and the line that define the fault."""
    file: str
    environment: str
    tests: tuple[str, ...]
    old: str
    new: str
    equivalent: str = ""
    """Why the fault changes no result; empty: it does change results."""

    def __str__(self) -> str:
        old, new = (" ".join(text.split()) or "nothing" for text in (self.old, self.new))
        return f"{self.environment} {self.file}: {old} -> {new}"

    def apply(self, root: Path) -> str:
        """The file's text with the fault; ValueError unless the old text occurs once."""
        text = (root / self.file).read_text()
        found = text.count(self.old)
        if self.old == self.new or found != 1:
            rule = f"must differ from the new one and occur once in {self.file}"
            raise ValueError(f"{self.where}: old text {rule}, found {found} times: {self.old!r}")
        return text.replace(self.old, self.new)


class Reader:
    """Parser of the lines of a fault list."""

    def __init__(self, name: str) -> None:
        self.name, self.faults = name, []
        self.context: dict[str, Any] = {"file": "", "environment": "", "tests": ()}
        self.old: list[str] = []
        self.new: list[str] = []
        self.first = 0

    def take(self, number: int, line: str) -> None:
        """Read one line; ValueError if the line is invalid there."""
        kind, _, text = line.partition(" ")
        if kind == "+" and self.old:
            self.new.append(text)
        elif kind == "-":
            if self.new:
                self.finish()
            self.first = self.first if self.old else number
            self.old.append(text)
        elif kind == "=" and self.old and text:
            self.finish(text)
        else:
            self.finish()
            if kind and not kind.startswith("#") and not self._describes(kind, text):
                raise ValueError(f"{self.name}:{number}: no such line can be here: {line!r}")

    def _describes(self, kind: str, text: str) -> bool:
        """Read a ``file`` or ``on`` line; returns whether the line is one."""
        environment, _, tests = text.partition(":")
        if kind == "file":
            self.context = {"file": text, "environment": "", "tests": ()}
        elif kind == "on" and environment in ENVIRONMENTS:
            self.context |= {"environment": environment, "tests": tuple(tests.split())}
        else:
            return False
        return True

    def finish(self, why: str = "") -> None:
        """Append the fault whose texts have been read, if there is one."""
        if self.old:
            texts = {"old": "\n".join(self.old), "new": "\n".join(self.new), "equivalent": why}
            self.faults.append(Fault(f"{self.name}:{self.first}", **self.context, **texts))
        self.old, self.new = [], []


def read_list(path: Path) -> list[Fault]:
    """The faults in a list file; ValueError for invalid lines."""
    reader = Reader(path.name)
    for number, line in enumerate(path.read_text().splitlines(), 1):
        reader.take(number, line)
    reader.finish()
    return reader.faults


def read_faults(folder: Path) -> list[Fault]:
    """All faults in the list files of a folder."""
    return [fault for path in sorted(folder.glob("*.txt")) for fault in read_list(path)]


def plant(fault: Fault, root: Path) -> str:
    """Write the fault into the tree at ``root``; returns the original text of the file."""
    sound, text = (root / fault.file).read_text(), fault.apply(root)
    overwrite(root / fault.file, text)
    return sound


def overwrite(path: Path, text: str) -> None:
    """Write a source file and delete its bytecode, whose time and size might match the new text."""
    path.write_text(text)
    Path(importlib.util.cache_from_source(str(path.resolve()))).unlink(missing_ok=True)


class Verdict(NamedTuple):
    """The outcome of a fault."""

    kind: str
    """``caught``, ``survived``, ``timed out`` or ``not planted``."""
    word: str
    """The first test that failed, or why no test could."""
    seconds: float = 0.0


class Run:
    """Pytest in a fork of this process, with a tree of its own.

    Args:
        root: the tree.
        arguments: of pytest.
        timeout: seconds until it is killed with all processes that it started.
    """

    def __init__(self, root: Path, arguments: list[str], timeout: float) -> None:
        self.output, self.timeout = root.parent / f"{root.name}.txt", timeout
        self.start, self.status = time.monotonic(), None
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self._work(root, arguments)

    def _work(self, root: Path, arguments: list[str]) -> None:
        """Run pytest in the fork; never returns."""
        os.setsid()
        with self.output.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.chdir(root)
        os.environ["PYTHONPATH"] = str(root)
        elsewhere = ("", *(str(ROOT / part) for part in ("", "tests", "tests/support")))
        sys.path[:] = [str(root), *(p for p in sys.path if p not in elsewhere)]
        status = 3
        try:
            status = int(importlib.import_module("pytest").main(arguments))
        finally:
            sys.stdout.flush()
            os._exit(status)

    def is_over(self) -> bool:
        """Whether pytest has ended, or taken too long: ``status`` is then None."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid:
            self.status = os.waitstatus_to_exitcode(status)
            return True
        if self.seconds < self.timeout:
            return False
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        return True

    @property
    def seconds(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self.start

    def verdict(self) -> Verdict:
        """The verdict on the planted fault: any end other than success counts as a failure."""
        if self.status is None:
            return Verdict("timed out", f"after {self.timeout:g} s", self.seconds)
        if self.status == 5:
            return Verdict("not planted", "no test ran", self.seconds)
        if self.status == 0:
            return Verdict("survived", "", self.seconds)
        return Verdict("caught", (self.failed() or [f"exit {self.status}"])[0], self.seconds)

    def failed(self) -> list[str]:
        """The tests that failed, as pytest names them."""
        lines = self.output.read_text(errors="replace").splitlines()
        return [line.split()[1] for line in lines if line.startswith(("FAILED ", "ERROR "))]


def located(root: Path, test: str) -> str:
    """A test as pytest names it: the path of its file below ``root`` instead of the file's name."""
    name, *inside = test.split("::")
    (path,) = (root / "tests").rglob(name)
    return "::".join([path.relative_to(root).as_posix(), *inside])


def pytest_arguments(environment: str, tests: list[str], *options: str) -> list[str]:
    """The command-line arguments of pytest; ``tests`` as pytest names them."""
    how = ["-q", "-p", "no:cacheprovider", "--tb=line", *ENVIRONMENTS[environment][1], *options]
    return [*how, *tests]


def sound_run(
    environment: str, faults: list[Fault], copies: list[Path]
) -> tuple[set[int | None], list[str]]:
    """Run the tests of all faults without a fault, a share in each copy.

    Returns:
        pytest's exit statuses, and the tests that failed.
    """
    tests = sorted({located(copies[0], test) for fault in faults for test in fault.tests})
    shares = [tests[i :: len(copies)] for i in range(min(len(copies), len(tests)))]
    runs = [
        Run(copy, pytest_arguments(environment, share), math.inf)
        for copy, share in zip(copies, shares, strict=False)
    ]
    waiting = list(runs)
    while waiting := [run for run in waiting if not run.is_over()]:
        time.sleep(0.02)
    return {run.status for run in runs}, [test for run in runs for test in run.failed()]


def judge_all(
    environment: str, faults: list[Fault], copies: list[Path], timeout: float
) -> list[Verdict]:
    """Judge the faults of one environment, in several copies of the tree in parallel."""
    common = {"OMP_NUM_THREADS": "1", "HYPOTHESIS_PROFILE": "mutants"}
    os.environ.update(common | ENVIRONMENTS[environment][0])
    for name in PRELOADED if (copies[0] / "moe_ops").exists() else ("pytest",):
        with suppress(ImportError):
            importlib.import_module(name)
    statuses, failed = sound_run(environment, faults, copies)
    if statuses != {0}:
        print(f"{environment}: without a fault pytest exits with {statuses}", *failed, sep="\n  ")
    if statuses != {0} and not failed:
        return [Verdict("not planted", "its tests could not be run")] * len(faults)

    def blind(fault: Fault) -> list[str]:
        named = [located(copies[0], test) for test in fault.tests]
        return [
            f for f in failed if any(f == n or f.startswith((n + "[", n + "::")) for n in named)
        ]

    able = [fault for fault in faults if not blind(fault)]
    found = dict(zip(able, _judge(environment, able, copies, timeout), strict=True))
    reason = "fails without the fault, too"
    return [found.get(f) or Verdict("not planted", f"{blind(f)[0]} {reason}") for f in faults]


def _judge(
    environment: str, faults: list[Fault], copies: list[Path], timeout: float
) -> Iterator[Verdict]:
    """Verdicts in the order of the faults; each is printed as soon as it is known."""
    free, waiting, verdicts = list(copies), list(enumerate(faults)), {}
    running: list[tuple[int, Run, Path, str]] = []
    while waiting or running:
        while free and waiting:
            number, fault = waiting.pop(0)
            try:
                sound = plant(fault, free[-1])
            except ValueError as error:
                verdicts[number] = Verdict("not planted", str(error))
                continue
            tests = [located(free[-1], test) for test in fault.tests]
            arguments = pytest_arguments(environment, tests, "-x")
            running.append((number, Run(free[-1], arguments, timeout), free.pop(), sound))
        for step in list(running):
            number, run, copy, sound = step
            if run.is_over():
                fault, verdicts[number] = faults[number], run.verdict()
                overwrite(copy / fault.file, sound)
                running.remove(step)
                free.append(copy)
                kind, word, seconds = verdicts[number]
                print(f"{kind:11} {seconds:4.0f} s  {fault}  {word}", flush=True)
        time.sleep(0.02)
    yield from (verdicts[number] for number in range(len(faults)))


def plant_all(faults: list[Fault], root: Path, jobs: int, timeout: float) -> list[Verdict]:
    """Judge all faults, one environment after another, each in its own process."""
    verdicts: dict[Fault, Verdict] = {}
    with tempfile.TemporaryDirectory(prefix="moe_ops_mutants_") as folder:
        copies = [Path(folder) / str(i) for i in range(jobs)]
        for copy in copies:
            shutil.copytree(root, copy, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
        for environment in ENVIRONMENTS:
            mine = [fault for fault in faults if fault.environment == environment]
            if mine:
                with ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool:
                    found = pool.submit(judge_all, environment, mine, copies, timeout).result()
                verdicts |= zip(mine, found, strict=True)
    return [verdicts[fault] for fault in faults]


def main(arguments: list[str] | None = None) -> int:
    """Run the command; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="those whose line contains this")
    parser.add_argument("--jobs", "-j", type=int, default=1, help="faults at a time")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for a fault's tests")
    parser.add_argument("--root", type=Path, default=ROOT, help="the tree; it is not changed")
    told = parser.parse_args(arguments)
    of = told.only if told.only in ENVIRONMENTS else None
    listed = [
        fault
        for fault in read_faults(told.root / "tests" / "faults")
        if (fault.environment == of if of else told.only in str(fault))
    ]
    equivalent = [fault for fault in listed if fault.equivalent]
    here = [f for f in listed if f.environment != "gpu" or of == "gpu"]
    faults = [fault for fault in here if not fault.equivalent]
    if not faults:
        parser.error(f"argument --only: must be part of a fault's line, got {told.only!r}")
    verdicts = plant_all(faults, told.root, told.jobs, told.timeout)
    counts = Counter(verdict.kind for verdict in verdicts)
    left = len(listed) - len(faults) - len(equivalent)
    for fault, (kind, word, _) in zip(faults, verdicts, strict=True):
        if kind != "caught":
            print(f"{kind}: {fault.where}: {fault}  {word}")
    print(
        f"{counts['caught']} of {len(faults)} caught; {len(equivalent)} change no result, "
        f"{left} need ONLY=gpu"
    )
    return 2 if counts["not planted"] else int(counts["caught"] < len(faults))


if __name__ == "__main__":
    sys.exit(main())
