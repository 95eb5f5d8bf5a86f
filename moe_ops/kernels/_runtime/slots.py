"""The local expert of each slot inside a kernel (the rule of `reference/slots.py`), and sizes."""

from __future__ import annotations

import triton
import triton.language as tl

from moe_ops.dispatch.tiles import PLAN_HEADER, cdiv, next_power_of_2

HEADER = tl.constexpr(PLAN_HEADER)


@triton.jit
def local_experts(topk_ids, expert_map, slot, mask, num_experts, num_local_experts):
    """The local expert of each slot as int32, -1 where the slot is skipped or masked.

    Ids are compared in their own width before they are narrowed: 2**32 is not expert 0.
    """
    ids = tl.load(topk_ids + slot, mask=mask, other=-1)
    return experts_of(ids, expert_map, num_experts, num_local_experts)


@triton.jit
def experts_of(ids, expert_map, num_experts, num_local_experts):
    """The local expert of each id as int32, -1 where the id has none."""
    valid = (ids >= 0) & (ids < num_experts)
    expert = tl.where(valid, ids, 0).to(tl.int32)
    if expert_map is not None:
        mapped = tl.load(expert_map + expert, mask=valid, other=-1)
        valid = valid & (mapped >= 0) & (mapped < num_local_experts)
        expert = mapped.to(tl.int32)
    return tl.where(valid, expert, -1)


def row_parts(width: int) -> tuple[int, int]:
    """Split a row into parts of a power-of-two width: the width, and the number of parts.

    The fewest of 1, 3, 5, 6 or 7 parts with padding up to an eighth of the row; else one part.
    """
    for parts in (1, 3, 5, 6, 7):
        cols = next_power_of_2(cdiv(width, parts))
        if cols >= 128 and 8 * parts * cols <= 9 * width:
            return cols, parts
    return next_power_of_2(width), 1


def dense(vector):
    """A contiguous vector, as kernels read it; None stays None."""
    return None if vector is None else vector.contiguous()


def dense_vectors(*vectors) -> list:
    """`dense` for several vectors, in fewer Python calls."""
    return [None if x is None else x.contiguous() for x in vectors]


def all_dense(*vectors) -> bool:
    """Whether `dense` copies none of these tensors."""
    return all([x is None or x.is_contiguous() for x in vectors])


def map_size(expert_map, num_local_experts: int) -> int:
    """Number of valid expert ids: the length of the map, or the number of local experts."""
    return num_local_experts if expert_map is None else expert_map.shape[0]
