"""Compare a layer record with a file of times to beat.

    python benchmarks/compare.py TARGETS.json [--record benchmarks/results/<gpu>/layer.json]

The file lists cells, by themselves or under ``cells``: ``scheme``, ``shape``, ``M``, and times in
microseconds that may be absent or null: ``best_peer_us``, ``goal_us``, and ``peers_us`` by name.
Its cells are compared with the rows of uniform routing; ratios below 1 are faster.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tables import RESULTS

from moe_ops.bench.command import Lines

WIDTHS = {
    "scheme": 16, "shape": 14, "M": 6, "time_us": 9, "x floor": 8, "x vllm": 8, "best_peer": 26,
    "x best": 8, "goal_us": 8, "x goal": 8,
}  # fmt: skip
RATIOS = ("x floor", "x vllm", "x best", "x goal")


def compared(record: dict[str, Any], targets: Any, impl: str = "moe_ops") -> list[dict[str, Any]]:
    """The cells in both files, with the ratios of the measured time to the targets' times."""
    times = {
        (row["scheme"], row["shape"], row["M"]): row["time_us"]
        for row in record["rows"]
        if (row["impl"], row["routing"]) == (impl, "uniform")
    }
    cells = []
    for target in targets["cells"] if isinstance(targets, dict) else targets:
        key = tuple(target[name] for name in ("scheme", "shape", "M"))
        if key in times:
            time = times[key]
            bounds = {
                "x floor": target.get("floor_us"),
                "x vllm": target.get("peers_us", {}).get("vllm-triton"),
                "x best": target.get("best_peer_us"),
                "x goal": target.get("goal_us"),
            }
            ratios = {name: time / bound if bound else None for name, bound in bounds.items()}
            cells.append({**target, "time_us": time, **ratios})
    return cells


def summary(cells: list[dict[str, Any]]) -> str:
    """The number of cells that reach each target, and the geometric mean of each ratio."""
    lines = []
    for name in RATIOS:
        ratios = [cell[name] for cell in cells if cell[name] is not None]
        if ratios:
            reached, mean = sum(r <= 1 for r in ratios), statistics.geometric_mean(ratios)
            lines.append(f"{name}: {mean:.3f} on average; at most 1 in {reached} of {len(ratios)}")
    return "\n".join(lines)


def find_record(results: Path) -> Path:
    """The only layer record under ``results``.

    Raises:
        SystemExit: there is no record, or more than one.
    """
    records = sorted(results.glob("*/layer.json"))
    if len(records) != 1:
        raise SystemExit(f"--record must be given: {len(records)} layer.json under {results.name}")
    return records[0]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one line per cell, and a summary."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("targets", type=Path, help="the JSON file")
    parser.add_argument("--record", type=Path, help="a layer.json (default: the only one there is)")
    parser.add_argument("--impl", default="moe_ops", help="whose rows (default: %(default)s)")
    args = parser.parse_args(arguments)
    path = args.record or find_record(RESULTS)
    for path_given in (path, args.targets):
        if not path_given.is_file():
            parser.error(f"no such file: {path_given}")
    record = json.loads(path.read_text())
    targets = json.loads(args.targets.read_text())
    cells = compared(record, targets, args.impl)
    if not cells:
        raise SystemExit(f"no row of {args.impl} with uniform routing is in {args.targets.name}")
    Lines(WIDTHS, dict)(cells, head=True)
    print(f"\n{len(cells)} cells of {record['gpu']}\n{summary(cells)}")


if __name__ == "__main__":
    main()
