"""The record of `bench_models.py` as Markdown tables."""

from __future__ import annotations

from tables import OURS, Record, beside_ours, cell, markdown, source

NONE = "No whole model has been timed on a GPU yet (`python benchmarks/bench_models.py`)."
LEGEND = f"""\
Tokens per second, of all sequences together. In brackets: how many times as many {OURS} makes with
the same weights; without brackets, what nothing else runs. A dash is what was not timed."""
MODES = {
    "eager": "Eager: a step ends before the host begins the next one.",
    "captured": "One step captured in a CUDA graph and replayed.",
    "compiled": "The step under `torch.compile`, then captured.",
}


def report(records: list[Record]) -> str:
    """The Markdown of all ``records``: one table per GPU, model and mode."""
    parts = [part for record in records for part in _parts(record)]
    return "\n\n".join([LEGEND, *parts]) if parts else NONE


def timed(record: Record) -> list[Record]:
    """The rows that are not skipped."""
    return [row for row in record["rows"] if row["skipped"] is None]


def models_of(rows: list[Record]) -> list[tuple[str, int]]:
    """Models with their layers, in the order of the rows."""
    return list(dict.fromkeys((row["model"], row["layers"]) for row in rows))


def title(model: str, layers: int, rows: list[Record]) -> str:
    """The model's name; with its layers if it had fewer than are published."""
    published = max(row["config"]["published_layers"] for row in rows)
    return model if layers == published else f"{model}, {layers} of {published} layers"


def impls_of(rows: list[Record]) -> list[tuple[str, str]]:
    """Schemes with implementations: bf16 first, and of each scheme this library first."""
    pairs = {(row["scheme"], row["impl"]) for row in rows}
    return sorted(pairs, key=lambda pair: (pair[0] != "bf16", pair[0], pair[1] != OURS, pair[1]))


def cases_of(rows: list[Record]) -> list[tuple[str, int]]:
    """Phases with their tokens."""
    return sorted({(row["phase"], row["M"]) for row in rows})


def _parts(record: Record) -> list[str]:
    rows = timed(record)
    parts = [f"## {record['gpu']}", source(record)] if rows else []
    for model, layers in models_of(rows):
        mine = [row for row in rows if (row["model"], row["layers"]) == (model, layers)]
        parts.append(f"### {record['gpu']}: {title(model, layers, mine)}")
        for mode, text in MODES.items():
            part = [row for row in mine if row["mode"] == mode]
            if part:
                parts += [text, _table(part)]
    skipped = _skipped(record)
    return [*parts, skipped] if skipped else parts


def _table(rows: list[Record]) -> str:
    """A line per scheme and implementation: a column per phase, memory and active experts."""
    cases = cases_of(rows)
    speed = {(r["impl"], r["scheme"], r["phase"], r["M"]): r["tokens_per_s"] for r in rows}
    lines = []
    for scheme, impl in impls_of(rows):
        places = [(scheme, *case) for case in cases]
        cells = beside_ours(speed, impl, places, "{:,.0f}".format)
        peaks = [r["peak_bytes"] for r in rows if (r["scheme"], r["impl"]) == (scheme, impl)]
        largest = max((peak for peak in peaks if peak), default=None)
        memory = cell(largest, None, lambda peak: f"{peak / 1e9:.1f}")
        lines.append([f"`{scheme}`", impl, *cells, memory])
    head = ["scheme", "", *(f"{phase} {m}" for phase, m in cases), "peak memory, GB"]
    return markdown(head, lines, labels=2)


def _skipped(record: Record) -> str | None:
    """A line per reason for which something was skipped; None without such rows."""
    reasons = {
        (row["model"], row["scheme"], row["impl"], row["skipped"])
        for row in record["rows"]
        if row["skipped"]
    }
    if not reasons:
        return None
    lines = [
        [model, f"`{scheme}`", impl, why.replace("|", "\\|")]
        for model, scheme, impl, why in sorted(reasons)
    ]
    return f"Skipped:\n\n{markdown(['model', 'scheme', '', 'reason'], lines, labels=4)}"
