"""The weighted sum over the slots of each token, with its backward pass."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from moe_ops import ops
from moe_ops.gradients import check_transforms, once
from moe_ops.pipeline.lora import pairs_of
from moe_ops.tensors import Routing


def sum_of_slots(rows: Tensor, routing: Routing, num_experts: int, function: str) -> Tensor:
    """Sum the rows ``(T * k, H)`` of each token, times router weights: ``(T, H)``.

    Slots without a local expert, of ``num_experts``, are not read. ``function`` names the caller in
    the error about a transform of ``torch.func``.
    """
    check_transforms(function)
    out: Tensor = _WeightedSum.apply(rows, *routing, num_experts)
    return out


def skipped_slots(routing: Routing, num_experts: int) -> Tensor:
    """Which slots have no local expert, ``(T, k)``."""
    return pairs_of(routing, num_experts, None, 0) < 0


class _WeightedSum(Function):
    """`ops.moe_fused_mul_sum` over the slots' rows, with gradients of rows and router weights."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        expert_map: Tensor | None,
        num_experts: int,
    ) -> Tensor:
        """Sum each token's rows, times router weights."""
        ctx.num_experts = num_experts
        ctx.save_for_backward(rows, topk_weights, topk_ids, expert_map)
        return ops.moe_fused_mul_sum(
            rows.contiguous(), topk_weights, topk_ids, expert_map, None, num_experts
        )

    @staticmethod
    @once("the weighted sum of slots")
    def backward(ctx: Any, saved: tuple[Any, ...], grad: Tensor) -> Any:
        """Give every slot its token's gradient, times its router weight."""
        rows, *routed = saved
        weights, ids, expert_map = routing = Routing(*routed)
        drows = dweights = None
        if ctx.needs_input_grad[0]:
            used = weights.float().masked_fill(skipped_slots(routing, ctx.num_experts), 0.0)
            drows = (grad[:, None] * used[:, :, None]).to(rows.dtype).flatten(0, 1)
        if ctx.needs_input_grad[1]:
            slots = (ids, expert_map, ctx.num_experts)
            dweights = ops.slot_products(grad.contiguous(), rows.contiguous(), *slots, False)
            dweights = dweights.to(weights.dtype)
        return drows, dweights, None, None, None
