"""Reference of the weighted sum."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops.reference.slots import local_experts, none_skipped


def moe_fused_mul_sum(
    inputs: Tensor,
    topk_weights: Tensor | None,
    topk_ids: Tensor | None,
    expert_map: Tensor | None,
    num_valid_tokens: Tensor | None,
    num_local_experts: int,
) -> Tensor:
    """``out[t] = sum_j w[t, j] * x[t, j]`` in float32, slot by slot, rounded once."""
    *slots, hidden_size = inputs.shape
    tokens, k = slots if topk_ids is None else topk_ids.shape
    if topk_weights is None:
        weights = inputs.new_ones((tokens, k), dtype=torch.float32)
    else:
        weights = topk_weights.float()
    keep = None
    if topk_ids is not None and not none_skipped(topk_ids, expert_map, num_local_experts):
        keep = local_experts(topk_ids, expert_map, num_local_experts).view(tokens, k) >= 0
    if num_valid_tokens is not None:
        valid = (torch.arange(tokens, device=inputs.device) < num_valid_tokens.flatten())[:, None]
        keep = valid if keep is None else keep & valid
    rows = inputs.float().reshape(tokens, k, hidden_size)
    if keep is not None and not keep.all():  # skipped rows and weights may be NaN
        weights = torch.where(keep, weights, 0.0)
        rows = torch.where(keep[..., None], rows, 0.0)
    total = rows.new_zeros((tokens, hidden_size))
    for row, weight in zip(rows.unbind(1), weights[..., None].unbind(1), strict=True):
        total.addcmul_(row, weight)
    return total.to(inputs.dtype)


def moe_fused_mul_sum_out(
    inputs: Tensor,
    topk_weights: Tensor | None,
    topk_ids: Tensor | None,
    expert_map: Tensor | None,
    num_valid_tokens: Tensor | None,
    num_local_experts: int,
    *,
    out: Tensor,
) -> None:
    """`moe_fused_mul_sum` written to ``out``."""
    out.copy_(
        moe_fused_mul_sum(
            inputs, topk_weights, topk_ids, expert_map, num_valid_tokens, num_local_experts
        )
    )
