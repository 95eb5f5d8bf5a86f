"""Plot a layer record: time over tokens with the lower bound, one panel per shape; a roofline."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

try:
    import matplotlib.pyplot as plt
except ImportError:
    raise SystemExit("plotting needs matplotlib: install moe_ops[bench]") from None
import roofline

COLUMNS = 3


def plot(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Draw one figure of the rows of one scheme and routing."""
    shapes = sorted({row["shape"] for row in rows})
    columns = min(COLUMNS, len(shapes))
    lines = -(-len(shapes) // columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(5 * columns, 4 * lines), squeeze=False, layout="constrained"
    )
    impls = sorted({row["impl"] for row in rows}, key=lambda impl: (impl != "moe_ops", impl))
    for axis, shape in zip(axes.flat, shapes, strict=False):
        _panel(axis, [row for row in rows if row["shape"] == shape], impls)
        axis.set_title(shape)
    for axis in axes.flat[len(shapes) :]:
        axis.remove()
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    print(path)


def _panel(axis: Any, rows: list[dict[str, Any]], impls: list[str]) -> None:
    for color, impl in enumerate(impls):
        mine = sorted((row for row in rows if row["impl"] == impl), key=lambda row: row["M"])
        if mine:
            times = [row["time_us"] for row in mine]
            axis.plot([row["M"] for row in mine], times, "o-", color=f"C{color}", label=impl)
    floor = sorted({(row["M"], row["floor_us"]) for row in rows if row["floor_us"] is not None})
    if floor:
        axis.plot(*zip(*floor, strict=True), "--", color="black", label="floor")
    axis.set(xscale="log", yscale="log", xlabel="tokens", ylabel="time (us)")
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small")


def main(arguments: Sequence[str] | None = None) -> None:
    """Plot every scheme and routing of every record under the output folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    output_help = "folder of the records, which the plots go beside (default: benchmarks/results)"
    output = Path(__file__).with_name("results")
    parser.add_argument("--output", type=Path, default=output, help=output_help)
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


if __name__ == "__main__":
    main()
