"""Gradients of what travels between ranks: each way is the backward pass of the other.

`TokenExchange.send` copies tokens to ranks, so their gradients travel as sums do, and are added.
`TokenExchange.send_back` adds sums of ranks, so the gradient of the result travels as tokens do.
Where ranks have the same tokens, `Copied` and `Added` are such a pair. Gradients travel in
collectives: all ranks must run a backward pass in the same order, for gradients of the same
tensors.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from moe_ops.gradients import once
from moe_ops.pipeline.exchange.groups import RankGroup


class Sent(Function):
    """Rows and router weights that have arrived, as functions of those that were sent."""

    @staticmethod
    def forward(
        ctx: Any,
        exchange: Any,
        a1: Tensor,
        topk_weights: Tensor,
        rows: Tensor,
        weights: Tensor,
        ids: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return what has arrived; ``ids`` name the call."""
        ctx.exchange, ctx.ids, ctx.num_tokens = exchange, ids, a1.shape[0]
        return rows.view_as(rows), weights.view_as(weights)

    @staticmethod
    @once("FusedMoE over ranks")
    def backward(ctx: Any, _: tuple[Any, ...], of_rows: Tensor, of_weights: Tensor) -> Any:
        """Send gradients back to their tokens' ranks, and add them."""
        asked = ctx.needs_input_grad
        gradients = ctx.exchange.send_gradients_back(
            of_rows if asked[1] else None, of_weights if asked[2] else None, ctx.ids
        )
        dx, dweights = (None if g is None else g[: ctx.num_tokens] for g in gradients)
        return None, dx, dweights, None, None, None


def with_history(exchange: Any, a1: Tensor, topk_weights: Tensor, arrived: Any) -> Any:
    """Return an `Arrived` as a function of the tokens that were sent, if they require grad."""
    if not (a1.requires_grad or topk_weights.requires_grad):
        return arrived
    came = arrived.rows, arrived.topk_weights, arrived.topk_ids
    rows, weights = Sent.apply(exchange, a1, topk_weights, *came)
    return arrived._replace(rows=rows, topk_weights=weights)


class SentBack(Function):
    """The sums of ranks, as a function of this rank's sums."""

    @staticmethod
    def forward(ctx: Any, exchange: Any, sums: Tensor, result: Tensor, ids: Tensor) -> Tensor:
        """Return the result of `TokenExchange.send_back`.

        ``ids`` name the call. They are saved too, so that a checkpoint computes the call again
        before gradients travel, and not between the two ways that they travel.
        """
        ctx.exchange, ctx.ids = exchange, ids
        ctx.save_for_backward(ids)
        return result.view_as(result)

    @staticmethod
    @once("FusedMoE over ranks")
    def backward(ctx: Any, _: tuple[Any, ...], grad: Tensor) -> Any:
        """Send the gradient to the ranks whose sums were added."""
        return None, ctx.exchange.send_again(grad.contiguous(), ctx.ids)(), None, None


class Copied(Function):
    """Tensors that all ranks have, of which each computes a part of the result.

    Source:
        Megatron-LM (arXiv 1909.08053), section 3: the operator f; `Added` is g.
    """

    @staticmethod
    def forward(ctx: Any, group: RankGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors."""
        ctx.group = group
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    @once("FusedMoE over ranks")
    def backward(ctx: Any, _: tuple[Any, ...], *grads: Tensor) -> Any:
        """Add the parts of the gradients that the ranks have."""
        asked = zip(grads, ctx.needs_input_grad[1:], strict=True)
        return None, *(ctx.group.all_reduce(grad) if wanted else None for grad, wanted in asked)


class Added(Function):
    """The sum of the ranks' parts, which all ranks get; so each has the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, group: RankGroup, part: Tensor) -> Tensor:
        """Add the parts."""
        return group.all_reduce(part)

    @staticmethod
    @once("FusedMoE over ranks")
    def backward(ctx: Any, _: tuple[Any, ...], grad: Tensor) -> Any:
        """Pass the gradient on."""
        return None, grad
