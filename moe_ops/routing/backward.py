"""Routers, and adjustments to a routing, with a backward pass.

Weights have gradients, the choice of experts has none. Adjustments are linear in the weights, and
each is its own backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from moe_ops import ops
from moe_ops.gradients import check_transforms, once
from moe_ops.scheme import UNQUANTIZED


def differentiable_topk(
    function: str,
    gating_output: Tensor,
    e_score_correction_bias: Tensor | None,
    settings: tuple[int, bool, str, float],
    groups: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Weights and ids, with a gradient of the logits through the weights of the chosen experts.

    Args:
        function: the caller's name, for errors.
        gating_output: ``(T, E)``.
        e_score_correction_bias: ``(E,)`` or None; it has no gradient, since it only chooses.
        settings: k, renormalize, scoring function, scaling factor.
        groups: number of groups, and of groups to keep; None: `ops.fused_topk`.
    """
    check_transforms(function)
    bias = None if e_score_correction_bias is None else e_score_correction_bias.detach()
    return _TopK.apply(gating_output, bias, settings, groups)


class _Chosen(Function):
    """Weights that are scores of the chosen experts; ``forward`` keeps logits, ids and settings."""

    @staticmethod
    @once("fused_topk, grouped_topk and hash_topk")
    def backward(ctx: Any, saved: tuple[Any, ...], grad: Tensor, _: Any) -> Any:
        """The gradient of the logits."""
        gating_output, ids = saved
        return ops.topk_backward(grad, gating_output, ids, *ctx.weighing), None, None, None


class _TopK(_Chosen):
    @staticmethod
    def forward(
        ctx: Any,
        gating_output: Tensor,
        bias: Tensor | None,
        settings: tuple[int, bool, str, float],
        groups: tuple[int, int] | None,
    ) -> tuple[Tensor, Tensor]:
        """Route; the logits and the ids are kept."""
        topk, renormalize, scoring_func, scale = settings
        if groups is None:
            weights, ids = ops.fused_topk(
                gating_output, bias, topk, renormalize, scoring_func, scale
            )
        else:
            weights, ids = ops.grouped_topk(
                gating_output, bias, topk, renormalize, scoring_func, scale, *groups
            )
        ctx.weighing = renormalize, scoring_func, scale
        ctx.save_for_backward(gating_output, ids)
        ctx.mark_non_differentiable(ids)
        return weights, ids


def differentiable_hash_topk(
    gating_output: Tensor, input_ids: Tensor, table: Tensor, weighing: tuple[bool, str, float]
) -> tuple[Tensor, Tensor]:
    """`ops.hash_topk` with a gradient of the logits; ``weighing``: its other arguments."""
    check_transforms("hash_topk")
    return _HashTopK.apply(gating_output, input_ids, table, weighing)


class _HashTopK(_Chosen):
    @staticmethod
    def forward(
        ctx: Any,
        gating_output: Tensor,
        input_ids: Tensor,
        table: Tensor,
        weighing: tuple[bool, str, float],
    ) -> tuple[Tensor, Tensor]:
        """Look experts up; the logits and the ids are kept."""
        weights, ids = ops.hash_topk(gating_output, input_ids, table, *weighing)
        ctx.weighing = weighing
        ctx.save_for_backward(gating_output, ids)
        ctx.mark_non_differentiable(ids)
        return weights, ids


def differentiable_sparsemixer(gating_output: Tensor, jitter_eps: float) -> tuple[Tensor, Tensor]:
    """`ops.sparsemixer` with a gradient of the logits that take part in a softmax."""
    check_transforms("sparsemixer")
    return _Sparsemixer.apply(gating_output, jitter_eps)


class _Sparsemixer(Function):
    @staticmethod
    def forward(ctx: Any, gating_output: Tensor, jitter_eps: float) -> tuple[Tensor, Tensor]:
        """Route; the logits and the ids are kept."""
        weights, ids = ops.sparsemixer(gating_output, jitter_eps)
        ctx.jitter_eps = jitter_eps
        ctx.save_for_backward(gating_output, ids)
        ctx.mark_non_differentiable(ids)
        return weights, ids

    @staticmethod
    @once("sparsemixer")
    def backward(ctx: Any, saved: tuple[Any, ...], grad: Tensor, _: Any) -> Any:
        """``sum_j grad[j] * p_j[chosen] * (onehot(chosen) - p_j)`` for the softmax p_j of choice j.

        Computed in float64 and rounded once.
        """
        gating_output, ids = saved
        logits = gating_output.float()
        left, gradient = logits.isfinite(), torch.zeros_like(logits, dtype=torch.float64)
        for j in range(2):
            chosen = ids[:, j : j + 1].long()
            peak = logits.gather(1, chosen)
            far = (peak - logits) / logits.abs().clamp(min=peak) > 2 * ctx.jitter_eps
            kept = left & ~far & peak.isfinite()
            share = torch.where(kept, (logits.double() - peak.double()).exp(), 0.0)
            share = share / share.sum(1, keepdim=True).clamp(min=1)  # the chosen one's was 1
            slope = share.gather(1, chosen) * grad[:, j : j + 1].double()
            gradient = gradient.scatter_add(1, chosen, slope) - slope * share
            left = left.scatter(1, chosen, value=False)
        return gradient.to(gating_output.dtype), None


