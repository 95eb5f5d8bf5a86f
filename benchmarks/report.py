"""Write the layer records as the table of a Markdown file, between two markers.

python benchmarks/report.py                     # print it
python benchmarks/report.py --write README.md   # and put it between the markers there
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
RESULTS = Path(__file__).with_name("results")
TOKENS = (1, 8, 64, 512, 4096, 16384)
OURS = "moe_ops"
LEGEND = f"""\
Microseconds for the whole layer, uniform routing: median over replays of a CUDA graph, each with a
cold L2 cache. In brackets the time of {OURS} over that line's: below 1, {OURS} is faster. Bold is
the fastest. The floor is the least that the GPU's bandwidth and arithmetic allow; how all of it is
measured: `benchmarks/README.md`."""

Record = dict[str, Any]


def read_records(results: Path) -> list[Record]:
    """The layer records of every GPU under ``results``."""
    return [json.loads(path.read_text()) for path in sorted(results.glob("*/layer.json"))]


def report(records: list[Record]) -> str:
    """The Markdown of all ``records``: one table a GPU and scheme, uniform routing."""
    if not records:
        return "No results yet."
    return "\n\n".join([LEGEND, *(part for record in records for part in _parts(record))])


def source(record: Record) -> str:
    """What was measured, on what, when."""
    # Rows of several runs may stand together: each says which commit it is of.
    rows = record["rows"]
    commits = sorted({_short(row.get("commit", record["commit"])) for row in rows})
    return (
        f"{record['gpu']}, driver {record['driver']}, torch {record['torch']}, Triton"
        f" {record['triton']}; commit{'s' * (len(commits) > 1)} {', '.join(commits)};"
        f" {record['date'][:10]}."
    )


def _short(commit: str) -> str:
    name, dash, dirty = commit.partition("-")
    return f"{name[:7]}{dash}{dirty}"


def _parts(record: Record) -> list[str]:
    by_scheme = defaultdict(list)
    for row in record["rows"]:
        if row["routing"] == "uniform" and row["M"] in TOKENS:
            by_scheme[row["scheme"]].append(row)
    tables = [f"`{scheme}`:\n\n{_table(rows)}" for scheme, rows in sorted(by_scheme.items())]
    return [source(record), *tables]


def _table(rows: list[Record]) -> str:
    tokens = [m for m in TOKENS if any(row["M"] == m for row in rows)]
    head = ["shape", "tokens:", *map(str, tokens)]
    lines = [head, ["---", "---", *["--:"] * len(tokens)]]
    for shape in dict.fromkeys(row["shape"] for row in rows):
        lines += _shape_lines(shape, [row for row in rows if row["shape"] == shape], tokens)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _shape_lines(shape: str, rows: list[Record], tokens: list[int]) -> list[list[str]]:
    """The lines of one shape: moe_ops, the floor, and each peer."""
    times: dict[str, dict[int, float]] = {OURS: {}, "floor": {}}
    for row in rows:
        times.setdefault(row["impl"], {})[row["M"]] = row["time_us"]
        if row["floor_us"] is not None:
            times["floor"][row["M"]] = row["floor_us"]
    peers = sorted(times.keys() - {OURS, "floor"})
    contest = [times[impl] for impl in (OURS, *peers)] if peers else []

    def cell(impl: str, m: int) -> str:
        time, ours = times[impl].get(m), times[OURS].get(m)
        if time is None:
            return "-"
        text = f"{time:.1f}" if time < 100 else f"{time:.0f}"
        if impl != "floor" and all(time <= other.get(m, time) for other in contest):
            text = f"**{text}**" if contest else text
        return text if impl == OURS or ours is None else f"{text} ({ours / time:.2f})"

    impls = [impl for impl in (OURS, "floor", *peers) if times[impl]]
    return [
        [shape if impl == impls[0] else "", impl, *(cell(impl, m) for m in tokens)]
        for impl in impls
    ]


def between_markers(text: str, begin: str = BEGIN, end: str = END) -> str | None:
    """What stands between the markers of ``text``; None where it has none."""
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(end) < text.index(begin):
        return None
    return text.partition(begin)[2].partition(end)[0].strip()


def write_report(path: Path, content: str, begin: str = BEGIN, end: str = END) -> None:
    """Put ``content`` between the markers of the file.

    Raises:
        SystemExit: it lacks the markers, or has them more than once.
    """
    text = path.read_text()
    if between_markers(text, begin, end) is None:
        raise SystemExit(f"{path} must have one line {begin} and, after it, one line {end}")
    before, after = text.partition(begin)[0], text.partition(end)[2]
    path.write_text(f"{before}{begin}\n{content}\n{end}{after}")


def main() -> None:
    """Print the report, and write it where asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the records")
    parser.add_argument("--write", type=Path, metavar="FILE", help="a file that has the markers")
    args = parser.parse_args()
    records = read_records(args.results)
    if args.write:
        write_report(args.write, report(records))
        for record in records:
            print(f"{args.write}: {source(record)}")
    else:
        print(report(records))


if __name__ == "__main__":
    main()
