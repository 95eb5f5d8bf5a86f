"""Outputs of the permutation operators."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops import sizes


def moe_permutation(
    topk_ids: Tensor, expert_map: Tensor | None, num_local_experts: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The fields of a :class:`moe_ops.tensors.Permutation`."""
    tokens, k = sizes.slots(topk_ids, expert_map)
    sizes.num_experts("num_local_experts", num_local_experts)
    return (
        topk_ids.new_empty(num_local_experts + 1, dtype=torch.int64),
        topk_ids.new_empty((tokens, k), dtype=torch.int32),
        topk_ids.new_empty(tokens * k, dtype=torch.int32),
    )


def gather_rows(
    x: Tensor, permuted_idx: Tensor, expert_first_token_offset: Tensor, top_k: int
) -> Tensor:
    """One row of ``x`` for each slot."""
    sizes.axes("x", x, 2)
    sizes.axes("permuted_idx", permuted_idx, 1)
    _check_offset(expert_first_token_offset)
    sizes.in_range("top_k", top_k, 1, sizes.MAX_EXPERTS)
    return x.new_empty((permuted_idx.shape[0], x.shape[1]))


def order_columns(x: Tensor, order: Tensor, topk_ids: Tensor, expert_map: Tensor | None) -> Tensor:
    """``(T * k, H)``, dtype of ``x``."""
    tokens, k = sizes.slots(topk_ids, expert_map)
    sizes.shaped("x", x, tokens, None)
    sizes.shaped("order", order, None, x.shape[1])
    return x.new_empty((tokens * k, x.shape[1]))


def moe_unpermute(
    permuted_hidden_states: Tensor,
    topk_weights: Tensor | None,
    inv_permuted_idx: Tensor,
    expert_first_token_offset: Tensor | None,
) -> Tensor:
    """``(T, H)``, dtype of the rows."""
    sizes.axes("permuted_hidden_states", permuted_hidden_states, 2)
    sizes.axes("inv_permuted_idx", inv_permuted_idx, 2)
    if topk_weights is not None:
        sizes.shaped("topk_weights", topk_weights, *inv_permuted_idx.shape)
    if expert_first_token_offset is not None:
        _check_offset(expert_first_token_offset)
    shape = (inv_permuted_idx.shape[0], permuted_hidden_states.shape[1])
    return permuted_hidden_states.new_empty(shape)


def _check_offset(offset: Tensor) -> None:
    """Check offsets ``(El + 1,)``, of which only the last entry is read."""
    sizes.axes("expert_first_token_offset", offset, 1)
    entries = offset.shape[0] - 1
    sizes.in_range("expert_first_token_offset.shape[0] - 1", entries, 1, sizes.MAX_EXPERTS)
