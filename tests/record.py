"""The record of `make gpu-test`: test outcomes on this GPU, merged over parts of one commit."""

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

EXAMPLES = "hypothesis_examples"


def commit() -> str:
    """``MOE_OPS_COMMIT``, else git's commit, else "unknown"."""
    if "MOE_OPS_COMMIT" in os.environ:
        return os.environ["MOE_OPS_COMMIT"]
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


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
    """Print the examples run; with MOE_OPS_RECORD write (or merge into) that JSON file."""
    files = _by_file(terminalreporter)
    terminalreporter.write_line(
        f"hypothesis examples: {sum(f['examples'] for f in files.values())}"
    )
    target = os.environ.get("MOE_OPS_RECORD")
    if not target or not torch.cuda.is_available():
        return
    path = Path(target)
    previous = json.loads(path.read_text()) if path.exists() else {}
    if previous.get("commit") == commit():
        files = {**previous["files"], **files}
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
        "command": " ".join(["pytest", *config.invocation_params.args]),
        **total,
        "files": dict(sorted(files.items())),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
