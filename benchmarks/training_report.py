"""The record of `python benchmarks/bench_training.py` as a Markdown table."""

from __future__ import annotations

from typing import Any

from report import OURS, markdown, source

LEGEND = """\
Forward and backward of one layer: gradients of tokens, router weights and all weights; of
adapters (LoRA) over frozen weights; or of tokens and router weights alone, so that the difference
is what adapters cost. Times in milliseconds: an eager step, and in brackets the
replay of a CUDA graph. TFLOP/s are those of the faster one. Peak: the memory of an eager step
beyond what was there before, gradients included. Kept: what forward keeps for backward without
weights, and in brackets what SonicMoE's formula says (arXiv 2512.14080)."""
HEAD = [
    "layer",
    "trained",
    "weights",
    "tokens",
    "implementation",
    "ms",
    "TFLOP/s",
    "peak (MB)",
    "kept (MB)",
]
LABELS = {"all": "all weights", "adapters": "adapters", "frozen": "tokens alone"}

Record = dict[str, Any]


def report(records: list[Record]) -> str:
    """The Markdown of all ``records``: a table per GPU, uniform routing."""
    return "\n\n".join([LEGEND, *(f"{source(r)}\n\n{_table(r['rows'])}" for r in records)])


def _table(rows: list[Record]) -> str:
    """A line per layer, what is trained, scheme, tokens and implementation."""
    cells: dict[tuple[Any, ...], dict[str, Record]] = {}
    for row in rows:
        if row["routing"] == "uniform":
            case = (row["shape"], [*LABELS].index(row["trained"]), row["scheme"], row["M"])
            key = (*case, row["impl"] != OURS, row["impl"])
            cells.setdefault(key, {})[row["mode"]] = row
    return markdown(HEAD, [_line(cells[key]) for key in sorted(cells)], labels=5)


def _line(modes: dict[str, Record]) -> list[str]:
    """The cells of one implementation of a case."""
    best = min(modes.values(), key=lambda row: row["time_us"])
    eager, captured = (_ms(modes.get(mode)) for mode in ("eager", "captured"))
    time = eager if captured == "-" else f"{eager} ({captured})"
    kept = f"{best['saved_bytes'] / 1e6:.0f} ({best['formula_bytes'] / 1e6:.0f})"
    case = [best["shape"], LABELS[best["trained"]], f"`{best['scheme']}`", str(best["M"])]
    speed, peak = f"{best['tflop_per_s']:.0f}", f"{best['peak_bytes'] / 1e6:.0f}"
    return [*case, best["impl"], time, speed, peak, kept]


def _ms(row: Record | None) -> str:
    return "-" if row is None else f"{row['time_us'] / 1e3:.2f}"
