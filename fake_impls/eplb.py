"""Output of the expert-parallel load balancing operator."""

from __future__ import annotations

import torch
from torch import Tensor


def eplb_map_to_physical_and_record(
    topk_ids: Tensor,
    expert_load_view: Tensor,
    logical_to_physical_map: Tensor,
    logical_replica_count: Tensor,
    record_enabled: Tensor | None,
    num_unpadded_tokens: Tensor | None,
    indices_type: torch.dtype,
    seed: int,
    step: Tensor | None = None,
) -> Tensor:
    """``(T, k)`` of ``indices_type``; ``expert_load_view`` is written as well."""
    return topk_ids.new_empty((topk_ids.shape[0], topk_ids.shape[1]), dtype=indices_type)
