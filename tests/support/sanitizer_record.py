"""`make sanitize`: run `sanitize.py` under compute-sanitizer's tools, and record the findings.

A run without the sanitizer comes first. It compiles every kernel and checks every value, so that
the tools' times are their own. Parts of the same commit merge into one record. No finding of a tool
is left out: errors and warnings are counted by kernel.

racecheck reports false races between warps that pass memory to each other with mbarriers. So it is
tested with a kernel that has no race (`sanitizer_canary.handed_over_kernel`). If it reports one
there, its findings about our kernels of that kind are recorded as not judged.

Exits with 0 if everything is clean, 1 if not, 3 without compute-sanitizer, 4 if it does not support
the machine, 5 if it misses a deliberate error.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from sanitize import SPECIALIZED, chosen, kernels_of, part_of
from sanitizer_findings import Findings, parse, supported

ROOT = Path(__file__).parents[2]
CLEAN, FOUND, NO_SANITIZER, UNSUPPORTED, BLIND = 0, 1, 3, 4, 5
PLAIN = "plain"
"""Name of the run without the sanitizer."""
OPTIONS = {
    "memcheck": ["--padding", "4096"],  # else the next allocation may begin where one ends
    "racecheck": [],
    "synccheck": [],
    "initcheck": [],
}
COMMON = [
    "--error-exitcode", "9", "--print-limit", "10000",
    "--report-api-errors", "no",  # PyTorch and Triton try calls that may fail, and handle it
]  # fmt: skip


# Running


@dataclass
class Run:
    """A run of a part of the cases under one tool, in several processes."""

    cases: int
    unfinished: list[str]
    wrong: dict[str, str]
    kernels: list[str]
    findings: Findings
    seconds: float
    unjudged: dict[str, dict[str, int]] = field(default_factory=dict)
    """racecheck's messages about kernels that it cannot judge, by kernel; not in the findings."""

    @property
    def clean(self) -> bool:
        """Whether all cases ran with correct results and without findings."""
        found = self.findings
        silent = not (found.errors or found.warnings or found.aborted or found.by_kernel)
        return silent and not self.unfinished and not self.wrong


@dataclass(frozen=True)
class How:
    """Settings for running a tool."""

    jobs: int
    """Number of parallel processes."""
    logs: Path | None = None
    """Folder that keeps the processes' output; None: the output is not kept."""
    gpus: int = 1
    """GPUs over which the processes take turns, if there are several."""


def command(tool: str, sanitizer: str) -> list[str]:
    """The beginning of a tool's command line; without a tool, Python's."""
    program = [sys.executable, str(ROOT / "tests/support/sanitize.py")]
    if tool == PLAIN:
        return program
    raw = ["--raw"] if tool == "initcheck" else []
    return [sanitizer, "--tool", tool, *COMMON, *OPTIONS[tool], *program, *raw]


def run(tool: str, sanitizer: str, part: tuple[int, int], how: How, deadline: float) -> Run:
    """Run every n-th case in parallel processes, which are stopped at the deadline."""
    (number, count), began = part, time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        logs = how.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        names = [f"{tool}-{number + count * j}-of-{count * how.jobs}" for j in range(how.jobs)]
        files = [(logs / f"{name}.txt", Path(folder, f"{name}.json")) for name in names]
        processes = []
        for j, (log, lines) in enumerate(files):
            share = f"{number + count * j}/{count * how.jobs}"
            words = [*command(tool, sanitizer), "--part", share, "--lines", str(lines)]
            gpu = {"CUDA_VISIBLE_DEVICES": str(j % how.gpus)} if how.gpus > 1 else {}
            processes.append(_start(words, log, gpu))
        for process in processes:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        outputs = [log.read_text(errors="replace") for log, _ in files]
        told = [lines.read_text() for _, lines in files if lines.exists()]
    findings = Findings()
    for text in outputs if tool != PLAIN else ():
        findings.add(parse(text))
    outcomes = {o["case"]: o for text in told for o in map(json.loads, text.splitlines())}
    return Run(
        cases=len(outcomes),
        unfinished=[c.name for c in chosen((), part) if c.name not in outcomes],
        wrong={name: o["wrong"] for name, o in outcomes.items() if o["wrong"] is not None},
        kernels=sorted({k for o in outcomes.values() for k in o["kernels"]}),
        findings=findings,
        seconds=time.monotonic() - began,
    )


