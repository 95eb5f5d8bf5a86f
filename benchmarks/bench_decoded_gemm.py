"""Time the expert GEMMs that dequantize both operands, by scheme."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import torch
from stages import Case, layer_plan, main
from torch import Tensor

from moe_ops import get_scheme, ops
from moe_ops.bench.problems import Experts, Inputs, Problem, make_experts
from moe_ops.tensors import QTensor

SCHEMES_TIMED = ("mxfp8", "mxfp4", "mxfp4_mxfp8", "mxfp4_w4a8", "nvfp4", "int4_w4a8_g128")


@lru_cache(maxsize=1)
def _experts(problem: Problem, scheme: str, device: torch.device) -> Experts:
    return make_experts(problem, scheme, device)


def _quantized(x: Tensor, scheme: str) -> tuple[Tensor, Tensor]:
    """Rows as the scheme stores them."""
    quant = get_scheme(scheme).activation
    if quant is None:
        raise ValueError(f"scheme must quantize activations, got {scheme!r}")
    given = x.new_full((1,), 0.01, dtype=torch.float32)
    scale = given if quant.static or quant.global_scale else None
    return ops.moe_quantize(x, scale, None, None, None, 0, quant.key)


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
        rest = (None, *layer_plan(problem, scheme, ids))
        first, second = _quantized(x, scheme), _quantized(h, scheme)

        def act(
            w: QTensor = w1, rows: tuple = first, scheme: str = scheme, rest: tuple = rest
        ) -> Tensor:
            weight, tail = (w.data, w.scale, w.global_scale), (problem.top_k, scheme, x.dtype)
            return ops.decoded_gemm_act(*rows, *weight, *rest, *tail, "silu")

        def gemm(
            w: QTensor = w2, rows: tuple = second, scheme: str = scheme, rest: tuple = rest
        ) -> Tensor:
            weight = (w.data, w.scale, w.global_scale)
            return ops.decoded_gemm(*rows, *weight, *rest, 1, scheme, x.dtype)

        read1, read2 = (active * sum(t[0].nbytes for t in w if t is not None) for w in (w1, w2))
        rows1, rows2 = (sum(t.nbytes for t in rows) for rows in (first, second))
        yield Case(f"decoded_gemm_act:{scheme}", act, read1 + rows1 + h.nbytes, flops)
        moved = read2 + rows2 + slots * x[0].nbytes
        yield Case(f"decoded_gemm:{scheme}", gemm, moved, flops // 2)


if __name__ == "__main__":
    main("decoded_gemm", cases)
