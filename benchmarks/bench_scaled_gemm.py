"""Time the expert GEMM of two quantized operands, by scheme: stored values, or both dequantized."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache

import torch
from stages import Case, LayerPlan, layer_plan, main, nbytes
from torch import Tensor

from moe_ops import get_scheme, ops
from moe_ops.bench.problems import Experts, Inputs, Problem, make_experts
from moe_ops.tensors import QTensor

SCHEMES_TIMED = (
    "fp8_tensor", "fp8_channel", "fp8_block128", "int8_channel",
    "mxfp8", "mxfp4", "mxfp4_mxfp8", "mxfp4_w4a8", "nvfp4", "int4_w4a8_g128",
)  # fmt: skip


@lru_cache(maxsize=1)
def _experts(problem: Problem, scheme: str, device: torch.device) -> Experts:
    return make_experts(problem, scheme, device)


def _quantized(x: Tensor, scheme: str, num_experts: int) -> tuple[Tensor, Tensor]:
    """Rows as the scheme stores them."""
    quant, _ = get_scheme(scheme).quants
    given = x.new_full((1,), 0.01, dtype=torch.float32)
    scale = given if quant.static or quant.global_scale else None
    return ops.moe_quantize(x, scale, None, None, None, num_experts, quant.key)


def _gemm(
    rows: tuple[Tensor, Tensor],
    w: QTensor,
    plan: LayerPlan,
    top_k: int,
    scheme: str,
    activation: str = "",
) -> Callable[[], Tensor]:
    """A call of the operator."""
    factor = w.global_scale if get_scheme(scheme).decoded else None
    rest = (*plan, top_k, scheme, torch.bfloat16, activation)
    return lambda: ops.scaled_matmul(*rows, w.data, w.scale, factor, None, *rest)


def cases(problem: Problem, inputs: Inputs) -> Iterator[Case]:
    x, _, ids, active = inputs
    slots, k = ids.numel(), problem.top_k
    h = torch.randn((slots, problem.intermediate_size), dtype=x.dtype, device=x.device)
    flops = 2 * slots * 2 * problem.intermediate_size * problem.hidden_size
    for scheme in SCHEMES_TIMED:
        stored = _experts(problem, scheme, x.device).stored
        if stored is None:
            continue
        (w1, w2), plan = stored, layer_plan(problem, scheme, ids)
        first, second = (_quantized(rows, scheme, problem.num_experts) for rows in (x, h))
        read1, read2 = (active * sum(t[0].nbytes for t in w if t is not None) for w in (w1, w2))
        act = _gemm(first, w1, plan, k, scheme, "silu")
        yield Case(f"scaled_gemm_act:{scheme}", act, read1 + nbytes(*first) + h.nbytes, flops)
        moved = read2 + nbytes(*second) + slots * x[0].nbytes
        yield Case(f"scaled_gemm:{scheme}", _gemm(second, w2, plan, 1, scheme), moved, flops // 2)


if __name__ == "__main__":
    main("scaled_gemm", cases)
