"""The record of `quality.py` as a Markdown table and as a plot."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

try:
    import matplotlib.pyplot as plt
except ImportError:  # a table needs none
    plt = None

from tables import RESULTS, Record, markdown

from moe_ops import Quant, get_scheme

LEGEND = """\
`moe_ops/demo/model` with its experts quantized. KL: how far distributions of the next token are on
average from those of the unquantized model; beside it, how often first choices are the same.
Perplexity may fall by chance. Bytes: of an expert, scales included. Hidden and intermediate
size are 128, so groups of 128 are whole rows here. A model this small says which schemes cost more
than others, not what they cost a large one."""
COLORS = {"weights only quantized": "C0", "weights, activations quantized": "C3"}
LABEL_GAP = 0.033
"""Least distance between two labels, as a fraction of the plot's height."""


def read(folder: Path = RESULTS) -> Record:
    """The record that ``quality.py --output`` has written."""
    return json.loads((folder / "quality.json").read_text())


def table(record: Record) -> str:
    """The Markdown table, a line per scheme in ascending order of divergence, and the source."""
    head = ["scheme", "activations", "weights", "bytes", "KL, nats", "same choice", "perplexity"]
    lines = []
    for row in sorted(record["rows"], key=lambda row: row["kl"]):
        scheme = get_scheme(row["scheme"])
        lines.append(
            [
                f"`{scheme.name}`",
                describe(scheme.activation),
                describe(scheme.weight),
                f"{row['bytes_per_expert']:,.0f}",
                f"{row['kl']:.1e}",
                f"{row['top1_agreement']:.2%}",
                f"{row['perplexity']:.3f}",
            ]
        )
    return f"{markdown(head, lines, labels=3)}\n\n{LEGEND}\n\n{source(record)}"


def source(record: Record) -> str:
    """A sentence that says what was measured, and with which versions."""
    return (
        f"{record['tokens']:,} held-out tokens, {record['tokens_of_a_call']:,} a call; moe_ops "
        f"{record['version']}, torch {record['torch']}, Python {record['python']}, "
        f"{record['device']}. `{record['command']}`"
    )


def describe(quant: Quant | None) -> str:
    """Describe one operand: its element, and its scale groups."""
    if quant is None:
        return "-"
    rows, cols = quant.group
    groups = {"tensor": "tensor", "channel": "row", "group": str(cols), "block": f"{rows} x {cols}"}
    group = groups[quant.granularity]
    more = [quant.scale] if quant.scale in ("pow2", "e8m0", "e4m3") else []
    more += [name for name in ("static", "zero_point") if getattr(quant, name)]
    return f"{quant.element.name} / {group}{''.join(f', {m}' for m in more)}".replace("_p", " p")


def save(record: Record, folder: Path) -> None:
    """Write the record, and the plot if matplotlib is installed.

    Rows of other schemes are kept if they were measured on the same number of tokens.
    """
    folder.mkdir(parents=True, exist_ok=True)
    old = read(folder) if (folder / "quality.json").exists() else {"tokens": 0, "rows": []}
    if old["tokens"] == record["tokens"]:
        rows = {row["scheme"]: row for row in (*old["rows"], *record["rows"])}
        record = {**record, "rows": list(rows.values())}
    (folder / "quality.json").write_text(json.dumps(record, indent=1) + "\n")
    if plt is None:
        print("no plot: matplotlib is not installed", file=sys.stderr)
    else:
        plot(record, folder / "quality.png")


def plot(record: Record, path: Path) -> None:
    """Plot KL divergence over bytes per expert."""
    figure = draw(record)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw(record: Record) -> Any:
    """Draw a panel for each group of schemes that take about the same memory."""
    rows = [row for row in record["rows"] if row["scheme"] != "unquantized"]
    groups = clusters(rows)
    figure, axes = plt.subplots(
        1, len(groups), figsize=(12, 7.5), sharey=True, squeeze=False, layout="constrained"
    )
    least, most = (extreme(row["kl"] for row in rows) for extreme in (min, max))
    axes[0, 0].set(
        yscale="log",
        ylim=(least / 1.7, most * 1.7),
        ylabel="KL divergence to the unquantized model (nats)",
    )
    figure.suptitle(
        f"The demo's model on {record['tokens']:,} held-out tokens; "
        f"bfloat16 experts take {unquantized_kib(record):.0f} KiB"
    )
    for axis, group in zip(axes.flat, groups, strict=True):
        axis.set_xlabel("bytes of an expert (KiB)")
        axis.grid(alpha=0.3, which="both")
        _label(axis, group)
    dots = [plt.Line2D([], [], color=c, marker="o", ls="", label=n) for n, c in COLORS.items()]
    figure.legend(handles=dots, ncols=len(dots), loc="outside lower center")
    return figure


def unquantized_kib(record: Record) -> float:
    """KiB per expert in bfloat16."""
    size = next(r["bytes_per_expert"] for r in record["rows"] if r["scheme"] == "unquantized")
    return size / 1024


def clusters(rows: list[Record]) -> list[list[Record]]:
    """Group rows that take about the same memory."""
    groups: list[list[Record]] = []
    for row in sorted(rows, key=lambda row: row["bytes_per_expert"]):
        if groups and row["bytes_per_expert"] < 1.2 * groups[-1][0]["bytes_per_expert"]:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def _label(axis: Any, rows: list[Record]) -> None:
    """Draw points, and names in a column to the right of them, without overlaps."""
    low, high = map(math.log, axis.get_ylim())
    rows = sorted(rows, key=lambda row: row["kl"])
    places = spread([math.log(row["kl"]) for row in rows], LABEL_GAP * (high - low))
    sizes = [row["bytes_per_expert"] / 1024 for row in rows]
    width = max(sizes) - min(sizes) or 1.0
    column = max(sizes) + 0.3 * width
    axis.set_xlim(min(sizes) - 0.1 * width, column + 0.9 * width)
    for row, size, place in zip(rows, sizes, places, strict=True):
        alone = get_scheme(row["scheme"]).activation is None
        color = list(COLORS.values())[not alone]
        axis.plot(size, row["kl"], "o", color=color)
        axis.annotate(
            row["scheme"],
            (size, row["kl"]),
            (column, math.exp(place)),
            va="center",
            fontsize=9,
            arrowprops={"arrowstyle": "-", "color": color, "lw": 0.6, "relpos": (0, 0.5)},
        )


def spread(places: list[float], gap: float) -> list[float]:
    """Move ascending numbers to distances of at least ``gap``, with the least total change.

    ``place - index * gap`` must not decrease; neighbours where it does are pooled to their mean
    (isotonic regression).
    """
    pools: list[list[float]] = []
    for index, place in enumerate(places):
        pools.append([place - index * gap])
        while len(pools) > 1 and fmean(pools[-2]) > fmean(pools[-1]):
            pools[-2:] = [pools[-2] + pools[-1]]
    means = [fmean(pool) for pool in pools for _ in pool]
    return [mean + index * gap for index, mean in enumerate(means)]
