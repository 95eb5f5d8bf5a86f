"""Time the expert GEMMs, beside two speeds of light.

``dense_mm`` is one matrix product of the same flops that ignores the experts: the bound where a
batch is large. ``even_bmm`` spreads the rows evenly over the experts that are hit: the bound where
the weights' bytes count. Both read rows that already lie in order.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import torch
from stages import Case, layer_plan, main, nbytes
from torch import Tensor

from moe_ops import ops
from moe_ops.bench.problems import Experts, Inputs, Problem, make_experts
from moe_ops.dispatch.tiles import cdiv


@lru_cache(maxsize=1)
def _experts(problem: Problem, device: torch.device) -> Experts:
    return make_experts(problem, "bf16", device)


def cases(problem: Problem, inputs: Inputs) -> Iterator[Case]:
    x, _, ids, active = inputs
    w1, w2 = (_experts(problem, x.device).w1, _experts(problem, x.device).w2)
    plan = layer_plan(problem, "unquantized", ids)
    k = problem.top_k

    def gemm_act() -> Tensor:
        return ops.expert_matmul(x, w1, None, None, *plan, k, "silu")

    def gemm1() -> Tensor:
        return ops.expert_matmul(x, w1, None, None, *plan, k)

    h = gemm_act()

    def gemm2() -> Tensor:
        return ops.expert_matmul(h, w2, None, None, *plan, 1)

    slots = ids.numel()
    flops1, flops2 = (2 * slots * w[0].numel() for w in (w1, w2))
    read1, read2 = (active * w[0].nbytes for w in (w1, w2))
    yield Case("expert_gemm_act:w1", gemm_act, read1 + nbytes(x, h), flops1)
    yield Case("expert_gemm:w1", gemm1, read1 + x.nbytes + 2 * h.nbytes, flops1)
    yield Case("expert_gemm:w2", gemm2, read2 + h.nbytes + slots * x[0].nbytes, flops2)
    yield from _baselines("w1", w1, slots, active)
    yield from _baselines("w2", w2, slots, active)


def _baselines(name: str, w: Tensor, slots: int, active: int) -> Iterator[Case]:
    _, n, k = w.shape
    a = torch.randn((slots, k), dtype=w.dtype, device=w.device)
    dense = w[0].t()
    moved = nbytes(a, dense) + slots * n * w.itemsize
    yield Case(f"dense_mm:{name}", lambda: a @ dense, moved, 2 * slots * n * k)

    rows = cdiv(slots, active)
    even = torch.randn((active, rows, k), dtype=w.dtype, device=w.device)
    some = w[:active].transpose(1, 2)
    moved = nbytes(even, some) + active * rows * n * w.itemsize
    yield Case(f"even_bmm:{name}", lambda: even @ some, moved, 2 * active * rows * n * k)


if __name__ == "__main__":
    main("expert_gemm", cases)
