"""Time the routing operators: top-k of the scores of router logits."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from problems import Inputs, Problem
from stages import Case, main, nbytes

from moe_ops import ops


def cases(problem: Problem, inputs: Inputs) -> Iterator[Case]:
    tokens, k = inputs.topk_ids.shape
    x = inputs.x
    logits = torch.randn((tokens, problem.num_experts), dtype=x.dtype, device=x.device)
    bias = torch.randn(problem.num_experts, dtype=torch.float32, device=x.device)
    moved = nbytes(logits, inputs.topk_weights, inputs.topk_ids)

    def route(scoring: str, correction: torch.Tensor | None) -> object:
        return ops.fused_topk(logits, correction, k, True, scoring, 1.0)

    yield Case("fused_topk", lambda: route("softmax", None), moved)
    yield Case("fused_topk:sigmoid+bias", lambda: route("sigmoid", bias), moved + nbytes(bias))


if __name__ == "__main__":
    main("routing", cases)
