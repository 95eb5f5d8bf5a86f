"""Which expert each slot goes to: the one rule by which slots are skipped."""

from __future__ import annotations

import torch
from torch import Tensor


def local_experts(topk_ids: Tensor, expert_map: Tensor | None, num_local_experts: int) -> Tensor:
    """The local expert of each slot, -1 where it is skipped: int64, flat, in slot order.

    A slot is skipped when its id is negative, not less than the number of experts (the length of
    ``expert_map``, or ``num_local_experts`` without one), or mapped to no local expert.
    """
    ids = topk_ids.flatten().long()
    num_experts = num_local_experts if expert_map is None else expert_map.shape[0]
    valid = (ids >= 0) & (ids < num_experts)
    if expert_map is not None and num_experts:
        ids = expert_map.long()[torch.where(valid, ids, 0)]
        valid &= (ids >= 0) & (ids < num_local_experts)
    return torch.where(valid, ids, -1)