def _environment() -> dict[str, str]:
    """An environment in which the driver makes every allocation, so that the tools know its end."""
    return {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1"}


def _start(words: list[str], log: Path, gpu: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a process in its own process group, with variables that say which GPU it sees."""
    with log.open("w") as file:
        return subprocess.Popen(
            words, env={**_environment(), **gpu}, cwd=ROOT,
            stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip


# The record


def merged(old: dict[str, Any], header: dict[str, Any], tool: str, part: str, new: Run) -> dict:
    """The record with a run added; runs of another commit or of other parts are dropped."""
    tools = old.get("tools", {}) if old.get("commit") == header["commit"] else {}
    parts = tools.get(tool, {}).get("parts", {})
    count = part.split("/")[1]
    parts = {p: run for p, run in parts.items() if p.split("/")[1] == count}
    parts[part] = {"clean": new.clean, **asdict(new), "seconds": round(new.seconds, 1)}
    kernels = sorted({k for run in parts.values() for k in run["kernels"]})
    whole = len(parts) == int(count)
    never = sorted(kernels_of(header["arch"]) - set(kernels)) if whole else None
    total = {
        "clean": whole and not never and all(run["clean"] for run in parts.values()),
        "cases": sum(run["cases"] for run in parts.values()),
        "errors": sum(run["findings"]["errors"] for run in parts.values()),
        "warnings": sum(run["findings"]["warnings"] for run in parts.values()),
        "unjudged": sum(
            n for r in parts.values() for k in r["unjudged"].values() for n in k.values()
        ),
        "seconds": round(sum(run["seconds"] for run in parts.values()), 1),
        "kernels": kernels,
        "never_ran": never,
        "parts": dict(sorted(parts.items())),
    }
    return {**header, "tools": {**tools, tool: total}}


def find_sanitizer() -> str | None:
    """The path of compute-sanitizer, found on PATH or in a CUDA toolkit."""
    homes = (os.environ.get("CUDA_HOME"), "/usr/local/cuda")
    folders = [str(Path(home, "bin")) for home in homes if home]
    return shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ["PATH"], *folders]))


def output_of(*words: str) -> str:
    """The output of a command."""
    done = subprocess.run(
        words, env=_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return done.stdout


def said_of(sanitizer: str, tool: str, kernel: str) -> str:
    """A tool's findings about a kernel of `sanitizer_canary`."""
    program = [sys.executable, str(ROOT / "tests/support/sanitizer_canary.py"), kernel]
    return output_of(sanitizer, "--tool", tool, *COMMON, *OPTIONS[tool], *program)


def unjudged_kernels(sanitizer: str, arch: int) -> dict[str, Any]:
    """Kernels whose races are not judged, and why: racecheck's report on a correct kernel."""
    if arch != 90:
        return {}
    found = parse(said_of(sanitizer, "racecheck", "handed_over")).by_kernel
    return {"kernels": sorted(SPECIALIZED), "canary": found} if found else {}


def canary(sanitizer: str) -> tuple[int, str]:
    """An exit code, and memcheck's findings about a kernel that writes out of bounds."""
    said = said_of(sanitizer, "memcheck", "out_of_bounds")
    if not supported(said):
        return UNSUPPORTED, f"compute-sanitizer does not support this machine\n{said}"
    if not parse(said).errors:
        return BLIND, f"compute-sanitizer does not see an error that is there\n{said}"
    return CLEAN, f"of a write out of bounds memcheck says {parse(said).by_kernel}"


def header_of(sanitizer: str) -> dict[str, Any]:
    """The header of all records, with the sanitizer's version."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    major, minor = torch.cuda.get_device_capability()
    version = re.search(r"Version (\S+)", output_of(sanitizer, "--version"))
    run_header = import_module("moe_ops.bench.harness").run_header
    found = version[1] if version else "unknown"
    arch = 10 * major + minor
    unjudged = unjudged_kernels(sanitizer, arch)
    return {**run_header(), "arch": arch, "sanitizer": found, "unjudged": unjudged}


def say(tool: str, result: Run, never: list[str] | None) -> None:
    """Print a line about a run, and its findings."""
    found = result.findings
    print(
        f"{tool}: {result.cases} cases, {len(result.wrong)} wrong, "
        f"{len(result.unfinished)} unfinished, {found.errors} errors, {found.warnings} warnings, "
        f"{found.aborted} aborted, {result.seconds:.0f} s"
    )
    for name, wrong in result.wrong.items():
        print(f"  wrong: {name}: {wrong.splitlines()[0]}")
    for kernel, messages in found.by_kernel.items():
        for message, count in messages.items():
            print(f"  {kernel}: {count} x {message}")
    for kernel, messages in result.unjudged.items():
        print(f"  not judged: {kernel}: {sum(messages.values())} x")
    if never:
        print(f"  never ran: {' '.join(never)}")
    sys.stdout.flush()


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="the folder of records")
    parser.add_argument("--part", default="1/1", help="i/n: every n-th case")
    parser.add_argument("--jobs", type=int, default=8, help="processes beside each other")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs that the processes share")
    parser.add_argument("--tools", nargs="+", choices=list(OPTIONS), default=list(OPTIONS)[:3])
    parser.add_argument("--limit", type=float, default=510, help="seconds for everything")
    parser.add_argument("--logs", type=Path, help="keep what processes print in this folder")
    return parser.parse_args()


def ready() -> tuple[int, str]:
    """A working sanitizer; or an exit code and the reason why nothing can be checked."""
    sanitizer = find_sanitizer()
    if sanitizer is None:
        return NO_SANITIZER, "compute-sanitizer is not installed"
    if not torch.cuda.is_available():
        return UNSUPPORTED, "there is no CUDA device"
    code, said = canary(sanitizer)
    print(said)
    return code, said if code else sanitizer


def main() -> int:
    """Run the tools one after another, writing the record after each."""
    args, began = arguments(), time.monotonic()
    part = part_of(args.part)
    code, sanitizer = ready()
    if code:
        print(f"nothing was checked: {sanitizer.splitlines()[0]}")
        return code
    header = header_of(sanitizer)
    path = import_module("moe_ops.bench.harness").record_path(args.output, "sanitizer.json")
    record = json.loads(path.read_text()) if path.exists() else {}
    tools = (PLAIN, *args.tools)
    for number, tool in enumerate(tools):
        left = began + args.limit - time.monotonic()
        share = left / 2 if tool == PLAIN else left / (len(tools) - number)
        deadline = time.monotonic() + share
        result = run(tool, sanitizer, part, How(args.jobs, args.logs, args.gpus), deadline)
        if tool == "racecheck":
            findings, apart = result.findings.without(header["unjudged"].get("kernels", ()))
            result = replace(result, findings=findings, unjudged=apart)
        record = merged(record, header, tool, args.part, result)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1) + "\n")
        never = record["tools"][tool]["never_ran"]
        say(tool, result, never)
        if not result.clean or never:
            code = FOUND
    return code


if __name__ == "__main__":
    sys.exit(main())
