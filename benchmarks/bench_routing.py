"""Time the routing operators: experts and weights from router logits."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from stages import Case, Layer, main, nbytes

from moe_ops import ops
from moe_ops.routing import SCORING_FUNCS


def cases(layer: Layer) -> Iterator[Case]:
    x, weights, ids, _ = layer.inputs
    (tokens, k), experts = ids.shape, layer.problem.num_experts
    logits = torch.randn((tokens, experts), dtype=x.dtype, device=x.device)
    bias = torch.randn(experts, dtype=torch.float32, device=x.device)
    table = torch.randint(experts, (1000, k), device=x.device)
    words = torch.randint(1000, (tokens,), device=x.device)
    written = nbytes(weights, ids)
    moved = nbytes(logits) + written

    def route(scoring: str, correction: torch.Tensor | None) -> object:
        return ops.fused_topk(logits, correction, k, True, scoring, 1.0)

    yield Case("fused_topk", lambda: route("softmax", None), moved)
    for scoring in SCORING_FUNCS[1:]:
        yield Case(
            f"fused_topk:{scoring}+bias",
            lambda scoring=scoring: route(scoring, bias),
            moved + nbytes(bias),
        )
    if experts % 8 == 0 and k <= experts // 2:
        yield Case(
            "grouped_topk:8/4+bias",
            lambda: ops.grouped_topk(logits, bias, k, True, "sigmoid", 2.5, 8, 4),
            moved + nbytes(bias),
        )
    # Only the logits of the chosen experts are read, and one row of the table per token.
    yield Case(
        "hash_topk",
        lambda: ops.hash_topk(logits, words, table, True, "sqrtsoftplus", 1.5),
        nbytes(words) + tokens * k * (logits.element_size() + table.element_size()) + written,
    )
    grad = torch.randn_like(weights)
    yield Case(
        "topk_backward",
        lambda: ops.topk_backward(grad, logits, ids, True, "softmax", 1.0),
        nbytes(grad, ids) + 2 * nbytes(logits),
    )
    yield Case("sparsemixer", lambda: ops.sparsemixer(logits, 0.01), nbytes(logits) + 16 * tokens)


if __name__ == "__main__":
    main("routing", cases)
