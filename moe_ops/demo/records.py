"""What a GPU that is not in this machine does with a layer: its kernels and its recorded times."""

from __future__ import annotations

import json
from typing import Any

from moe_ops.bench.harness import CHECKOUT
from moe_ops.bench.problems import find_problem
from moe_ops.pipeline.config import FusedMoEConfig
from moe_ops.pipeline.explanation import explain
from moe_ops.routing import RoutingMethodType

RESULTS = CHECKOUT / "benchmarks" / "results"
LAYERS = (
    ("qwen3-30b", "unquantized"),
    ("deepseek-v3", "unquantized"),
    ("deepseek-v3", "fp8_block128"),
)
TOKENS = (1, 64, 4096)
DEVICE = "sm_90"
"""The architecture of an H100 and an H200, whose kernels are the same."""
GPUS = ("NVIDIA H200", "NVIDIA H100")


def kernel_lines() -> list[list[str]]:
    """A table: layer, tokens, the kernel of the first GEMM, and the times that GPUS recorded."""
    recorded = {gpu: _times(gpu) for gpu in GPUS}
    head = ["layer", "tokens", "GEMM 1 on sm_90", "least us", *(f"{gpu[7:]} us" for gpu in GPUS)]
    lines = [[*head, "grouped_mm"]]
    for name, scheme in LAYERS:
        for cost in _costs(name, scheme):
            case = (name, "bf16" if scheme == "unquantized" else scheme, cost.num_tokens)
            times = [recorded[gpu].get((*case, "moe_ops")) for gpu in GPUS]
            theirs = recorded[GPUS[0]].get((*case, "hf-grouped_mm"))
            ours, *_ = times
            lines.append(
                [
                    f"{name} {case[1]}",
                    str(cost.num_tokens),
                    getattr(cost.gemm1, "kernel", "portable"),
                    "-" if cost.floor_us is None else f"{cost.floor_us:,.0f}",
                    *("-" if time is None else f"{time:,.0f}" for time in times),
                    f"x{theirs / ours:.1f}" if theirs and ours else "-",
                ]
            )
    return lines


def _costs(name: str, scheme: str) -> tuple[Any, ...]:
    """What `explain` says about a layer, for each of TOKENS."""
    problem = find_problem(name)
    config = FusedMoEConfig(
        num_experts=problem.num_experts,
        experts_per_token=problem.top_k,
        hidden_dim=problem.hidden_size,
        intermediate_size=problem.intermediate_size,
        num_local_experts=problem.num_experts,
        activation=problem.activation,
        device="cpu",
        routing_method=RoutingMethodType.Renormalize,
    )
    return explain(config, scheme, num_tokens=TOKENS, device=DEVICE).costs


def _times(gpu: str) -> dict[tuple[str, str, int, str], float]:
    """Microseconds by model, scheme, tokens and implementation; empty without a record."""
    path = RESULTS / gpu.lower().replace(" ", "-") / "layer.json"
    if not path.is_file():
        return {}
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return {
        (row["shape"], row["scheme"], row["M"], row["impl"]): row["time_us"]
        for row in rows
        if row["routing"] == "uniform"
    }
