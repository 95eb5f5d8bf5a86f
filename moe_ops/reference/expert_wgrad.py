"""References of the gradients of expert weights, biases and router weights.

Rows belong to slots. Where there is one row per token, every slot of the token reads it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from moe_ops.dispatch.row_tiles import gemm_rule
from moe_ops.reference.slots import local_experts, planned_rows
from moe_ops.scheme import UNQUANTIZED
from moe_ops.tensors import AnyTiles


def _rows_by_expert(
    rows: tuple[Tensor, ...],
    topk_weights: Tensor | None,
    tiles: AnyTiles,
    num_experts: int,
    scheme: str,
    batch_invariant: bool,
    *,
    rounded: bool = True,
) -> Iterator[tuple[int, list[Tensor]]]:
    """Each expert that has slots, with its rows in float32: the first ones times router weights.

    Args:
        rows: one row per slot or per token each.
        topk_weights: one per slot, or None.
        tiles: see `Tiles`.
        num_experts: El.
        scheme: the scheme of the plan.
        batch_invariant: whether the plan is batch-invariant.
        rounded: whether rows times router weights are rounded to the dtype of the rows.
    """
    topk_ids, num_slots = tiles[1], max(len(x) for x in rows)
    if topk_ids is not None:
        num_slots = topk_ids.numel()
    if num_slots == 0:
        return
    rule = gemm_rule(scheme, rows[0], tiles, batch_invariant)
    slots, experts, counts, *_ = planned_rows(tiles, rule, num_slots, num_experts)
    for expert, mine in zip(experts, slots.split(counts), strict=True):
        first, *others = (x[mine // (num_slots // len(x))] for x in rows)
        if topk_weights is not None:
            weight = topk_weights.flatten()[mine, None].float()
            first = (first.float() * weight).to(first.dtype if rounded else torch.float32)
        yield expert, [x.float() for x in (first, *others)]


def expert_wgrad(
    dy: Tensor,
    x: Tensor,
    topk_weights: Tensor | None,
    tiles: AnyTiles,
    num_experts: int,
    scheme: str,
    out_dtype: torch.dtype,
    batch_invariant: bool = False,
) -> Tensor:
    """``out[e] = (topk_weights * dy).T @ x`` over the slots of e; zeros for an expert without."""
    out = dy.new_zeros((num_experts, dy.shape[1], x.shape[1]), dtype=out_dtype)
    of_experts = _rows_by_expert((dy, x), topk_weights, tiles, num_experts, scheme, batch_invariant)
    for expert, (d, r) in of_experts:
        out[expert] = (d.t() @ r).to(out_dtype)
    return out


def expert_wgrad_out(
    dy: Tensor,
    x: Tensor,
    topk_weights: Tensor | None,
    tiles: AnyTiles,
    num_experts: int,
    batch_invariant: bool = False,
    *,
    out: Tensor,
) -> None:
    """``out[e] += (topk_weights * dy).T @ x`` over the slots of e; an expert without stays."""
    settings = num_experts, UNQUANTIZED.key, batch_invariant
    for expert, (d, r) in _rows_by_expert((dy, x), topk_weights, tiles, *settings):
        out[expert] += d.t() @ r


def expert_bias_grad(
    dy: Tensor,
    topk_weights: Tensor | None,
    tiles: AnyTiles,
    num_experts: int,
    scheme: str,
    batch_invariant: bool = False,
) -> Tensor:
    """``out[e]``: the sum of ``topk_weights * dy`` over the slots of e, in float32."""
    out = dy.new_zeros((num_experts, dy.shape[1]), dtype=torch.float32)
    of_experts = _rows_by_expert(
        (dy,), topk_weights, tiles, num_experts, scheme, batch_invariant, rounded=False
    )
    for expert, (d,) in of_experts:
        out[expert] = d.sum(0)
    return out


def slot_products(
    x: Tensor,
    y: Tensor,
    topk_ids: Tensor,
    expert_map: Tensor | None,
    num_local_experts: int,
    by_expert: bool,
) -> Tensor:
    """``out[t, j] = <x[t], y[t * k + j]>``, or ``<x[t], y[e]>`` by expert; 0 for skipped slots."""
    expert = local_experts(topk_ids, expert_map, num_local_experts)
    skipped = expert[:, None] < 0
    rows = y[expert.clamp(min=0)] if by_expert else y
    products = x.float().repeat_interleave(topk_ids.shape[1], 0) * rows.float()
    return products.masked_fill(skipped, 0.0).sum(1).view(topk_ids.shape)
