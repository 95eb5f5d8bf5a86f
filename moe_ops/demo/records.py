"""What a GPU that is not in this machine does with a layer: its kernels and its recorded times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from moe_ops.bench.harness import CHECKOUT
from moe_ops.bench.problems import find_problem, read_scheme
from moe_ops.inspect.explanation import explain

RESULTS = CHECKOUT / "benchmarks" / "results"
"""The records, if the package is a checkout's."""
LAYERS = (("qwen3-30b", "bf16"), ("deepseek-v3", "bf16"), ("deepseek-v3", "fp8_block128"))
"""Models and schemes, by their names in the records."""
TOKENS = (1, 64, 4096)
DEVICE, GPUS = "sm_90", ("NVIDIA H200", "NVIDIA H100 80GB HBM3")
"""An architecture, and GPUs that have it."""

Times = dict[tuple[str, str, int, str], float]
"""Microseconds by model, scheme, tokens and implementation."""


def kernel_lines(results: Path = RESULTS) -> list[list[str]]:
    """A table: layer, tokens, what `explain` says about it, and times of GPUs with a record."""
    recorded = {gpu: times for gpu in GPUS if (times := read_times(results, gpu))}
    head = ["layer", "tokens", "kernel of GEMM 1", "estimate us"]
    for gpu in recorded:
        head += [f"us on {gpu.split()[1]}", "grouped_mm us"]
    lines = [head]
    for model, scheme in LAYERS:
        for cost in explained_costs(model, scheme):
            case = (model, scheme, cost.num_tokens)
            line = [f"{model}, {scheme}", str(cost.num_tokens)]
            line += [getattr(cost.gemm1, "kernel", "portable"), _microseconds(cost.floor_us)]
            for times in recorded.values():
                both = (times.get((*case, name)) for name in ("moe_ops", "hf-grouped_mm"))
                line += map(_microseconds, both)
            lines.append(line)
    return lines


def missing(results: Path = RESULTS) -> list[str]:
    """The GPUs without a record; empty where there are no records at all, as in an installation."""
    without = [gpu for gpu in GPUS if not read_times(results, gpu)]
    return without if len(without) < len(GPUS) else []


def explained_costs(model: str, scheme: str) -> tuple[Any, ...]:
    """The costs that `explain` finds for a layer, one for each of TOKENS."""
    problem = find_problem(model)
    return explain(
        problem.config("cpu"), read_scheme(scheme), num_tokens=TOKENS, device=DEVICE
    ).costs


def read_times(results: Path, gpu: str) -> Times:
    """The recorded times under uniform routing; empty without a record."""
    path = results / gpu.lower().replace(" ", "-") / "layer.json"
    if not path.is_file():
        return {}
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return {
        (row["shape"], row["scheme"], row["M"], row["impl"]): row["time_us"]
        for row in rows
        if row["routing"] == "uniform"
    }


def _microseconds(time: float | None) -> str:
    return "-" if time is None else f"{time:,.0f}"
