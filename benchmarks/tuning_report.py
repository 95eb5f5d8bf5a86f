"""The record of `python -m moe_ops tune --record benchmarks/results` as a Markdown table."""

from __future__ import annotations

from tables import Record, markdown, source

LEGEND = """\
Time of both GEMMs with the analytic tiles over their time with the best tiles that `moe-ops tune`
found, L2 evicted. 1.00: nothing was more than 2 % faster than the analytic tiles."""
NONE = "No record yet: `moe-ops tune --record benchmarks/results` makes one."


def report(records: list[Record]) -> str:
    """The Markdown of all ``records``: a table per GPU."""
    parts = [
        f"### Tuned tiles: {record['gpu']}\n\n{source(record)}\n\n{_table(record['rows'])}"
        for record in records
    ]
    return "\n\n".join([LEGEND, *parts]) if parts else NONE


def _table(rows: list[Record]) -> str:
    """A line per scheme and layer, a column per number of tokens."""
    counts = sorted({row["M"] for row in rows})
    cells: dict[tuple[str, str], dict[int, float]] = {}
    for row in rows:
        cells.setdefault((row["scheme"], row["shape"]), {})[row["M"]] = row["ratio"]
    lines = [
        [f"`{scheme}`", shape, *(f"{ratios[m]:.2f}" if m in ratios else "-" for m in counts)]
        for (scheme, shape), ratios in sorted(cells.items())
    ]
    return markdown(["scheme", "layer", *map(str, counts)], lines, labels=2)
