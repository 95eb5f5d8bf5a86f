"""Draw the record of `examples/finetune.py` into ``docs/images/finetune.png``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

try:
    import matplotlib.pyplot as plt
except ImportError:
    raise SystemExit("plotting needs matplotlib: install moe_ops[bench]") from None

RECORD = Path(__file__).with_name("results") / "finetune.json"
IMAGE = Path(__file__).parents[1] / "docs" / "images" / "finetune.png"
STYLES = ("-", "--", "-", "--")


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw a panel for each pair of ways, a curve for each way."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), sharey=True, layout="constrained")
    for number, (row, style) in enumerate(zip(rows, STYLES, strict=True)):
        steps = range(1, len(row["losses"]) + 1)
        axes[number // 2].plot(steps, row["losses"], style, color=f"C{number}", label=row["way"])
    for axis in axes:
        axis.set(xlabel="step")
        axis.grid(alpha=0.3)
        axis.legend(fontsize="small")
    axes[0].set(ylabel="loss of the batch (nats)")
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    draw(json.loads(RECORD.read_text())["rows"], IMAGE)
    print(IMAGE)
