"""The records of layers inside serving engines as Markdown tables."""

from __future__ import annotations

from inside import Engine
from report import layer_table
from tables import OURS, TOKENS, Record, source

LEGEND = f"""\
Microseconds for the whole layer inside {{}}, uniform routing: median over replays
of a CUDA graph, each with a cold L2 cache. In brackets the time of {OURS} over that line's: below
1, {OURS} is faster. Bold is the fastest. The estimate is the time that bandwidth and arithmetic
need at measured rates."""


def report(records: list[Record], engine: Engine) -> str:
    """The Markdown of all ``records`` of an engine: versions, and a table per GPU and scheme."""
    if not records:
        return "No results yet."
    parts = (part for record in records for part in _parts(record, engine))
    return "\n\n".join([LEGEND.format(engine.runs), *parts])


def _parts(record: Record, engine: Engine) -> list[str]:
    rows = [
        {**row, "impl": engine.impls[row["impl"]]}
        for row in record["rows"]
        if row["impl"] in engine.impls and row["M"] in TOKENS
    ]
    versions = " and ".join(
        f"{name} {', '.join(sorted({row['config'][key] for row in rows if key in row['config']}))}"
        for name, key in engine.distributions.items()
    )
    parts = [f"{versions} on {source(record)}", *_tuned(rows, engine)]
    for scheme in sorted({row["scheme"] for row in rows}):
        table = layer_table([row for row in rows if row["scheme"] == scheme])
        parts += [f"#### {record['gpu']} inside {engine.name}: {scheme}", table]
    return parts


def _tuned(rows: list[Record], engine: Engine) -> list[str]:
    """A sentence on tuned tiles, if rows say whether the engine ships them."""
    told = [row for row in rows if "tuned" in row["config"]]
    tuned = {f"{row['shape']} in {row['scheme']}" for row in told if row["config"]["tuned"]}
    ships = f"{engine.name} ships tuned tiles for this GPU for"
    return [f"{ships} {', '.join(sorted(tuned)) or 'none of these layers'}."] if told else []
