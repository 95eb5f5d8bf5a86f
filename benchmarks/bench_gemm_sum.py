"""Time the second expert GEMM with the weighted sum, by scheme: of one token on Hopper one launch.

Rows are quantized by the operator. ``apart`` is what it replaces: the GEMM, then the sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import torch
from stages import Case, layer_plan, main, nbytes
from torch import Tensor

from moe_ops import ops
from moe_ops.bench.problems import Experts, Inputs, Problem, make_experts

SCHEMES_TIMED = {
    "unquantized": "bf16",
    "fp8_channel": "fp8_channel",
    "fp8_block128": "fp8_block128",
}
"""Schemes, and what benchmarks call them."""


@lru_cache(maxsize=1)
def _experts(problem: Problem, scheme: str, device: torch.device) -> Experts:
    return make_experts(problem, scheme, device)


def cases(problem: Problem, inputs: Inputs) -> Iterator[Case]:
    x, weights, ids, active = inputs
    experts_of_layer = problem.num_experts
    h = torch.randn((ids.numel(), problem.intermediate_size), dtype=x.dtype, device=x.device)
    for name, timed in SCHEMES_TIMED.items():
        experts = _experts(problem, timed, x.device)
        quantized = name != "unquantized"
        if quantized and experts.stored is None:
            continue
        w, scale = experts.stored[1][:2] if quantized else (experts.w2, None)
        weight, plan = (w, scale), layer_plan(problem, name, ids)

        def at_once(weight: tuple = weight, plan: tuple = plan, scheme: str = name) -> Tensor:
            w, scale = weight
            rest = (weights, *plan, scheme, x.dtype if scale is not None else None)
            return ops.gemm_sum(h, None, w, scale, None, *rest)

        def apart(weight: tuple = weight, plan: tuple = plan, scheme: str = name) -> Tensor:
            (w, scale), how = weight, (None, None, *plan, 1)
            if scale is None:
                y = ops.expert_matmul(h, w, *how)
            else:
                y = ops.scaled_matmul(h, None, w, scale, *how, scheme, x.dtype)
            return ops.moe_fused_mul_sum(y, weights, ids, None, None, experts_of_layer)

        read = active * sum(t[0].nbytes for t in (w, scale) if t is not None)
        moved, flops = read + nbytes(h, weights, ids, x), 2 * ids.numel() * w[0].numel()
        yield Case(f"gemm_sum:{name}", at_once, moved, flops)
        yield Case(f"apart:{name}", apart, moved, flops)


if __name__ == "__main__":
    main("gemm_sum", cases)
