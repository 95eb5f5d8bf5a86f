"""Time the adjustments to a routing after top-k."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from stages import Case, Layer, main, nbytes

from moe_ops import ops


def cases(layer: Layer) -> Iterator[Case]:
    x, weights, ids, _ = layer.inputs
    experts = layer.problem.num_experts
    scale = torch.rand(experts, device=x.device)
    padding = torch.zeros(x.shape[0], dtype=torch.bool, device=x.device)
    moved = 2 * nbytes(weights, ids)

    def adjust(scale: torch.Tensor | None, padding: torch.Tensor | None, shared: int) -> object:
        return ops.adjust_routing(weights, ids, scale, padding, experts, shared, 1.0)

    shared = 8 * x.shape[0]  # a weight and an id per token
    yield Case("adjust_routing:padding", lambda: adjust(None, padding, 0), moved + nbytes(padding))
    yield Case(
        "adjust_routing:all",
        lambda: adjust(scale, padding, 1),
        moved + shared + nbytes(scale, padding),
    )
    # A third of the experts count as identity experts, as in LongCat-Flash.
    yield Case(
        "zero_experts",
        lambda: ops.zero_experts(x, weights, ids, 2 * experts // 3, -1),
        moved + 2 * nbytes(x),
    )


if __name__ == "__main__":
    main("routing_adjust", cases)
