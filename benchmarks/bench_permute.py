"""Time the permutation operators: sorting rows by expert, and the way back."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from stages import Case, Layer, main, nbytes

from moe_ops import ops


def cases(layer: Layer) -> Iterator[Case]:
    x, weights, ids, _ = layer.inputs
    k, num_experts = layer.problem.top_k, layer.problem.num_experts

    def permutation() -> tuple:
        return ops.moe_permutation(ids, None, num_experts)

    offset, inverse, order = permutation()
    rows = ops.gather_rows(x, order, offset, k)

    yield Case("moe_permutation", permutation, nbytes(ids, offset, inverse, order))
    yield Case("gather_rows", lambda: ops.gather_rows(x, order, offset, k), nbytes(x, order, rows))
    columns = torch.rand(num_experts, x.shape[1], device=x.device).argsort(1).int()
    yield Case(
        "order_columns",
        lambda: ops.order_columns(x, columns, ids, None),
        nbytes(x, columns, ids, rows),
    )
    yield Case(
        "moe_unpermute",
        lambda: ops.moe_unpermute(rows, weights, inverse, offset),
        nbytes(rows, weights, inverse, x),
    )


if __name__ == "__main__":
    main("permute", cases)
