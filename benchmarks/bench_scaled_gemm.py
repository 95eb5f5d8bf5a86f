"""Time the expert GEMMs of two 8-bit operands, by scheme."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch
from stages import Case, LayerPlan, layer_plan, main, nbytes
from torch import Tensor

from moe_ops import SCHEMES, ops
from moe_ops.bench.problems import Experts, Inputs, Problem, make_experts

SCHEMES_TIMED = ("fp8_tensor", "fp8_channel", "fp8_block128", "int8_channel")


@lru_cache(maxsize=1)
def _experts(problem: Problem, scheme: str, device: torch.device) -> Experts:
    return make_experts(problem, scheme, device)


def cases(problem: Problem, inputs: Inputs) -> Iterator[Case]:
    x, _, ids, active = inputs
    h = torch.randn((ids.numel(), problem.intermediate_size), dtype=x.dtype, device=x.device)
    for name in SCHEMES_TIMED:
        quant = SCHEMES[name].activation
        experts = _experts(problem, name, x.device)
        if quant is None or experts.stored is None:
            continue
        (w1, w2), plan = experts.stored, layer_plan(problem, name, ids)

        def gemm(
            op: Callable[..., Any],
            rows: tuple,
            weight: Any,
            *more: str,
            top_k: int = 1,
            scheme: str = name,
            plan: LayerPlan = plan,
        ) -> Callable[[], Any]:
            sizes = (*plan, top_k, scheme, torch.bfloat16, *more)
            return lambda: op(*rows, weight.data, weight.scale, None, *sizes)

        def quantized(rows: Tensor, key: str = quant.key) -> tuple:
            return ops.moe_quantize(rows, None, None, None, None, problem.num_experts, key)

        k, q, qh = problem.top_k, quantized(x), quantized(h)
        flops = 2 * ids.numel() * w1.data[0].numel()
        read = [active * (w.data[0].nbytes + w.scale[0].nbytes) for w in (w1, w2)]
        moved = read[0] + nbytes(*q)
        act = gemm(ops.scaled_gemm_act, q, w1, "silu", top_k=k)
        yield Case(f"scaled_gemm_act:{name}", act, moved + h.nbytes, flops)
        moved = read[1] + nbytes(*qh) + ids.numel() * x[0].nbytes
        yield Case(f"scaled_gemm:{name}", gemm(ops.scaled_gemm, qh, w2), moved, flops // 2)


if __name__ == "__main__":
    main("scaled_gemm", cases)
