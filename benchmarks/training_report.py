"""The records of `bench_training.py` and `bench_training_ranks.py` as Markdown tables."""

from __future__ import annotations

from typing import Any

from tables import OURS, Record, markdown, source

LEGEND = """\
Forward and backward of one layer: gradients of tokens, router weights and all weights; of
adapters (LoRA) over frozen weights; or of tokens and router weights alone, so that the difference
is what adapters cost. Times in milliseconds: an eager step, and in brackets the
replay of a CUDA graph. TFLOP/s are those of the faster one. Peak: the memory of an eager step
beyond what was there before, gradients included. Kept: what forward keeps for backward without
weights, and in brackets what SonicMoE's formula says (arXiv 2512.14080). `moe_ops-main` adds weight
gradients to float32 main gradients inside its kernels, `moe_ops-added` after the backward pass."""
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


RANKS_LEGEND = """\
Each GPU has as many tokens as the column says, and as many experts as the others; one GPU has all
experts. Eager steps, router included. TFLOP/s are those of one GPU."""
RANKS_HEAD = [
    "layer", "experts over", "tokens", "forward (ms)", "backward (ms)", "TFLOP/s", "of forward",
    "of backward",
]  # fmt: skip


def over_ranks(records: list[Record]) -> str:
    """The Markdown of all ``records`` of `bench_training_ranks.py`: a table per GPU."""
    parts = [RANKS_LEGEND]
    for record in records:
        rows = sorted(record["rows"], key=lambda r: (r["shape"], r["M"], r["ranks"], r["impl"]))
        parts += [source(record), markdown(RANKS_HEAD, [_over(row) for row in rows], labels=2)]
    return "\n\n".join(parts)


def _over(row: Record) -> list[str]:
    """The cells of a layer on one GPU, or over some by an exchange."""
    where = row["impl"] if row["ranks"] == 1 else f"{row['ranks']} GPUs, `{row['impl']}`"
    times = [f"{row[f'{part}_us'] / 1e3:.2f}" for part in ("forward", "backward")]
    speeds = [f"{row[f'{part}tflop_per_s']:.0f}" for part in ("", "forward_", "backward_")]
    return [row["shape"], where, str(row["M"]), *times, *speeds]


def _ms(row: Record | None) -> str:
    return "-" if row is None else f"{row['time_us'] / 1e3:.2f}"
