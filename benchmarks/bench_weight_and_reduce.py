"""Time the weighted sum of each token's expert rows."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from stages import Case, Layer, main, nbytes

from moe_ops import ops


def cases(layer: Layer) -> Iterator[Case]:
    x, weights, ids, _ = layer.inputs
    rows = torch.randn((*ids.shape, x.shape[1]), dtype=x.dtype, device=x.device)
    out = torch.empty_like(x)
    moved = nbytes(rows, weights, ids, out)

    yield Case(
        "moe_fused_mul_sum",
        lambda: ops.moe_fused_mul_sum(rows, weights, ids, None, None, layer.problem.num_experts),
        moved,
    )
    yield Case(
        "moe_fused_mul_sum.out",
        lambda: ops.moe_fused_mul_sum_out(
            rows, weights, ids, None, None, layer.problem.num_experts, out=out
        ),
        moved,
    )


if __name__ == "__main__":
    main("weight_and_reduce", cases)
