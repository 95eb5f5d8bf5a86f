"""Triton kernel of the expert-parallel load balancing operator."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_ops.dispatch.tiles import cdiv
from moe_ops.fake_impls.eplb import eplb_map_to_physical_and_record as empty_ids
from moe_ops.kernels._runtime.dependent import take_turn
from moe_ops.kernels._runtime.launch import Launch
from moe_ops.kernels._runtime.slots import dense

BLOCK = 256
"""Slots per program. Slots are independent, so many small programs finish soonest."""
MOST = tl.constexpr(2**31 - 1)
"""The largest load that int32 holds."""
WRAPPED = tl.constexpr(-(2**30))
"""A load below this has been counted past `MOST`."""


@triton.jit(do_not_specialize=["num_slots", "seed"])
def _eplb_map_kernel(
    topk_ids, expert_load, logical_to_physical, replica_count, record_enabled, num_unpadded_tokens,
    step, out, num_slots, seed, num_experts, max_replicas, num_physical, stride_load,
    TOP_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Map a block of slots to replicas and count them: the rule of `reference/eplb.py`."""
    take_turn()
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = slot // TOP_K
    ids = tl.load(topk_ids + slot, mask=slot < num_slots, other=-1)
    # Ids are compared in their own width before they are narrowed: 2**32 is not expert 0.
    valid = (ids >= 0) & (ids < num_experts)
    expert = tl.where(valid, ids, 0).to(tl.int32)
    count = tl.load(replica_count + expert, mask=valid, other=1)
    count = tl.minimum(tl.maximum(count, 1), max_replicas).to(tl.int32)
    position = token.to(tl.int64) + seed
    if step is not None:
        position += tl.load(step).to(tl.int64)
    hashed = position * 2654435769 & 0xFFFFFFFF
    replica = (hashed.to(tl.uint32) % count.to(tl.uint32)).to(tl.int32)
    entry = logical_to_physical + expert * max_replicas + replica
    physical = tl.load(entry, mask=valid, other=-1)
    shown = physical
    if physical.dtype == tl.int64 and out.dtype.element_ty == tl.int32:  # like `tensors.narrowed`
        shown = tl.minimum(tl.maximum(physical, -(2**31)), 2**31 - 1)
    tl.store(out + slot, shown.to(out.dtype.element_ty), mask=slot < num_slots)

    limit = num_slots
    if num_unpadded_tokens is not None:
        limit = tl.load(num_unpadded_tokens)
    if record_enabled is not None:
        limit = tl.where(tl.load(record_enabled) != 0, limit, 0)
    counted = (physical >= 0) & (physical < num_physical) & (token < limit)
    at = tl.where(counted, physical, 0).to(tl.int64) * stride_load
    one = tl.full((BLOCK,), 1, expert_load.dtype.element_ty)
    before = tl.atomic_add(expert_load + at, one, mask=counted, sem="relaxed")
    if expert_load.dtype.element_ty == tl.int32:
        # A counter that wraps is set back to its end by every slot that saw it there or past it.
        wrapped = counted & ((before == MOST) | (before < WRAPPED))
        tl.atomic_xchg(expert_load + at, tl.full((BLOCK,), MOST, tl.int32), wrapped, "relaxed")


@lru_cache(maxsize=1024)
def _eplb_map_launch(top_k: int) -> Launch:
    return Launch(_eplb_map_kernel, TOP_K=top_k, BLOCK=BLOCK, num_warps=4)


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
    """Launch one program for each block of slots."""
    out = empty_ids(
        topk_ids, expert_load_view, logical_to_physical_map, logical_replica_count,
        record_enabled, num_unpadded_tokens, indices_type, seed, step,
    )  # fmt: skip
    num_slots = topk_ids.numel()
    if num_slots:
        num_experts, max_replicas = logical_to_physical_map.shape
        _eplb_map_launch(topk_ids.shape[1])(
            (cdiv(num_slots, BLOCK),),
            topk_ids.contiguous(),
            expert_load_view,
            logical_to_physical_map.contiguous(),
            dense(logical_replica_count),
            record_enabled,
            num_unpadded_tokens,
            step,
            out,
            num_slots,
            seed,
            num_experts,
            max_replicas,
            expert_load_view.shape[0],
            expert_load_view.stride(0),
        )
    return out
