"""The top-k routers with a backward pass."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from moe_ops import ops
from moe_ops.gradients import check_transforms


def differentiable_topk(
    function: str,
    gating_output: Tensor,
    e_score_correction_bias: Tensor | None,
    how: tuple[int, bool, str, float],
    groups: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Weights and ids, with a gradient of the logits through the weights of the chosen experts.

    Args:
        function: the caller's name, for errors.
        gating_output: ``(T, E)``.
        e_score_correction_bias: ``(E,)`` or None; it has no gradient, since it only chooses.
        how: k, renormalize, scoring function, scaling factor.
        groups: number of groups, and of groups to keep; None: `ops.fused_topk`.
    """
    check_transforms(function)
    bias = None if e_score_correction_bias is None else e_score_correction_bias.detach()
    return _TopK.apply(gating_output, bias, how, groups)


class _TopK(Function):
    @staticmethod
    def forward(
        ctx: Any,
        gating_output: Tensor,
        bias: Tensor | None,
        how: tuple[int, bool, str, float],
        groups: tuple[int, int] | None,
    ) -> tuple[Tensor, Tensor]:
        """Route; the logits and the ids are kept."""
        if groups is None:
            weights, ids = ops.fused_topk(gating_output, bias, *how)
        else:
            weights, ids = ops.grouped_topk(gating_output, bias, *how, *groups)
        ctx.how = how
        ctx.save_for_backward(gating_output, ids)
        ctx.mark_non_differentiable(ids)
        return weights, ids

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Any) -> Any:
        """The gradient of the logits."""
        gating_output, ids = ctx.saved_tensors
        return ops.topk_backward(grad, gating_output, ids, *ctx.how[1:]), None, None, None
