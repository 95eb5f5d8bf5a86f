"""Plot a simulation of the load of ranks with and without expert-parallel load balancing."""

from __future__ import annotations

import argparse
import json
from itertools import product
from pathlib import Path
from typing import Any

from moe_ops.bench.problems import load_problems
from moe_ops.parallel import BalanceReport, imbalance, simulate_balance
from moe_ops.version import __version__

try:
    import matplotlib.pyplot as plt
except ImportError:
    raise SystemExit("plotting needs matplotlib: install moe_ops[bench]") from None

SHAPE, EP_SIZE, TOKENS = "deepseek-v3", 32, 8192
REDUNDANT = (0, 32)
EXPONENTS = tuple(step / 4 for step in range(7))
SEEDS = 5


def simulate(exponent: float, redundant: int, seed: int) -> BalanceReport:
    """The load of every rank, before and after balancing."""
    problem = load_problems()[SHAPE]
    return simulate_balance(
        TOKENS,
        problem.num_experts,
        problem.top_k,
        redundant,
        EP_SIZE,
        exponent=exponent,
        seed=seed,
    )


def measure() -> list[dict[str, Any]]:
    """Imbalance (busiest rank / mean) for each exponent and number of redundant experts."""
    rows = []
    for exponent, redundant in product(EXPONENTS, REDUNDANT):
        reports = [simulate(exponent, redundant, seed) for seed in range(SEEDS)]
        rows.append(
            {
                "exponent": exponent,
                "redundant_experts": redundant,
                "before": [imbalance(report.before) for report in reports],
                "after": [imbalance(report.after) for report in reports],
            }
        )
    return rows


def draw_curves(axis: Any, rows: list[dict[str, Any]]) -> None:
    """Draw the imbalance over the exponent."""

    def curve(key: str, redundant: int, style: str, label: str) -> None:
        values = [row[key] for row in rows if row["redundant_experts"] == redundant]
        line = axis.plot(EXPONENTS, [sum(v) / SEEDS for v in values], style, label=label)[0]
        low, high = [min(v) for v in values], [max(v) for v in values]
        axis.fill_between(EXPONENTS, low, high, color=line.get_color(), alpha=0.15)

    curve("before", 0, "s--", "not balanced")
    for redundant in REDUNDANT:
        curve("after", redundant, "o-", f"balanced, {redundant} redundant experts")
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set(xlabel="exponent of the Zipf law", ylabel="busiest rank / mean", ylim=(0.8, None))
    axis.legend(fontsize="small")


def draw_ranks(axis: Any) -> None:
    """Draw the load of every rank for one sample at exponent 1."""
    for name, load in (
        ("not balanced", simulate(1.0, 0, 0).before),
        (f"balanced, {REDUNDANT[1]} redundant experts", simulate(1.0, REDUNDANT[1], 0).after),
    ):
        axis.bar(range(EP_SIZE), load.sort(descending=True).values, alpha=0.6, label=name)
    mean = load.double().mean()
    axis.axhline(mean, color="black", linewidth=0.8, label="mean")
    axis.set(xlabel="rank, busiest first", ylabel="routed rows", title="exponent 1")
    axis.legend(fontsize="small")


def main() -> None:
    """Simulate, write ``eplb_balance.json`` and draw ``eplb_balance.png``."""
    parser = argparse.ArgumentParser(description=__doc__)
    output = Path(__file__).with_name("results")
    output_help = "folder to write to (default: benchmarks/results)"
    parser.add_argument("--output", type=Path, default=output, help=output_help)
    folder = parser.parse_args().output
    folder.mkdir(parents=True, exist_ok=True)
    rows = measure()
    record = {
        "command": "python benchmarks/eplb_plot.py",
        "version": __version__,
        "shape": SHAPE,
        "ep_size": EP_SIZE,
        "tokens": TOKENS,
        "rows": rows,
    }
    (folder / "eplb_balance.json").write_text(json.dumps(record, indent=1) + "\n")
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    draw_curves(left, rows)
    draw_ranks(right)
    figure.suptitle(
        f"{SHAPE}: {EP_SIZE} ranks, {TOKENS} tokens that the balancer has not seen, "
        f"{SEEDS} draws (band: smallest to largest)"
    )
    figure.savefig(folder / "eplb_balance.png", dpi=110)
    print(folder / "eplb_balance.png")


if __name__ == "__main__":
    main()
