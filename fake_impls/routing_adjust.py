"""Outputs of the adjustments to a routing after top-k."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops import sizes


def adjust_routing(
    topk_weights: Tensor,
    topk_ids: Tensor,
    per_expert_scale: Tensor | None,
    is_padding: Tensor | None,
    num_experts: int,
    num_shared_experts: int,
    shared_expert_weight: float,
) -> tuple[Tensor, Tensor]:
    """``(T, k + n)`` float32 weights, and ids in their dtype."""
    tokens, k = sizes.slots(topk_ids)
    sizes.shaped("topk_weights", topk_weights, tokens, k)
    sizes.in_range("num_experts", num_experts, 0, 2**31 - 1)
    sizes.in_range("num_shared_experts", num_shared_experts, 0, sizes.MAX_EXPERTS)
    if per_expert_scale is not None:
        sizes.shaped("per_expert_scale", per_expert_scale, num_experts)
    if is_padding is not None:
        sizes.shaped("is_padding", is_padding, tokens)
    shape = (tokens, k + num_shared_experts)
    return topk_weights.new_empty(shape, dtype=torch.float32), topk_ids.new_empty(shape)


def zero_experts(
    hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor, num_experts: int, skipped_id: int
) -> tuple[Tensor, Tensor, Tensor]:
    """``(T, k)`` float32 weights, ids in their dtype, and ``(T, H)``."""
    tokens, k = sizes.slots(topk_ids)
    sizes.shaped("topk_weights", topk_weights, tokens, k)
    sizes.shaped("hidden_states", hidden_states, tokens, None)
    sizes.in_range("num_experts", num_experts, 0, 2**31 - 1)
    sizes.in_range("skipped_id", skipped_id, -1, 2**31 - 1)
    return (
        topk_weights.new_empty(topk_weights.shape, dtype=torch.float32),
        topk_ids.new_empty(topk_ids.shape),
        hidden_states.new_empty(hidden_states.shape),
    )
