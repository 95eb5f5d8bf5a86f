"""Plot the records: layers (time over tokens, one panel per shape; a roofline) and whole models."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

try:
    import matplotlib.pyplot as plt
    from matplotlib import ticker
except ImportError:
    raise SystemExit("plotting needs matplotlib: install moe_ops[bench]") from None
import models_report
import roofline
from report import ESTIMATE
from tables import OURS, RESULTS

COLUMNS = 3
MODE = "captured"
"""The mode of whole models that is plotted."""


def plot(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Draw one figure of the rows of one scheme and routing."""
    shapes = sorted({row["shape"] for row in rows})
    columns = min(COLUMNS, len(shapes))
    height = -(-len(shapes) // columns)
    figure, axes = plt.subplots(
        height, columns, figsize=(5 * columns, 4 * height), squeeze=False, layout="constrained"
    )
    impls = sorted({row["impl"] for row in rows}, key=lambda impl: (impl != OURS, impl))
    for axis, shape in zip(axes.flat, shapes, strict=False):
        _panel(axis, [row for row in rows if row["shape"] == shape], impls)
        axis.set_title(shape)
    for axis in axes.flat[len(shapes) :]:
        axis.remove()
    lines = {line.get_label(): line for axis in figure.axes for line in axis.lines}
    figure.legend(
        handles=list(lines.values()), ncols=min(6, len(lines)), loc="outside lower center"
    )
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    print(path)


def _panel(axis: Any, rows: list[dict[str, Any]], impls: list[str]) -> None:
    """Draw times over those of `OURS` with as many tokens, where it was timed."""
    ours = {row["M"]: row["time_us"] for row in rows if row["impl"] == OURS}
    rows = [row for row in rows if row["M"] in ours]
    for color, impl in enumerate(impls):
        mine = sorted((row for row in rows if row["impl"] == impl), key=lambda row: row["M"])
        if mine:
            ratios = [row["time_us"] / ours[row["M"]] for row in mine]
            look = {"color": f"C{color}", "label": impl, **roofline.marker(impl, impls)}
            axis.plot([row["M"] for row in mine], ratios, "-", **look)
    floors = {row["M"]: row["floor_us"] for row in rows if row["floor_us"] is not None}
    floor = sorted((tokens, time / ours[tokens]) for tokens, time in floors.items())
    if floor:
        axis.plot(*zip(*floor, strict=True), "--", color="black", label=ESTIMATE)
    axis.set(xscale="log", yscale="log", xlabel="tokens", ylabel=f"time over {OURS}'s")
    axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter("")
    axis.grid(alpha=0.3)


def plot_models(record: dict[str, Any], folder: Path) -> None:
    """Draw a figure per model: a panel per phase and tokens, a bar per implementation."""
    rows = [row for row in models_report.timed(record) if row["mode"] == MODE]
    for model, layers in models_report.models_of(rows):
        mine = [row for row in rows if (row["model"], row["layers"]) == (model, layers)]
        cases, impls = models_report.cases_of(mine), models_report.impls_of(mine)
        names = [impl if scheme == "bf16" else f"{impl}, {scheme}" for scheme, impl in impls]
        figure, axes = plt.subplots(
            1,
            len(cases),
            figsize=(2.5 + 3 * len(cases), 1 + 0.35 * len(impls)),
            squeeze=False,
            sharey=True,
            layout="constrained",
        )
        for axis, (phase, m) in zip(axes.flat, cases, strict=True):
            part = [row for row in mine if (row["phase"], row["M"]) == (phase, m)]
            speed = {(row["scheme"], row["impl"]): row["tokens_per_s"] for row in part}
            colors = ["C0" if impl == OURS else "C7" for _, impl in impls]
            axis.barh(names, [speed.get(pair, 0.0) for pair in impls], color=colors)
            axis.set(title=f"{phase} {m}", xlabel="tokens per second")
            axis.grid(alpha=0.3, axis="x")
        axes[0, 0].invert_yaxis()
        title = models_report.title(model, layers, mine)
        figure.suptitle(f"{title}, one CUDA graph per step, {record['gpu']}")
        path = folder / f"models-{model}-{layers}.png"
        figure.savefig(path, dpi=120)
        plt.close(figure)
        print(path)


def main(arguments: Sequence[str] | None = None) -> None:
    """Plot every scheme and routing of every record under the output folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    output_help = "folder of the records, which the plots go beside (default: benchmarks/results)"
    parser.add_argument("--output", type=Path, default=RESULTS, help=output_help)
    folder = parser.parse_args(arguments).output
    records = sorted(folder.glob("*/layer.json"))
    if not records:
        raise SystemExit(f"no layer.json found under {folder}: run bench_layer.py on a GPU first")
    for path in records:
        record = json.loads(path.read_text())
        for scheme, routing in sorted({(r["scheme"], r["routing"]) for r in record["rows"]}):
            rows = [r for r in record["rows"] if (r["scheme"], r["routing"]) == (scheme, routing)]
            name = f"{scheme}.png" if routing == "uniform" else f"{scheme}-{routing}.png"
            title = f"MoE layer, {scheme}, {routing} routing, {record['gpu']}"
            plot(rows, title, path.with_name(f"layer-{name}"))
            roofline.plot(rows, record["gpu"], title, path.with_name(f"roofline-{name}"))
    for path in sorted(folder.glob("*/models.json")):
        plot_models(json.loads(path.read_text()), path.parent)


if __name__ == "__main__":
    main()
