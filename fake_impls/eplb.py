"""Output of the expert-parallel load balancing operator."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops import sizes


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
    tokens, k = sizes.slots(topk_ids)
    sizes.axes("expert_load_view", expert_load_view, 1)
    sizes.in_range("expert_load_view.shape[0]", expert_load_view.shape[0], 1, 2**31 - 1)
    sizes.axes("logical_to_physical_map", logical_to_physical_map, 2)
    experts, replicas = logical_to_physical_map.shape
    sizes.in_range("logical_to_physical_map.shape[0]", experts, 1, 2**31 - 1)
    sizes.in_range("logical_to_physical_map.shape[1]", replicas, 1, 2**31 - 1)
    sizes.shaped("logical_replica_count", logical_replica_count, experts)
    sizes.entries("record_enabled", record_enabled, 1)
    sizes.entries("num_unpadded_tokens", num_unpadded_tokens, 1)
    sizes.entries("step", step, 1)
    return topk_ids.new_empty((tokens, k), dtype=indices_type)
