"""Output of the weighted sum."""

from __future__ import annotations

from torch import Tensor


def moe_fused_mul_sum(
    inputs: Tensor,
    topk_weights: Tensor | None,
    topk_ids: Tensor | None,
    expert_map: Tensor | None,
    num_valid_tokens: Tensor | None,
    num_local_experts: int,
) -> Tensor:
    """``(T, H)`` for ``(T, k, H)``, or for the ``(T * k, H)`` of ``topk_ids``; same dtype."""
    tokens = inputs.shape[0] if topk_ids is None else topk_ids.shape[0]
    return inputs.new_empty(tokens, inputs.shape[-1])


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
    """Nothing: ``out`` is written."""
