"""Dispatch to the Batched format and the sum over it, with backward passes: one is the other's.

The gradient of rows that are copied to their experts is a sum over the rows of each token; the
gradient of that sum copies rows to their experts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd import Function

from moe_ops import ops
from moe_ops.gradients import check_transforms, once


class Places(NamedTuple):
    """The experts that rows belong to, and how many rows each has room for."""

    first_expert: int
    num_local_experts: int
    max_num_tokens: int


def dispatched(
    x: Tensor, topk_weights: Tensor | None, topk_ids: Tensor, places: Places, drops: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`ops.batched_dispatch` of rows that are not quantized: rows, counts, and dropped rows."""
    check_transforms("BatchedPrepareAndFinalize.prepare")
    return _Dispatch.apply(x, topk_weights, topk_ids, places, drops)


def combined(rows: Tensor, topk_weights: Tensor | None, topk_ids: Tensor, places: Places) -> Tensor:
    """The weighted sum over the rows ``(El, M, H)`` of each token."""
    check_transforms("TopKWeightAndReduceNaiveBatched.apply")
    return _Combine.apply(rows, topk_weights, topk_ids, places)


def _unpermuted(rows: Tensor, topk_weights: Tensor | None, row_of_slot: Tensor) -> Tensor:
    return ops.moe_unpermute(rows.flatten(0, 1), topk_weights, row_of_slot, None)


def _dot_products(x: Tensor, rows: Tensor, row_of_slot: Tensor) -> Tensor:
    """``<x[t], rows[row_of_slot[t, j]]>``; 0 for slots without a row."""
    at = row_of_slot.clamp(min=0).flatten()
    of_slots = rows.flatten(0, 1).index_select(0, at)
    ids = row_of_slot.clamp(max=0)  # 0: the slot has a row
    return ops.slot_products(x, of_slots, ids, None, 1, False)


class _Dispatch(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        topk_weights: Tensor | None,
        topk_ids: Tensor,
        places: Places,
        drops: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Copy rows to their experts, times router weights if they are given."""
        rows, _, counts, dropped = ops.batched_dispatch(
            x, None, topk_weights, topk_ids, *places, "", drops
        )
        ctx.places = places
        weighted = topk_weights is not None and ctx.needs_input_grad[1]
        ctx.save_for_backward(x if weighted else None, topk_weights, topk_ids)
        ctx.mark_non_differentiable(counts, dropped)
        return rows, counts, dropped

    @staticmethod
    @once("BatchedPrepareAndFinalize.prepare")
    def backward(ctx: Any, saved: tuple[Any, ...], grad: Tensor, *_: Any) -> Any:
        """Sum the gradients of each token's rows."""
        x, weights, ids = saved
        row_of_slot, grad = ops.batched_rows(ids, *ctx.places), grad.contiguous()
        dx = _unpermuted(grad, weights, row_of_slot) if ctx.needs_input_grad[0] else None
        dweights = None
        if ctx.needs_input_grad[1]:
            dweights = _dot_products(x, grad, row_of_slot).to(weights.dtype)
        return dx, dweights, None, None, None


class _Combine(Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, topk_weights: Tensor | None, topk_ids: Tensor, places: Places
    ) -> Tensor:
        """Sum the rows of each token, times router weights if they are given."""
        row_of_slot = ops.batched_rows(topk_ids, *places)
        weighted = topk_weights is not None and ctx.needs_input_grad[1]
        ctx.places = places
        ctx.save_for_backward(rows if weighted else None, topk_weights, topk_ids, row_of_slot)
        return _unpermuted(rows, topk_weights, row_of_slot)

    @staticmethod
    @once("TopKWeightAndReduceNaiveBatched.apply")
    def backward(ctx: Any, saved: tuple[Any, ...], grad: Tensor) -> Any:
        """Copy the gradient to the rows of each token."""
        rows, weights, ids, row_of_slot = saved
        drows = dweights = None
        grad = grad.contiguous()
        if ctx.needs_input_grad[0]:
            drows = ops.batched_dispatch(grad, None, weights, ids, *ctx.places, "")[0]
        if ctx.needs_input_grad[1]:
            dweights = _dot_products(grad, rows, row_of_slot).to(weights.dtype)
        return drows, dweights, None, None
