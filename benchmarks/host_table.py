"""Tables of experts in host memory: what fits in which GPU, and what was timed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tables import RESULTS, markdown

from moe_ops.bench.problems import load_problems
from moe_ops.scheme import SCHEMES

HOSTED = (
    ("qwen3-30b", 48, ("unquantized", "int4_w4a16_g128")),
    ("qwen3-next", 48, ("unquantized", "fp8_block128")),
    ("gpt-oss-120b", 36, ("mxfp4_w4a16",)),
    ("mixtral", 32, ("int4_w4a16_g128",)),
    ("llama4-scout", 48, ("int4_w4a16_g128",)),
    ("qwen3-235b", 94, ("fp8_block128", "int4_w4a16_g128")),
    ("deepseek-v3", 58, ("fp8_block128", "int4_w4a16_g128")),
)
"""Models that may be larger than a GPU: name, layers with experts, schemes."""
GPU_SIZES, FOR_THE_REST = (16, 24, 48, 80, 141), 6
"""Gigabytes of GPUs, and what is left for all but the experts."""


def table() -> str:
    """A line per model and scheme: the experts' bytes, and the share that fits in a GPU."""
    lines = []
    for name, layers, shown in HOSTED:
        problem = load_problems()[name]
        hidden, inner, experts = problem.hidden_size, problem.intermediate_size, problem.num_experts
        for scheme in shown:
            sizes = ((2 * inner, hidden), (hidden, inner))
            one = sum(n * k * SCHEMES[scheme].weight_bits(n, k) / 8 for n, k in sizes)
            whole = layers * experts * one / 1e9
            shares = []
            for gpu in GPU_SIZES:
                count = min(experts, int((gpu - FOR_THE_REST) * 1e9 / (layers * one)))
                shares.append(f"{count / experts:.0%}" if count >= problem.top_k else "-")
            lines.append([f"`{name}`", f"`{scheme}`", f"{one / 1e6:.1f}", f"{whole:.1f}", *shares])
    head = ["model", "scheme", "an expert, MB", "on the host, GB"]
    return markdown([*head, *(f"{size} GB" for size in GPU_SIZES)], lines, labels=2)


def times() -> str:
    """A line per timed case of each GPU's record."""
    lines = []
    for path in sorted(RESULTS.glob("*/offload.json")):
        record = json.loads(path.read_text())
        for row in record["rows"]:
            case = [record["gpu"], *(f"`{row[name]}`" for name in ("shape", "scheme", "routing"))]
            counts = [str(row[name]) for name in ("M", "resident")]
            measured = [row[name] for name in ("all_us", "hits_us", "steps_us", "misses")]
            rates = [row[name] for name in ("copied_gb_per_s", "engine_gb_per_s")]
            lines.append([*case, *counts, *map(_shown, (*measured, *rates))])
    head = ["GPU", "layer", "scheme", "routing", "tokens", "on the GPU", "all on the GPU, us"]
    head += ["all hits, us", "a call, us", "misses a call", "copied, GB/s", "copy engine, GB/s"]
    return markdown(head, lines, labels=4)


WHOLE = """\
## Whole models

Decode steps of transformers models with random weights, each captured in a CUDA graph: tokens per
second of all sequences together. Routers choose experts that are drawn anew in each step and layer,
by Zipf's law with exponent 1 or all with the same odds. The share is that of each layer's experts
on the GPU. In the two columns at the right the same memory holds whole layers instead, and the
experts of all other layers are copied before each forward: *copied layers* from pinned memory, in
the same CUDA graph; *accelerate* as `device_map` does it, without a graph."""


def models() -> str:
    """A section with a line per model, share, routing and batch; nothing without a record."""
    lines = [line for path in sorted(RESULTS.glob("*/host_models.json")) for line in _models(path)]
    if not lines:
        return ""
    head = ["GPU", "model", "scheme", "share", "routing", "sequences", "all on the GPU", "moe_ops"]
    head += ["hits", "copied a step, GB", "copied layers", "accelerate"]
    return f"{WHOLE}\n\n{markdown(head, lines, labels=5)}"


def _models(path: Path) -> list[list[str]]:
    """The lines of one record. What was skipped has its reason in the record."""
    record = json.loads(path.read_text())
    cases: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in record["rows"]:
        layers = "" if row["layers"] == row["published_layers"] else f", {row['layers']} layers"
        key = (row["model"] + layers, row["scheme"], row["share"], row["routing"], row["M"])
        cases.setdefault(key, {})[row["impl"]] = row
    lines = []
    for (model, scheme, share, routing, m), rows in cases.items():
        rates = {impl: row["tokens_per_s"] for impl, row in rows.items()}
        own = rows.get("moe_ops") or {}
        hits = "-" if own.get("hit_rate") is None else f"{own['hit_rate']:.0%}"
        case = [record["gpu"], f"`{model}`", f"`{scheme}`", f"{share:.0%}", routing, str(m)]
        both = [_shown(rates.get("all-resident")), _shown(rates.get("moe_ops"))]
        others = [_shown(rates.get(name)) for name in ("copied-layers", "accelerate")]
        lines.append([*case, *both, hits, _shown(own.get("copied_gb"), 2), *others])
    return lines


def hit_rates() -> str:
    """A line per trace and number of slots of `hit_rates.py`; nothing without a record."""
    path = RESULTS / "hit_rates.json"
    if not path.exists():
        return ""
    lines = []
    for row in json.loads(path.read_text())["rows"]:
        sizes = [str(row[name]) for name in ("num_experts", "top_k", "slots")]
        shares = [f"{row[name]:.0%}" for name in ("lru", "lfu", "static", "best")]
        lines.append([row["trace"], *sizes, *shares])
    head = ["routing", "experts", "k", "on the GPU", "LRU", "LFU", "static", "best possible"]
    return markdown(head, lines, labels=1)


def _shown(value: Any, digits: int = 1) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"
