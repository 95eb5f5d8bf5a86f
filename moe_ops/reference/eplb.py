"""Reference of the expert-parallel load balancing operator."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops.tensors import narrowed

HASH = 2654435769
"""2**32 divided by the golden ratio: hashes of consecutive tokens are far apart."""


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
    """Choose each slot's replica by a hash of its token, and count it in ``expert_load_view``.

    The result is -1 for an id without an expert, and for a replica that does not fit into
    ``indices_type``. A counter of int32 stays at its largest value.
    """
    num_experts, max_replicas = logical_to_physical_map.shape
    num_physical = expert_load_view.shape[0]
    valid = (topk_ids >= 0) & (topk_ids < num_experts)
    expert = torch.where(valid, topk_ids, 0).long()
    token = torch.arange(topk_ids.shape[0], device=topk_ids.device)[:, None]
    replicas = logical_replica_count.long()[expert].clamp(1, max_replicas)
    offset = seed if step is None else seed + step.long().reshape(())
    replica = ((token + offset) * HASH & 0xFFFFFFFF) % replicas
    physical = torch.where(valid, logical_to_physical_map.long()[expert, replica], -1)

    counted = (physical >= 0) & (physical < num_physical)
    if num_unpadded_tokens is not None:
        counted &= token < num_unpadded_tokens
    if record_enabled is not None:
        counted &= record_enabled != 0
    at, dtype = torch.where(counted, physical, 0).flatten(), expert_load_view.dtype
    load = expert_load_view.long().scatter_add(0, at, counted.flatten().long())
    expert_load_view.copy_(load.clamp(max=torch.iinfo(dtype).max))
    return narrowed(physical, indices_type).contiguous()
