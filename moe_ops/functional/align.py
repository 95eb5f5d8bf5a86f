"""Alignment: sort slots by expert in groups of whole tiles, and count the slots of each expert."""

from __future__ import annotations

from torch import Tensor

from moe_ops import checks, ops, sizes
from moe_ops.tensors import TilePlan


def moe_align_block_size(
    topk_ids: Tensor,
    block_size: int,
    num_experts: int,
    expert_map: Tensor | None = None,
    pad_sorted_ids: bool = False,
    ignore_invalid_experts: bool = False,
) -> TilePlan:
    """Sort slots by expert and pad each group to whole tiles of ``block_size`` rows.

    The sort is stable: slots of an expert stay in slot order. Out-of-range ids are dropped.

    Args:
        topk_ids: ``(T, k)`` int32 or int64.
        block_size: rows of a tile, a power of two up to 4096.
        num_experts: E, up to 4096; need not be a power of two.
        expert_map: ``(E,)``, the local expert of each global one, or -1. Without
            ``ignore_invalid_experts`` all slots are sorted by global expert, and ``expert_ids`` is
            mapped afterwards (-1: a tile of another rank's expert).
        pad_sorted_ids: round the length of ``sorted_token_ids`` up to a multiple of ``block_size``.
        ignore_invalid_experts: drop slots of experts that are not local before sorting, and sort
            the rest by local expert.

    Returns:
        A `TilePlan` of int32 tensors of lengths ``L = min(T k block, T k + E (block - 1))``,
        ``ceil(L / block)`` and 1.

    Raises:
        TypeError: a wrong dtype.
        ValueError: ``block_size`` is not such a power of two, ``num_experts`` is outside 1..4096,
            or ``expert_map`` has another length.

    Source:
        vLLM ``moe_align_block_size``, whose kernel stops at 1024 experts.
    """
    checks.tensor("topk_ids", topk_ids, 2, checks.INDICES)
    checks.flags(pad_sorted_ids=pad_sorted_ids, ignore_invalid_experts=ignore_invalid_experts)
    checks.integer("block_size", block_size)
    sizes.block_size(block_size)
    checks.between(1, checks.MAX_EXPERTS, num_experts=num_experts)
    checks.expert_map(expert_map, topk_ids, num_experts)
    return TilePlan(
        *ops.moe_align_block_size(
            topk_ids, expert_map, block_size, num_experts, pad_sorted_ids, ignore_invalid_experts
        )
    )


def count_expert_num_tokens(
    topk_ids: Tensor, num_local_experts: int, expert_map: Tensor | None = None
) -> Tensor:
    """Count the slots of each local expert: int32 ``(El,)``. Skipped slots are not counted.

    Args:
        topk_ids: ``(T, k)`` int32 or int64.
        num_local_experts: El.
        expert_map: ``(E,)`` or None.

    Returns:
        int32 ``(El,)``: the slots of each local expert.

    Raises:
        TypeError, ValueError: a wrong dtype or shape, or ``num_local_experts`` outside 1..4096.

    Source:
        vLLM ``count_expert_num_tokens``.
    """
    checks.tensor("topk_ids", topk_ids, 2, checks.INDICES)
    checks.expert_map(expert_map, topk_ids)
    checks.between(1, checks.MAX_EXPERTS, num_local_experts=num_local_experts)
    return ops.count_expert_num_tokens(topk_ids, expert_map, num_local_experts)
