"""Reference of the operators of the batched format."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops.fake_impls.batched import check_room
from moe_ops.reference import activation as activations
from moe_ops.reference.quantize import quantize_rows
from moe_ops.reference.slots import local_experts
from moe_ops.scheme import parse_quant


def batched_dispatch(
    x: Tensor,
    scale: Tensor | None,
    topk_weights: Tensor | None,
    topk_ids: Tensor,
    first_expert: int,
    num_local_experts: int,
    max_num_tokens: int,
    quant: str,
    drops: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Copy each slot's row to its expert, in slot order, and count the slots that do not fit."""
    check_room(x, max_num_tokens, drops)
    row, counts = _rows_of_slots(topk_ids, first_expert, num_local_experts, max_num_tokens)
    slots = (row >= 0).nonzero().flatten()
    value = x[slots // topk_ids.shape[1]].float()
    if topk_weights is not None:
        value = value * topk_weights.flatten()[slots, None].float()
    shape = (num_local_experts, max_num_tokens, x.shape[1])
    rows = x.new_zeros(shape, dtype=torch.float32)
    rows.flatten(0, 1)[row[slots]] = value
    taken = counts.clamp(max=max_num_tokens).to(torch.int32)
    dropped = (counts - taken).sum(0, keepdim=True).to(torch.int32)
    if not quant:
        return rows.to(x.dtype), x.new_empty(0, dtype=torch.float32), taken, dropped
    used = used_rows(taken, max_num_tokens)
    return *quantize_rows(rows, scale, used, parse_quant(quant)), taken, dropped


def batched_rows(
    topk_ids: Tensor, first_expert: int, num_local_experts: int, max_num_tokens: int
) -> Tensor:
    """The row of each slot in the batched format viewed as ``(El * MT, ..)``, or -1."""
    row, _ = _rows_of_slots(topk_ids, first_expert, num_local_experts, max_num_tokens)
    return row.view(topk_ids.shape).to(torch.int32)


def _rows_of_slots(
    topk_ids: Tensor, first_expert: int, num_local_experts: int, max_num_tokens: int
) -> tuple[Tensor, Tensor]:
    """The row of each slot or -1, and the number of slots per expert, including dropped slots."""
    expert = local_experts(topk_ids.long() - first_expert, None, num_local_experts)
    bucket = torch.where(expert < 0, num_local_experts, expert)
    order = torch.argsort(bucket, stable=True)
    counts = torch.bincount(bucket, minlength=num_local_experts + 1)
    first = counts.cumsum(0) - counts
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=order.device) - first[bucket[order]]
    fits = (expert >= 0) & (rank < max_num_tokens)
    return torch.where(fits, expert * max_num_tokens + rank, -1), counts[:num_local_experts]


def used_rows(expert_num_tokens: Tensor, max_num_tokens: int) -> Tensor:
    """Mask ``(E, MT)`` of the rows that are not padding."""
    return (
        torch.arange(max_num_tokens, device=expert_num_tokens.device) < expert_num_tokens[:, None]
    )


def batched_activation(x: Tensor, expert_num_tokens: Tensor, activation: str) -> Tensor:
    """Apply the activation to every row; padding rows are zeros."""
    h = activations.activation(x, activation)
    return torch.where(used_rows(expert_num_tokens, x.shape[1])[..., None], h, torch.zeros_like(h))


def batched_quantize(
    x: Tensor, scale: Tensor | None, expert_num_tokens: Tensor, quant: str
) -> tuple[Tensor, Tensor]:
    """Quantize every row; padding rows are zeros."""
    used = used_rows(expert_num_tokens, x.shape[1])
    return quantize_rows(x.float(), scale, used, parse_quant(quant))


def batched_activation_quantize(
    x: Tensor, scale: Tensor | None, expert_num_tokens: Tensor, activation: str, quant: str
) -> tuple[Tensor, Tensor]:
    """Apply the activation, round to the dtype of ``x``, then `batched_quantize`."""
    h = activations.activation(x, activation)
    return batched_quantize(h, scale, expert_num_tokens, quant)
