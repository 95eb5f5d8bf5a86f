"""The loop shared by the references of all expert GEMMs: one product per expert that has rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moe_ops.activation import formula
from moe_ops.reference.activation import apply, split
from moe_ops.reference.slots import PlannedRows, take

Product = Callable[[int, Sequence[Tensor], Tensor], None]
"""``product(expert, rows, out)`` writes ``rows[0] @ w[expert].T`` to ``out``, in float32.

``rows`` are the expert's rows of each of the inputs."""


def grouped(
    product: Product,
    inputs: Sequence[Tensor],
    weight: Tensor,
    planned: PlannedRows,
    top_k: int,
    dtype: torch.dtype,
    *,
    bias: Tensor | None,
    topk_weights: Tensor | None = None,
    activation: str = "",
    permuted: str | None = None,
) -> Tensor:
    """``out[s] = f(topk_weights[s] * product + bias[e])`` in float32, rounded once.

    Rows of skipped slots are zeros.

    Args:
        product: see `Product`.
        inputs: the rows ``a``, and other tensors with a row for each of them.
        weight: ``(El, n, ..)``; n is the number of columns of a product.
        planned: the rows of the plan.
        top_k: slots per row of ``a``.
        dtype: dtype of the result.
        bias: ``(El, n)`` or None.
        topk_weights: one per slot, or None.
        activation: key of f; empty: no activation.
        permuted: which of ``"a"`` and ``"out"`` has permuted rows, if any.
    """
    num_slots, n = len(inputs[0]) * top_k, weight.shape[1]
    slots, experts, counts, between = planned
    source = between if permuted == "a" else slots // top_k
    rows = torch.empty((len(slots), n), device=weight.device)
    parts = rows.split(counts)
    taken = [take(x, source).split(counts) for x in inputs]
    for expert, out, *mine in zip(experts, parts, *taken, strict=True):
        product(expert, mine, out)
    if topk_weights is not None:
        rows *= topk_weights.flatten()[slots, None].float()
    if bias is not None:
        for expert, out in zip(experts, parts, strict=True):
            out += bias[expert].float()
    if activation:
        applied = formula(activation)
        rows = apply(*split(rows, applied), applied)
    rows, places = rows.to(dtype), between if permuted == "out" else slots
    if isinstance(places, slice) and len(rows) == num_slots:
        return rows
    result = rows.new_zeros((num_slots, rows.shape[1]))
    if isinstance(places, slice):
        result[places] = rows
        return result
    return result.index_copy_(0, places, rows)
