"""Reference of the adjustments to a routing after top-k."""

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
    """Scale weights by expert, append shared experts, then mask padding tokens."""
    weights, ids = topk_weights.float(), topk_ids
    if per_expert_scale is not None:
        valid = (ids >= 0) & (ids < num_experts)
        scale = per_expert_scale.float()[torch.where(valid, ids, 0)]
        weights = torch.where(valid, weights * scale, weights)
    shared = torch.arange(num_experts, num_experts + num_shared_experts, device=ids.device)
    shared = shared.to(ids.dtype).expand(ids.shape[0], -1)
    ids = torch.cat((ids, shared), -1)
    weights = torch.cat((weights, weights.new_full(shared.shape, shared_expert_weight)), -1)
    if is_padding is not None:
        weights = weights.masked_fill(is_padding[:, None], 0.0)
        ids = ids.masked_fill(is_padding[:, None], -1)
    return weights, ids


def zero_experts(
    hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor, num_experts: int, skipped_id: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Remove the slots of identity experts from the routing, and compute their output."""
    identity = topk_ids >= num_experts
    weights = topk_weights.float()
    share = torch.where(identity, weights, 0.0)
    total = share.new_zeros(share.shape[0])
    for j in range(share.shape[1]):  # summed in slot order, as the kernel does
        total = total + share[:, j]
    result = (total[:, None] * hidden_states.float()).to(hidden_states.dtype)
    return (
        weights.masked_fill(identity, 0.0),
        topk_ids.masked_fill(identity, skipped_id),
        result.masked_fill(~identity.any(-1, keepdim=True), 0.0).contiguous(),
    )
