"""Permutation: copy token rows into the order of their experts, and back."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops import checks, ops
from moe_ops.gradients import inference_only
from moe_ops.tensors import Permutation

_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by the bytes of one."""


@inference_only
def moe_permute(
    hidden_states: Tensor,
    a1q_scale: Tensor | None,
    topk_ids: Tensor,
    n_expert: int,
    n_local_expert: int = -1,
    expert_map: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]:
    """Copy each slot's row into the order of the experts; skipped slots come last, as zeros.

    Args:
        hidden_states: ``(T, H)`` of any real dtype.
        a1q_scale: ``(T, G)`` per-token scales of any real dtype, which are permuted too; a single
            scale is returned as it is.
        topk_ids: ``(T, k)`` int32 or int64.
        n_expert: E.
        n_local_expert: El; -1 means E.
        expert_map: ``(E,)`` or None.

    Returns:
        ``(rows, scale, expert_first_token_offset, inv_permuted_idx, permuted_idx)``: rows
        ``(T*k, H)``, their scale, int64 ``(El+1,)``, int32 ``(T, k)`` and int32 ``(T*k,)``. The
        rows of an expert are in slot order.

    Raises:
        TypeError, ValueError: a wrong dtype or shape.

    Source:
        vLLM ``moe_permute``.
    """
    checks.tensor("topk_ids", topk_ids, 2, checks.INDICES)
    checks.tensor("hidden_states", hidden_states, 2, None)
    checks.between(1, checks.MAX_EXPERTS, n_expert=n_expert)
    num_local_experts = n_expert
    if n_local_expert != -1:
        checks.between(1, checks.MAX_EXPERTS, n_local_expert=n_local_expert)
        num_local_experts = n_local_expert
    checks.same_tokens("hidden_states", hidden_states, "topk_ids", topk_ids)
    checks.same_device("hidden_states", hidden_states, "topk_ids", topk_ids)
    checks.expert_map(expert_map, topk_ids, n_expert)
    checks.between(1, checks.MAX_EXPERTS, **{"topk_ids.shape[1]": topk_ids.shape[1]})
    rows, scales = _movable("hidden_states", hidden_states), None
    if a1q_scale is not None:
        checks.tensor("a1q_scale", a1q_scale, None, None)
    if a1q_scale is not None and a1q_scale.numel() != 1:
        checks.tensor("a1q_scale", a1q_scale, 2, None)
        checks.same_tokens("a1q_scale", a1q_scale, "hidden_states", hidden_states)
        checks.same_device("a1q_scale", a1q_scale, "hidden_states", hidden_states)
        scales = _movable("a1q_scale", a1q_scale)
    order = Permutation(*ops.moe_permutation(topk_ids, expert_map, num_local_experts))
    slots = order.permuted_idx, order.expert_first_token_offset, topk_ids.shape[1]
    scale = a1q_scale
    if scale is not None and scales is not None:
        scale = ops.gather_rows(scales, *slots).view(scale.dtype)
    return ops.gather_rows(rows, *slots).view(hidden_states.dtype), scale, *order


def _movable(name: str, x: Tensor) -> Tensor:
    """View x as integers, unless it is a float that has kernels and ``new_zeros``."""
    if x.is_complex():
        raise TypeError(f"{name} must have a real dtype, got {x.dtype}")
    if x.is_floating_point() and x.itemsize > 1:
        return x  # operators refuse forward-mode derivatives, which integers would drop
    return x.view(_SAME_SIZE[x.itemsize])


@inference_only
def moe_unpermute(
    permuted_hidden_states: Tensor,
    topk_weights: Tensor | None,
    inv_permuted_idx: Tensor,
    expert_first_token_offset: Tensor | None = None,
) -> Tensor:
    """Invert `moe_permute`, and sum each token's rows with their weights.

    The sum is accumulated in float32 for j = 0..k-1 in that order and rounded once.

    Args:
        permuted_hidden_states: ``(T*k, H)`` bf16, fp16 or fp32.
        topk_weights: ``(T, k)``, or None for weight 1.
        inv_permuted_idx: int32 ``(T, k)``, the row of each slot; indices out of range are skipped.
        expert_first_token_offset: int64 ``(El+1,)``. Rows from its last entry on belong to skipped
            slots and are not read. Without it every row counts.

    Returns:
        ``(T, H)``, contiguous, in the dtype of the rows.

    Raises:
        TypeError, ValueError: a wrong dtype or shape.

    Source:
        vLLM ``moe_unpermute``.
    """
    checks.tensor("permuted_hidden_states", permuted_hidden_states, 2, checks.FLOATS)
    checks.tensor("inv_permuted_idx", inv_permuted_idx, 2, (torch.int32,))
    rows = ("permuted_hidden_states", permuted_hidden_states)
    checks.same_device("inv_permuted_idx", inv_permuted_idx, *rows)
    if topk_weights is not None:
        checks.topk_pair(topk_weights, inv_permuted_idx, "inv_permuted_idx")
    if expert_first_token_offset is not None:
        checks.tensor("expert_first_token_offset", expert_first_token_offset, 1, (torch.int64,))
        offsets = expert_first_token_offset.shape[0]
        if offsets < 2:
            raise ValueError(
                f"expert_first_token_offset must have at least 2 entries, got {offsets}"
            )
        checks.same_device("expert_first_token_offset", expert_first_token_offset, *rows)
    return ops.moe_unpermute(
        permuted_hidden_states, topk_weights, inv_permuted_idx, expert_first_token_offset
    )
