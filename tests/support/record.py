"""The record of `make gpu-test`: test outcomes on this GPU, merged over parts of one commit.

Environment variables:

* ``MOE_OPS_RECORD``: the file to write, or to merge into if it is of this commit.
* ``MOE_OPS_PART``: which part of the suite this run is, such as ``1/2``. The record is complete
  once all parts of that number are in it. A run that names no part leaves no record complete.
* ``MOE_OPS_COMMIT``: the commit, where git cannot say it (a copied tree).
"""

from __future__ import annotations

import datetime
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

UNKNOWN = "unknown"
EXAMPLES = "hypothesis_examples"


def commit() -> str:
    """``MOE_OPS_COMMIT``, else git's commit, else `UNKNOWN`."""
    if "MOE_OPS_COMMIT" in os.environ:
        return os.environ["MOE_OPS_COMMIT"]
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True)
    except FileNotFoundError:  # no git
        return UNKNOWN
    return done.stdout.strip() or UNKNOWN


def pytest_configure(config):
    """Refuse a record of an unknown commit before tests run: parts could not be told apart."""
    if os.environ.get("MOE_OPS_RECORD") and commit() == UNKNOWN:
        raise pytest.UsageError("MOE_OPS_COMMIT must name the commit where git cannot say it")


def parts_run(previous: dict, part: str | None, run: dict) -> tuple[dict[str, dict], bool]:
    """The parts of the suite that a record holds, and whether these are all.

    Args:
        previous: the record to merge into; empty if there is none of this commit.
        part: which part this run was, such as ``1/2``; None: none, or it did not end.
        run: what the record says of this run.
    """
    if part is None:
        return {}, False
    count = part.split("/")[1]
    known = previous.get("parts", {})
    parts = {name: old for name, old in known.items() if name.split("/")[1] == count}
    parts = dict(sorted({**parts, part: run}.items()))
    return parts, set(parts) == {f"{i + 1}/{count}" for i in range(int(count))}


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """Pass the number of hypothesis examples to the process that writes the record."""
    report = (yield).get_result()
    text = getattr(item, "hypothesis_statistics", None)
    if call.when == "teardown" and text:
        examples = sum(int(n) for n in re.findall(r"(\d+) passing", text))
        report.user_properties.append((EXAMPLES, examples))


def _by_file(reporter) -> dict[str, dict]:
    files: dict[str, dict] = {}

    def of(report) -> dict:
        name = report.nodeid.split("::")[0]
        empty = {"passed": 0, "failed": 0, "skipped": 0, "reasons": {}, "examples": 0}
        return files.setdefault(name, empty)

    for outcome, key in (("passed", "passed"), ("failed", "failed"), ("error", "failed")):
        for report in reporter.stats.get(outcome, []):
            of(report)[key] += 1
            if key == "failed":
                of(report).setdefault("failures", []).append(report.nodeid.split("::", 1)[-1])
    for report in reporter.stats.get("skipped", []):
        of(report)["skipped"] += 1
        reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
        reasons = of(report)["reasons"]
        reasons[reason] = reasons.get(reason, 0) + 1
    for reports in reporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", []):
                if name == EXAMPLES and report.when == "teardown":
                    of(report)["examples"] += value
    return files


def pytest_terminal_summary(terminalreporter, exitstatus, config):
    """Print the examples run; with MOE_OPS_RECORD write (or merge into) that JSON file.

    A worker of xdist writes nothing: it ran some of the tests, and ends even if the run does not.
    """
    files = _by_file(terminalreporter)
    terminalreporter.write_line(
        f"hypothesis examples: {sum(f['examples'] for f in files.values())}"
    )
    target = os.environ.get("MOE_OPS_RECORD")
    if not target or hasattr(config, "workerinput") or not torch.cuda.is_available():
        return
    path = Path(target)
    previous = json.loads(path.read_text()) if path.exists() else {}
    if previous.get("commit") != commit():
        previous = {}
    command = " ".join(["pytest", *config.invocation_params.args])
    ended = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    part = os.environ.get("MOE_OPS_PART") if ended and not config.option.maxfail else None
    parts, complete = parts_run(previous, part, {"command": command, "files": len(files)})
    files = {**previous.get("files", {}), **files}
    total: Counter[str] = Counter()
    for counts in files.values():
        total.update({k: v for k, v in counts.items() if isinstance(v, int)})
    import triton

    record = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": sys.version.split()[0],
        "commit": commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": command,
        "parts": parts,
        "complete": complete,
        **total,
        "files": dict(sorted(files.items())),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