def differentiable_adjustment(
    topk_weights: Tensor,
    topk_ids: Tensor,
    per_expert_scale: Tensor | None,
    is_padding: Tensor | None,
    *more: Any,
) -> tuple[Tensor, Tensor]:
    """`ops.adjust_routing` with gradients of the weights and of the scales of experts."""
    check_transforms("adjust_routing")
    return _Adjust.apply(topk_weights, per_expert_scale, topk_ids, is_padding, *more)


class _Adjust(Function):
    @staticmethod
    def forward(
        ctx: Any,
        topk_weights: Tensor,
        scale: Tensor | None,
        topk_ids: Tensor,
        is_padding: Tensor | None,
        num_experts: int,
        num_shared_experts: int,
        shared_expert_weight: float,
    ) -> tuple[Tensor, Tensor]:
        """Adjust; the arguments are kept."""
        more = (num_experts, num_shared_experts, shared_expert_weight)
        weights, ids = ops.adjust_routing(topk_weights, topk_ids, scale, is_padding, *more)
        ctx.num_experts = num_experts
        ctx.save_for_backward(topk_weights, scale, topk_ids, is_padding)
        ctx.mark_non_differentiable(ids)
        return weights, ids

    @staticmethod
    @once("adjust_routing")
    def backward(ctx: Any, saved: tuple[Any, ...], grad: Tensor, _: Any) -> Any:
        """Scale the gradient as the weights were; sum it over the slots of each expert."""
        (weights, scale, ids, padding), experts = saved, ctx.num_experts
        grad = grad[:, : ids.shape[1]].contiguous()
        dweights = dscale = None
        if ctx.needs_input_grad[0]:
            adjusted, _ = ops.adjust_routing(grad, ids, scale, padding, experts, 0, 1.0)
            dweights = adjusted.to(weights.dtype)
        if ctx.needs_input_grad[1]:
            unscaled, experts_of = ops.adjust_routing(weights, ids, None, padding, experts, 0, 1.0)
            plan = ops.plan_slots(experts_of, None, experts, UNQUANTIZED.key, torch.float32)
            tiles = [plan, experts_of, None]
            products = (grad * unscaled).view(-1, 1)
            sums = ops.expert_bias_grad(products, None, tiles, experts, UNQUANTIZED.key)
            dscale = sums.flatten().to(scale.dtype)
        return dweights, dscale, None, None, None, None, None


def differentiable_zero_experts(
    hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor, *more: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`ops.zero_experts` with gradients of tokens and weights."""
    check_transforms("zero_experts")
    return _ZeroExperts.apply(hidden_states, topk_weights, topk_ids, *more)


class _ZeroExperts(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, ids: Tensor, num_experts: int, skipped_id: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Remove identity experts; the arguments are kept."""
        ctx.num_experts = num_experts
        ctx.save_for_backward(x, weights, ids)
        kept, left, result = ops.zero_experts(x, weights, ids, num_experts, skipped_id)
        ctx.mark_non_differentiable(left)
        return kept, left, result

    @staticmethod
    @once("zero_experts")
    def backward(ctx: Any, saved: tuple[Any, ...], of_weights: Tensor, _: Any, grad: Tensor) -> Any:
        """``sum_j w[j] * grad`` for tokens, ``<grad, x>`` for weights of identity experts."""
        (x, weights, ids), experts = saved, ctx.num_experts
        dx = dweights = None
        if ctx.needs_input_grad[0]:
            dx = ops.zero_experts(grad.contiguous(), weights, ids, experts, -1)[2]
        if ctx.needs_input_grad[1]:
            product = (grad.float() * x.float()).sum(1, keepdim=True)
            dweights = torch.where(ids >= experts, product, of_weights).to(weights.dtype)
        return dx, dweights, None, None, None
