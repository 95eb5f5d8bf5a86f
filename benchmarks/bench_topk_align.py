"""Time routing with alignment, in one operator and in two."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from stages import Case, main, nbytes, row_tiles

from moe_ops import ops
from moe_ops.bench.problems import Inputs, Problem


def cases(problem: Problem, inputs: Inputs) -> Iterator[Case]:
    (tokens, k), x, experts = inputs.topk_ids.shape, inputs.x, problem.num_experts
    tiles = row_tiles(problem, "unquantized", x.device)
    logits = torch.randn((tokens, experts), dtype=x.dtype, device=x.device)
    how = (logits, None, k, True, "softmax", 1.0)

    def one() -> tuple:
        return ops.topk_plan(*how, None, tiles, experts)

    def two() -> tuple:
        weights, ids = ops.fused_topk(*how)
        return weights, ids, ops.plan_slots(ids, None, tiles, experts)

    moved = nbytes(logits, *one())
    yield Case("topk_plan", one, moved)
    yield Case("fused_topk + plan_slots", two, moved)


if __name__ == "__main__":
    main("topk_align", cases)
