"""Outputs of what is done to a routing after the choice."""

from __future__ import annotations

import torch
from torch import Tensor


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
    shape = (topk_ids.shape[0], topk_ids.shape[1] + num_shared_experts)
    return topk_weights.new_empty(shape, dtype=torch.float32), topk_ids.new_empty(shape)


def zero_experts(
    hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor, num_experts: int, skipped_id: int
) -> tuple[Tensor, Tensor, Tensor]:
    """``(T, k)`` float32 weights, ids in their dtype, and ``(T, H)``."""
    return (
        topk_weights.new_empty(topk_weights.shape, dtype=torch.float32),
        topk_ids.new_empty(topk_ids.shape),
        hidden_states.new_empty(hidden_states.shape),
    )
