"""The record of `python benchmarks/inside_vllm.py` as Markdown tables."""

from __future__ import annotations

from peers import INSIDE
from report import layer_table, source
from tables import OURS, TOKENS, Record

NAMES = {INSIDE: OURS, "vllm-method-marlin": "Marlin", "vllm-method-humming": "Humming"}
"""Implementation -> its name in the table."""
LEGEND = f"""\
Microseconds for the whole layer inside vLLM's modular kernel, uniform routing: median over replays
of a CUDA graph, each with a cold L2 cache. In brackets the time of {OURS} over that line's: below
1, {OURS} is faster. Bold is the fastest. The estimate is the time that bandwidth and arithmetic
need at measured rates."""


def report(records: list[Record]) -> str:
    """The Markdown of all ``records``: versions, and a table per GPU and scheme."""
    if not records:
        return "No results yet."
    return "\n\n".join([LEGEND, *(part for record in records for part in _parts(record))])


def _parts(record: Record) -> list[str]:
    rows = [
        {**row, "impl": NAMES[row["impl"]]}
        for row in record["rows"]
        if row["impl"] in NAMES and row["M"] in TOKENS
    ]
    versions = " and ".join(
        f"{name} {', '.join(sorted({row['config'][key] for row in rows if key in row['config']}))}"
        for name, key in (("vLLM", "vllm"), ("Humming", "humming-kernels"))
    )
    parts = [f"{versions} on {source(record)}"]
    for scheme in sorted({row["scheme"] for row in rows}):
        table = layer_table([row for row in rows if row["scheme"] == scheme])
        parts += [f"#### {record['gpu']} inside vLLM: {scheme}", table]
    return parts
