"""Expert-parallel load balancing in the forward pass: choose replicas, and count their slots."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops import checks, ops


def eplb_map_to_physical_and_record(
    topk_ids: Tensor,
    expert_load_view: Tensor,
    logical_to_physical_map: Tensor,
    logical_replica_count: Tensor,
    indices_type: torch.dtype | None = None,
    *,
    record_enabled: Tensor | None = None,
    num_unpadded_tokens: Tensor | None = None,
    seed: int = 0,
    step: Tensor | None = None,
) -> Tensor:
    """Send each slot to one replica of its expert, and count it there.

    Token t goes to replica ``((t + seed + step) * 2654435769 mod 2**32) mod count[id]`` of each of
    its experts, so that all replicas of an expert get their share, for any k. An id outside
    ``[0, E)`` becomes -1. ``expert_load_view[p]`` grows by one for every slot sent to p, with
    integer atomics, so that the counts do not depend on the order of the slots. A count of int32
    ends at 2**31 - 1.

    The three scalars are read on the device: a replayed graph reads their current values.

    Args:
        topk_ids: ``(T, k)`` int32 or int64, logical experts.
        expert_load_view: ``(P,)`` int32 or int64, one layer's load of every physical expert:
            **mutated**. For Inductor's CUDA graphs make it a buffer, or mark its address static.
        logical_to_physical_map: ``(E, R)`` int32 or int64, the replicas of each expert, padded with
            -1.
        logical_replica_count: ``(E,)`` int32 or int64, assumed to be in 1..R.
        indices_type: dtype of the result, int32 or int64; None: the dtype of ``topk_ids``.
        record_enabled: one bool or integer; 0 counts nothing. None counts.
        num_unpadded_tokens: one integer; tokens from this index on are padding, and not counted.
        seed: a number in 0..2**31 - 1, added to the token's index. Ranks that each hold few tokens
            need different seeds, since token 0 of all ranks would otherwise choose the same
            replica.
        step: one integer that is added to ``seed``; None: 0. Calls of few tokens need different
            ones, such as the number of the decoding step.

    Returns:
        ``(T, k)`` ids of physical experts, contiguous. An entry of the map that is not a physical
        expert is returned as it is (int32: clamped to int32), and not counted.

    Raises:
        TypeError, ValueError: a wrong dtype, shape, device or seed.

    Source:
        vLLM's EPLB router (``eplb_map_to_physical_and_record``), without ``seed`` and ``step``.
    """
    checks.tensor("topk_ids", topk_ids, 2, checks.INDICES)
    like = ("topk_ids", topk_ids)
    for name, x, ndim in (
        ("expert_load_view", expert_load_view, 1),
        ("logical_to_physical_map", logical_to_physical_map, 2),
        ("logical_replica_count", logical_replica_count, 1),
    ):
        checks.tensor(name, x, ndim, checks.INDICES)
        checks.same_device(name, x, *like)
        if 0 in x.shape:
            raise ValueError(f"{name} must have at least one entry, got shape {tuple(x.shape)}")
    num_experts = logical_to_physical_map.shape[0]
    count = logical_replica_count.shape[0]
    checks.size("logical_replica_count.shape[0]", count, "the number of experts", num_experts)
    checks.device_scalar("record_enabled", record_enabled, (torch.bool, *checks.INDICES), *like)
    checks.device_scalar("num_unpadded_tokens", num_unpadded_tokens, checks.INDICES, *like)
    checks.device_scalar("step", step, checks.INDICES, *like)
    if indices_type not in (None, *checks.INDICES):
        raise TypeError(f"indices_type must be one of {list(checks.INDICES)}, got {indices_type}")
    checks.integer("seed", seed)
    if not 0 <= seed < 2**31:
        raise ValueError(f"seed must be in 0..{2**31 - 1}, got {seed}")
    return ops.eplb_map_to_physical_and_record(
        topk_ids,
        expert_load_view,
        logical_to_physical_map,
        logical_replica_count,
        record_enabled,
        num_unpadded_tokens,
        topk_ids.dtype if indices_type is None else indices_type,
        seed,
        step,
    )
