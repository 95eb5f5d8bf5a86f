"""Time one implementation's cold start in this process: import, first call and torch.compile.

Prints one line of JSON, in seconds. `bench_overheads.py` runs it with empty caches.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

MODULES = {
    "moe_ops": "moe_ops",
    "hf-grouped_mm": "transformers.integrations.moe",
    "vllm-triton": "vllm.model_executor.layers.fused_moe.fused_moe",
}
"""Implementation -> module to import after torch."""


def seconds(work: Callable[[], Any]) -> float:
    """Seconds that a call takes, including its work on the GPU."""
    start = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def implementations() -> dict[str, Callable[..., Callable[[], Any]]]:
    """Name -> what makes a layer's call, in this library and in `peers`. Imports moe_ops."""
    import_module("peers")  # adds its own
    return import_module("moe_ops.bench.layer").IMPLS


@torch.no_grad()
def times_of(impl: str, model: str, tokens: int, routing: str) -> dict[str, float]:
    """``import_s``, ``first_call_s`` of the eager layer, then ``compile_s``.

    ``compile_s`` is the first call under torch.compile with this number of tokens. The eager call
    before it has already compiled and loaded the kernels of the implementation.
    """
    torch.ones(1, device="cuda" if torch.cuda.is_available() else "cpu").sum().item()
    import_s = seconds(lambda: import_module(MODULES[impl]))
    # Imported only here: these modules import moe_ops, whose import had to be timed first.
    make = implementations()[impl]
    problems = import_module("moe_ops.bench.problems")
    device = import_module("moe_ops.bench.harness").default_device()
    problem = problems.find_problem(model)
    experts = problems.make_experts(problem, "bf16", device)
    inputs = problems.make_inputs(problem, tokens, routing, device)
    call = make(experts, inputs)
    first_call_s = seconds(call)
    warnings.filterwarnings("ignore", message="Dynamo detected a call to a `functools.lru_cache`")
    return {
        "import_s": import_s,
        "first_call_s": first_call_s,
        "compile_s": seconds(lambda: torch.compile(call, dynamic=False)()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--impl", choices=list(MODULES), default="moe_ops")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--tokens", type=int, default=1)
    parser.add_argument("--routing", default="uniform")
    print(json.dumps(times_of(**vars(parser.parse_args()))))


if __name__ == "__main__":
    main()
