"""Reference of the permutation operators."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops.reference.slots import local_experts


def moe_permutation(
    topk_ids: Tensor, expert_map: Tensor | None, num_local_experts: int
) -> tuple[Tensor, Tensor, Tensor]:
    """A stable sort of the slots by expert, skipped slots last."""
    bucket = local_experts(topk_ids, expert_map, num_local_experts)
    bucket = torch.where(bucket < 0, num_local_experts, bucket)
    slots = torch.argsort(bucket, stable=True)
    rows = torch.empty_like(slots)
    rows[slots] = torch.arange(len(slots), device=slots.device)
    counts = torch.bincount(bucket, minlength=num_local_experts + 1)
    offset = counts.cumsum(0) - counts
    return offset, rows.view(topk_ids.shape).to(torch.int32), slots.to(torch.int32)


def gather_rows(
    x: Tensor, permuted_idx: Tensor, expert_first_token_offset: Tensor, top_k: int
) -> Tensor:
    """``out[r] = x[permuted_idx[r] // top_k]``.

    Rows past the last expert's are zeros, and so are rows whose ``permuted_idx[r]`` is not a slot.
    """
    slot = permuted_idx.long()
    used = torch.arange(len(slot), device=x.device) < expert_first_token_offset[-1]
    used &= (slot >= 0) & (slot < len(x) * top_k)
    out = x.new_zeros((len(slot), x.shape[1]))
    out[used] = x[slot[used] // top_k]
    return out


def order_columns(x: Tensor, order: Tensor, topk_ids: Tensor, expert_map: Tensor | None) -> Tensor:
    """``out[s] = x[s // k, order[e]]`` for the expert e of slot s.

    Rows of skipped slots are zeros, and so are columns whose entry of ``order`` is out of range.
    """
    k, experts = topk_ids.shape[1], local_experts(topk_ids, expert_map, order.shape[0])
    out = x.new_zeros((experts.shape[0], x.shape[1]))
    for expert, columns in enumerate(order.long()):
        slots = (experts == expert).nonzero()[:, 0]
        valid = (columns >= 0) & (columns < x.shape[1])
        ordered = x[slots // k].index_select(1, torch.where(valid, columns, 0))
        out[slots] = torch.where(valid, ordered, out[slots])
    return out


def moe_unpermute(
    permuted_hidden_states: Tensor,
    topk_weights: Tensor | None,
    inv_permuted_idx: Tensor,
    expert_first_token_offset: Tensor | None,
) -> Tensor:
    """``out[t] = sum_j w[t, j] * rows[inv[t, j]]`` in float32, slot by slot, rounded once."""
    tokens, k = inv_permuted_idx.shape
    num_rows, hidden_size = permuted_hidden_states.shape
    total = permuted_hidden_states.new_zeros((tokens, hidden_size), dtype=torch.float32)
    for j in range(k):
        row = inv_permuted_idx[:, j].long()
        valid = (row >= 0) & (row < num_rows)
        if expert_first_token_offset is not None:
            valid &= row < expert_first_token_offset[-1]
        if num_rows == 0:
            continue
        rows = permuted_hidden_states[torch.where(valid, row, 0)].float()
        weights = rows.new_ones(tokens) if topk_weights is None else topk_weights[:, j].float()
        rows, weights = (torch.where(valid[:, None], x, 0.0) for x in (rows, weights[:, None]))
        total.addcmul_(rows, weights)  # as in `moe_fused_mul_sum`: both formats agree bitwise
    return total.to(permuted_hidden_states.dtype)
