"""Which expert each slot goes to, inside a kernel: the rule of `reference/slots.py`."""

from __future__ import annotations

import triton
import triton.language as tl

from moe_ops.dispatch.tiles import PLAN_HEADER, cdiv, next_power_of_2

HEADER = tl.constexpr(PLAN_HEADER)


@triton.jit
def local_experts(topk_ids, expert_map, slot, mask, num_experts, num_local_experts):
    """The local expert of each slot as int32, -1 where it is skipped or masked.

    Ids are compared in their own width before they are narrowed: 2**32 is not expert 0.
    """
    ids = tl.load(topk_ids + slot, mask=mask, other=-1)
    return experts_of(ids, expert_map, num_experts, num_local_experts)


@triton.jit
def experts_of(ids, expert_map, num_experts, num_local_experts):
    """The local expert of each id as int32, -1 where it is none."""
    valid = (ids >= 0) & (ids < num_experts)
    expert = tl.where(valid, ids, 0).to(tl.int32)
    if expert_map is not None:
        mapped = tl.load(expert_map + expert, mask=valid, other=-1)
        valid = valid & (mapped >= 0) & (mapped < num_local_experts)
        expert = mapped.to(tl.int32)
    return tl.where(valid, expert, -1)


def parts_of(width: int) -> tuple[int, int]:
    """Columns (a power of two) of the parts of a row, and how many: few, and nowhere near empty."""
    for parts in (1, 3, 5, 6, 7):
        cols = next_power_of_2(cdiv(width, parts))
        if cols >= 128 and 8 * parts * cols <= 9 * width:
            return cols, parts
    return next_power_of_2(width), 1


def dense(vector):
    """A vector as kernels read it: entries side by side; None stays None."""
    return None if vector is None else vector.contiguous()


def map_size(expert_map, num_local_experts: int) -> int:
    """How many ids there are."""
    return num_local_experts if expert_map is None else expert_map.shape[0]
