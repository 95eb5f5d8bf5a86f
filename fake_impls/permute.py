"""Outputs of the permutation operators."""

from __future__ import annotations

import torch
from torch import Tensor


def moe_permutation(
    topk_ids: Tensor, expert_map: Tensor | None, num_local_experts: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The fields of a :class:`moe_ops.tensors.Permutation`."""
    tokens, k = topk_ids.shape
    return (
        topk_ids.new_empty(num_local_experts + 1, dtype=torch.int64),
        topk_ids.new_empty((tokens, k), dtype=torch.int32),
        topk_ids.new_empty(tokens * k, dtype=torch.int32),
    )


def gather_rows(
    x: Tensor, permuted_idx: Tensor, expert_first_token_offset: Tensor, top_k: int
) -> Tensor:
    """One row of ``x`` for each slot."""
    return x.new_empty((permuted_idx.shape[0], x.shape[1]))


def order_columns(x: Tensor, order: Tensor, topk_ids: Tensor, expert_map: Tensor | None) -> Tensor:
    """``(T * k, H)``, dtype of ``x``."""
    return x.new_empty((topk_ids.shape[0] * topk_ids.shape[1], x.shape[1]))


def moe_unpermute(
    permuted_hidden_states: Tensor,
    topk_weights: Tensor | None,
    inv_permuted_idx: Tensor,
    expert_first_token_offset: Tensor | None,
) -> Tensor:
    """``(T, H)``, dtype of the rows."""
    shape = (inv_permuted_idx.shape[0], permuted_hidden_states.shape[1])
    return permuted_hidden_states.new_empty(shape)
