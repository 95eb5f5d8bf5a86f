"""The loop that the references of all expert GEMMs share: one product for each expert with rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moe_ops.activation import formula
from moe_ops.reference.activation import apply, split
from moe_ops.reference.slots import planned_slots, rows_between, runs
from moe_ops.tensors import AnyTiles

Product = Callable[[int, Tensor, Tensor], None]
"""``product(expert, source, out)`` writes ``a[source] @ w[expert].T`` to ``out``, in float32."""


def grouped(
    out: Tensor,
    product: Product,
    num_experts: int,
    n: int,
    tiles: AnyTiles,
    row_tiles: Sequence[int],
    top_k: int,
    *,
    bias: Tensor | None,
    topk_weights: Tensor | None = None,
    activation: str = "",
    permuted: str | None = None,
) -> Tensor:
    """``out[s] = f(topk_weights[s] * product + bias[e])`` in float32, rounded once; else zeros.

    Args:
        out: ``(slots, columns)``.
        product: see `Product`.
        num_experts: El.
        n: columns of a product.
        tiles: plan, ``topk_ids`` and expert map.
        row_tiles: what the plan was made with.
        top_k: slots of a row of ``a``.
        bias: ``(El, n)`` or None.
        topk_weights: one for each slot, or None.
        activation: key of f; empty: there is none.
        permuted: which of ``a`` and ``out`` has its rows in expert order, if any.
    """
    out.zero_()
    num_slots = out.shape[0]
    if num_slots == 0:
        return out
    slots, experts = planned_slots(tiles, row_tiles, num_slots, num_experts)
    between = slots
    if permuted is not None:
        between = rows_between(tiles, row_tiles, num_slots, num_experts)
    source = between if permuted == "a" else slots // top_k
    rows = torch.empty((len(slots), n), device=out.device)
    for expert, mine in runs(experts):
        product(expert, source[mine], rows[mine])
    if topk_weights is not None:
        rows *= topk_weights.flatten()[slots, None].float()
    if bias is not None:
        rows += bias[experts].float()
    if activation:
        rule = formula(activation)
        rows = apply(*split(rows, rule), rule)
    out[between if permuted == "out" else slots] = rows.to(out.dtype)
    return out
