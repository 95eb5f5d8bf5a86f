"""Time two checkouts of this repository alternately on one GPU: what did a change cost?

    python benchmarks/side_by_side.py ../before . --model qwen3-30b --output side_by_side.json

Each checkout has a process for each shape, which captures `fused_moe` in a CUDA graph for every
cell (a scheme and a number of tokens) and then times the cells that it is asked for, so that the
two checkouts take turns within a second. Weights are random bytes that stand for small numbers, the
same in both. Without a GPU nothing is captured, and the times say nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

from moe_ops.bench.problems import find_problem

WORKER = Path(__file__).with_name("timed_checkout.py")
AGAIN = 1.03
"""Cells whose ratio is above this are timed again in more rounds."""
MORE_ROUNDS = 10


class Served:
    """The process of one checkout."""

    def __init__(self, checkout: Path, arguments: list[Any]) -> None:
        environment = {**os.environ, "PYTHONPATH": str(checkout.resolve()), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(WORKER), json.dumps(arguments)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(command, text=True, env=environment, **pipes)

    def ready(self) -> None:
        """Wait until every cell is captured."""
        if self.process.stdout.readline().strip() != "ready":
            raise RuntimeError("a checkout failed before anything was timed: see above")

    def time_us(self, cell: int, runs: int) -> float:
        """Median of so many replays."""
        self.process.stdin.write(f"{cell} {runs}\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())

    def close(self) -> None:
        """End the process."""
        self.process.stdin.close()
        self.process.wait()


def compare(both: list[Served], cell: int, tokens: int, rounds: int) -> dict[str, float]:
    """Medians of both over rounds in which they take turns, and the second's over the first's."""
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds):
        for which in (0, 1) if number % 2 == 0 else (1, 0):
            times[which].append(both[which].time_us(cell, 24 if tokens <= 512 else 10))
    before, after = map(statistics.median, times)
    return {"before_us": before, "after_us": after, "ratio": after / before}


def main() -> None:
    """Time every cell of every shape, print what is slower, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkouts", nargs=2, type=Path, help="before, after")
    parser.add_argument(
        "--model", default="qwen3-30b", help="names in shapes.json, comma-separated"
    )
    parser.add_argument("--scheme", default="unquantized,fp8_block128,fp8_channel")
    parser.add_argument("--tokens", default="1,8,64,512,4096,16384")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    cells = list(product(options.scheme.split(","), map(int, options.tokens.split(","))))
    rows: list[dict[str, Any]] = []
    for problem in map(find_problem, options.model.split(",")):
        sizes = [problem.num_experts, problem.top_k, problem.hidden_size, problem.intermediate_size]
        both = [Served(checkout, [sizes, "silu", cells]) for checkout in options.checkouts]
        for served in both:
            served.ready()
        for i, (scheme, tokens) in enumerate(cells):
            row = compare(both, i, tokens, options.rounds)
            if row["ratio"] > AGAIN:
                row = {**compare(both, i, tokens, MORE_ROUNDS), "first_ratio": row["ratio"]}
            rows.append({"shape": problem.name, "scheme": scheme, "M": tokens, **row})
            print(f"{problem.name:16s}{scheme:18s}{tokens:6d}  {row['ratio']:.3f}", flush=True)
        for served in both:
            served.close()
    ratios = [row["ratio"] for row in rows]
    print(f"geometric mean {statistics.geometric_mean(ratios):.4f}, largest {max(ratios):.3f}")
    if options.output:
        options.output.write_text(json.dumps({"command": sys.argv, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
