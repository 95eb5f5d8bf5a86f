"""Adjustments to a routing after top-k, for any router. Nothing is mutated."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops import checks, ops
from moe_ops.gradients import wanted
from moe_ops.routing.backward import differentiable_adjustment, differentiable_zero_experts


def adjust_routing(
    topk_weights: Tensor,
    topk_ids: Tensor,
    num_experts: int,
    *,
    per_expert_scale: Tensor | None = None,
    num_shared_experts: int = 0,
    shared_expert_weight: float = 1,
    is_padding: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Scale weights by expert, append shared experts, skip padding tokens, all in one launch.

    In this order: ``weights *= per_expert_scale[ids]`` in float32; the ids ``E .. E + n - 1`` are
    appended to every token's ids, with ``shared_expert_weight``; every id of a padding token
    becomes -1 and its weight 0, so that nothing is computed for it. The mask is read when the
    kernel runs, also in the replay of a CUDA graph. Weights and ``per_expert_scale`` have
    gradients.

    Args:
        topk_weights: ``(T, k)`` fp32, bf16 or fp16.
        topk_ids: ``(T, k)`` int32 or int64; weights of ids outside of ``0 .. E - 1`` are not
            scaled.
        num_experts: E, without shared experts.
        per_expert_scale: ``(E,)`` fp32, bf16 or fp16.
        num_shared_experts: n.
        shared_expert_weight: 1, or 1 / scale if the output is scaled instead of the weights.
        is_padding: ``(T,)`` bool, on the device of the ids.

    Returns:
        ``(T, k + n)`` float32 weights and ids in their dtype.

    Raises:
        TypeError: a wrong dtype.
        ValueError: shapes or devices that disagree; a negative number of experts, or more than
            4096 shared experts; a ``shared_expert_weight`` that is not finite in float32.
        NotImplementedError: forward-mode derivatives and transforms of ``torch.func``.

    Source:
        Gemma-4's ``per_expert_scale``; vLLM's fused shared experts and ``VLLM_MOE_SKIP_PADDING``.
    """
    checks.topk_pair(topk_weights, topk_ids)
    checks.at_least(0, num_experts=num_experts)
    checks.between(0, checks.MAX_EXPERTS, num_shared_experts=num_shared_experts)
    checks.factor("shared_expert_weight", shared_expert_weight)
    if per_expert_scale is not None:
        checks.tensor("per_expert_scale", per_expert_scale, 1, checks.FLOATS)
        checks.same_device("per_expert_scale", per_expert_scale, "topk_ids", topk_ids)
        checks.size(
            "per_expert_scale.shape[0]", per_expert_scale.shape[0], "num_experts", num_experts
        )
    if is_padding is not None:
        check_padding(is_padding, "topk_ids", topk_ids)
    adjust = ops.adjust_routing
    if wanted(topk_weights, per_expert_scale):
        adjust = differentiable_adjustment
    more = (num_experts, num_shared_experts, shared_expert_weight)
    return adjust(topk_weights, topk_ids, per_expert_scale, is_padding, *more)


def check_padding(is_padding: Tensor, name: str, tokens: Tensor) -> None:
    """Check the mask of padding tokens against a tensor of these tokens."""
    checks.tensor("is_padding", is_padding, 1, (torch.bool,))
    checks.same_device("is_padding", is_padding, name, tokens)
    checks.same_tokens("is_padding", is_padding, name, tokens)


def zero_experts(
    hidden_states: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    num_experts: int,
    *,
    skipped_id: int = -1,
) -> tuple[Tensor, Tensor, Tensor]:
    """Remove identity experts from a routing, and compute their output.

    Ids from ``num_experts`` on are experts that return their input:
    ``result[t] = sum_j w[t, j] * hidden_states[t]`` over the slots of identity experts. The weights
    are summed in float32 in the order j = 0..k-1, and the product is rounded once. A token without
    such a slot gets zeros, and its data is not read. In the returned routing these slots have
    weight 0 and id ``skipped_id``. Tokens and weights have gradients.

    Args:
        hidden_states: ``(T, H)`` bf16, fp16 or fp32; any H.
        topk_weights: ``(T, k)`` fp32, bf16 or fp16, already multiplied by any scaling factor.
        topk_ids: ``(T, k)`` int32 or int64.
        num_experts: number of experts that are not identity experts.
        skipped_id: id written to the removed slots. -1 skips them. vLLM's 0 makes expert 0 compute
            rows with weight 0, and load balancing counts them.

    Returns:
        ``(T, k)`` float32 weights, ids in their dtype, and ``result (T, H)`` in the dtype of
        ``hidden_states``.

    Raises:
        TypeError: a wrong dtype.
        ValueError: shapes or devices that disagree; a ``skipped_id`` that is neither -1 nor in
            ``0 .. num_experts - 1``.
        NotImplementedError: forward-mode derivatives and transforms of ``torch.func``.

    Source:
        vLLM ``ZeroExpertRouter`` for LongCat-Flash, which mutates ids and weights, and drops the
        tail of an H that 256 does not divide.
    """
    checks.topk_pair(topk_weights, topk_ids)
    checks.tensor("hidden_states", hidden_states, 2, checks.FLOATS)
    checks.same_device("topk_ids", topk_ids, "hidden_states", hidden_states)
    checks.same_tokens("topk_ids", topk_ids, "hidden_states", hidden_states)
    checks.at_least(0, num_experts=num_experts)
    checks.between(-1, max(num_experts - 1, 0), skipped_id=skipped_id)
    if wanted(hidden_states, topk_weights):
        return differentiable_zero_experts(
            hidden_states, topk_weights, topk_ids, num_experts, skipped_id
        )
    return ops.zero_experts(hidden_states, topk_weights, topk_ids, num_experts, skipped_id)
