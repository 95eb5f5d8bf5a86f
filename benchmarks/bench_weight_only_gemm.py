"""Time the expert GEMMs of which only the weights are quantized, by scheme."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import torch
from stages import Case, layer_plan, main
from torch import Tensor

from moe_ops import ops
from moe_ops.bench.problems import Experts, Inputs, Problem, make_experts
from moe_ops.tensors import QTensor

SCHEMES_TIMED = (
    "int4_w4a16_g128", "mxfp4_w4a16", "nvfp4_w4a16", "fp8_w8a16_block128", "int8_w8a16",
)  # fmt: skip


@lru_cache(maxsize=1)
def _experts(problem: Problem, scheme: str, device: torch.device) -> Experts:
    return make_experts(problem, scheme, device)


def cases(problem: Problem, inputs: Inputs) -> Iterator[Case]:
    x, _, ids, active = inputs
    h = torch.randn((ids.numel(), problem.intermediate_size), dtype=x.dtype, device=x.device)
    slots = ids.numel()
    flops = 2 * slots * 2 * problem.intermediate_size * problem.hidden_size
    for scheme in SCHEMES_TIMED:
        stored = _experts(problem, scheme, x.device).stored
        if stored is None:
            continue
        w1, w2 = stored
        rest = (None, None, *layer_plan(problem, scheme, ids))

        def act(w: QTensor = w1, scheme: str = scheme, rest: tuple = rest) -> Tensor:
            return ops.weight_only_matmul(x, *w, *rest, problem.top_k, scheme, "silu")

        def gemm(w: QTensor = w2, scheme: str = scheme, rest: tuple = rest) -> Tensor:
            return ops.weight_only_matmul(h, *w, *rest, 1, scheme)

        read1, read2 = (active * sum(t[0].nbytes for t in w if t is not None) for w in (w1, w2))
        yield Case(f"weight_only_gemm_act:{scheme}", act, read1 + x.nbytes + h.nbytes, flops)
        moved = read2 + h.nbytes + slots * x[0].nbytes
        yield Case(f"weight_only_gemm:{scheme}", gemm, moved, flops // 2)


if __name__ == "__main__":
    main("weight_only_gemm", cases)
