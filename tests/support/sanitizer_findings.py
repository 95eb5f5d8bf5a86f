"""Findings in the output of compute-sanitizer, by kernel."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field


@dataclass
class Findings:
    """The findings of one process, or their sum over several."""

    errors: int = 0
    warnings: int = 0
    aborted: int = 0
    """Processes without a summary, because they or the sanitizer did not finish."""
    by_kernel: dict[str, dict[str, int]] = field(default_factory=dict)
    """Counts of messages, by kernel and message."""

    def add(self, other: Findings) -> None:
        """Add the findings of another process."""
        self.errors += other.errors
        self.warnings += other.warnings
        self.aborted += other.aborted
        for kernel, messages in other.by_kernel.items():
            mine = self.by_kernel.setdefault(kernel, {})
            for message, count in messages.items():
                mine[message] = mine.get(message, 0) + count

    def without(self, kernels: Collection[str]) -> tuple[Findings, dict[str, dict[str, int]]]:
        """The findings without those of ``kernels``, and the messages about ``kernels``."""
        apart = {k: said for k, said in self.by_kernel.items() if k in kernels}
        rest = {k: said for k, said in self.by_kernel.items() if k not in kernels}
        counts = [
            sum(n for said in apart.values() for text, n in said.items() if text.startswith(kind))
            for kind in ("Error", "Warning")
        ]
        left = Findings(self.errors - counts[0], self.warnings - counts[1], self.aborted, rest)
        return left, apart


SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")
RACES = re.compile(r"RACECHECK SUMMARY: .*\((\d+) errors?, (\d+) warnings?\)")
PLACES = re.compile(r"\b(\w+_kernel)\b|\bat (?:0x\w+ in [^:]*:\d+:)?([A-Za-z_][\w:]*)")
NOT_FOUND = ("COMPUTE-SANITIZER", "ERROR SUMMARY", "RACECHECK SUMMARY", "LEAK SUMMARY")


def supported(output: str) -> bool:
    """Whether the sanitizer supports the GPU."""
    return "device not supported" not in output.lower()


def parse(output: str) -> Findings:
    """Parse the output of one process of a tool: its summary, and each message by kernel."""
    found, blocks = Findings(), []
    for line in output.splitlines():
        if not line.startswith("========="):
            continue
        text = line[9:]
        if text.startswith("  "):  # continues the previous message
            if blocks:
                blocks[-1].append(text.strip())
        elif text.strip() and not text.strip().startswith(NOT_FOUND):
            blocks.append([text.strip()])
    for first, *rest in blocks:
        found.add(Findings(by_kernel={_kernel(first, rest): {_message(first): 1}}))
    races, summary = RACES.search(output), SUMMARY.search(output)
    if races:
        found.errors, found.warnings = int(races[1]), int(races[2])
    elif summary:
        found.errors = int(summary[1])
    else:
        found.aborted = 1
    return found


def _kernel(first: str, rest: Sequence[str]) -> str:
    """The first kernel that a message names, else the first function."""
    names = [match for line in (first, *rest) for match in PLACES.finditer(line)]
    kernels, others = [m[1] for m in names if m[1]], [m[2] for m in names if m[2]]
    return (kernels or others or ["unknown"])[0]


def _message(first: str) -> str:
    """A message without the parts that vary between runs."""
    return re.sub(
        r"0x[0-9a-fA-F]+", "0x..", re.sub(r" in block \(.*?\)| \[\d+ hazards?\]", "", first)
    )
