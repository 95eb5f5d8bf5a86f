"""The loop shared by the references of all expert GEMMs: one product per expert that has rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moe_ops.activation import formula
from moe_ops.dispatch.tiles import TileRule
from moe_ops.reference.activation import apply, split
from moe_ops.reference.slots import planned_rows, runs
from moe_ops.tensors import AnyTiles

Product = Callable[[int, Tensor, Tensor], None]
"""``product(expert, source, out)`` writes ``a[source] @ w[expert].T`` to ``out``, in float32."""


def empty_rows(num_slots: int, weight: Tensor, dtype: torch.dtype, activation: str) -> Tensor:
    """Zeros for the result of a GEMM with a weight ``(El, n, ..)``."""
    gated = activation and formula(activation).gated
    width = weight.shape[1] // 2 if gated else weight.shape[1]
    return weight.new_zeros((num_slots, width), dtype=dtype)


def grouped(
    out: Tensor,
    product: Product,
    weight: Tensor,
    tiles: AnyTiles,
    rule: TileRule,
    top_k: int,
    *,
    bias: Tensor | None,
    topk_weights: Tensor | None = None,
    activation: str = "",
    permuted: str | None = None,
) -> Tensor:
    """``out[s] = f(topk_weights[s] * product + bias[e])`` in float32, rounded once.

    Rows of skipped slots are zeros.

    Args:
        out: zeros, as `empty_rows` makes them.
        product: see `Product`.
        weight: ``(El, n, ..)``; n is the number of columns of a product.
        tiles: plan, ``topk_ids`` and expert map.
        rule: the rule by which the row tile of the plan was chosen.
        top_k: slots per row of ``a``.
        bias: ``(El, n)`` or None.
        topk_weights: one per slot, or None.
        activation: key of f; empty: no activation.
        permuted: which of ``"a"`` and ``"out"`` has permuted rows, if any.
    """
    num_slots, (num_experts, n, _) = out.shape[0], weight.shape
    if num_slots == 0:
        return out
    slots, experts, between = planned_rows(tiles, rule, num_slots, num_experts)
    source = between if permuted == "a" else slots // top_k
    rows = torch.empty((len(slots), n), device=out.device)
    for expert, mine in runs(experts):
        product(expert, source[mine], rows[mine])
    if topk_weights is not None:
        rows *= topk_weights.flatten()[slots, None].float()
    if bias is not None:
        rows += bias[experts].float()
    if activation:
        applied = formula(activation)
        rows = apply(*split(rows, applied), applied)
    out[between if permuted == "out" else slots] = rows.to(out.dtype)
    return out
