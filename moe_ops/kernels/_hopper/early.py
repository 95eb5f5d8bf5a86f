"""Whether GEMM 2 of one token may read the routing before the previous kernel has ended.

It may right after GEMM 1, which triggers the dependent launch only after it has waited for the same
routing. Any other kernel may be writing the routing or a scale, for example a kernel that copies a
tensor to make it dense.
"""

from __future__ import annotations

from torch import Tensor

from moe_ops.kernels._hopper.decode_few import hopper_decode_few_kernel
from moe_ops.kernels._hopper.decode_slot import hopper_decode_slot_kernel
from moe_ops.kernels._hopper.token import hopper_token_kernel
from moe_ops.kernels._runtime.launch import last_kernel

FIRST = (hopper_token_kernel, hopper_decode_few_kernel, hopper_decode_slot_kernel)
"""Kernels of GEMM 1 that read the ids themselves."""
ROUTED: dict[int, tuple[int, int | None]] = {}
"""Addresses of the ids and the expert map that the last such GEMM 1 read, by device."""


def note_routing(topk_ids: Tensor, expert_map: Tensor | None) -> None:
    """Remember the routing that a GEMM 1 reads, which is launched next."""
    ROUTED[topk_ids.get_device()] = _addresses(topk_ids, expert_map)


def routing_was_read(topk_ids: Tensor, expert_map: Tensor | None) -> bool:
    """Whether the kernel before is the GEMM 1 that has read this routing."""
    device = topk_ids.get_device()
    read = ROUTED.get(device) == _addresses(topk_ids, expert_map)
    return read and last_kernel(device) in FIRST


def all_dense(*vectors: Tensor | None) -> bool:
    """Whether nothing is copied to make these tensors dense."""
    return all([x is None or x.is_contiguous() for x in vectors])


def _addresses(topk_ids: Tensor, expert_map: Tensor | None) -> tuple[int, int | None]:
    return topk_ids.data_ptr(), None if expert_map is None else expert_map.data_ptr()
