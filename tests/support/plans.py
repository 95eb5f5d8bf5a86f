"""Tile plans for expert GEMMs that are called by themselves, and which kernels read them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from legs import HAS_CUDA
from torch import Tensor

from moe_ops.dispatch.device import Device, assumed, device_facts
from moe_ops.dispatch.row_tiles import BY_EXPERT
from moe_ops.reference.align import plan_slots
from moe_ops.tensors import Tiles


def planned(
    ids: Tensor,
    expert_map: Tensor | None,
    num_experts: int,
    scheme: str = "unquantized",
    batch_invariant: bool = False,
) -> Tiles:
    """A plan without the routing it comes from: kernels read it, however few slots there are."""
    with assumed(device_facts(ids.device)._replace(arch=BY_EXPERT)):
        slots = (ids, expert_map, num_experts)
        return Tiles(plan_slots(*slots, scheme, torch.bfloat16, batch_invariant))


def row_tile(
    rows: int | None, facts: Device | None = None, *, portable_only: bool = True
) -> AbstractContextManager[None]:
    """Inside, plans have tiles of so many rows, whatever the load; None: as the load asks for.

    Kernels are those for ``facts`` (of this machine's GPU, if there is one), the portable ones
    unless told otherwise.
    """
    facts = facts or device_facts(torch.device("cuda" if HAS_CUDA else "cpu"))
    return assumed(facts._replace(row_tile=rows, portable_only=portable_only))


def ids_of(counts: Sequence[int], top_k: int = 1, device: str = "cpu") -> Tensor:
    """int32 ``(T, k)`` in which expert e has ``counts[e]`` slots, in no order; the rest is -1."""
    slots = sum(counts)
    ids = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    ids = torch.cat([ids, torch.full((-slots % top_k,), -1)])
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(slots))
    return ids[order].view(-1, top_k).to(device, torch.int32)


def partly_full(tile: int) -> list[int]:
    """Numbers of an expert's slots: none, one, and those about each quarter of two row tiles."""
    ends = [part * tile // 4 for part in range(1, 7)]
    return [1, 0, *(end + more for end in ends for more in (0, 1)), 7 * tile // 4]


def on(tiles: Tiles, device: str) -> Tiles:
    """The same elsewhere."""
    return Tiles(*(None if x is None else x.to(device) for x in tiles))


def the_plain_kernel() -> AbstractContextManager[None]:
    """The portable kernels: not Hopper's own, which add up in another order."""
    facts = device_facts(torch.device("cuda" if HAS_CUDA else "cpu"))
    return assumed(facts._replace(portable_only=True))


def whole_numbers(*shape: int, most: int, seed: int = 0) -> Tensor:
    """float32 integers of at most ``most`` either way: sums of their products are exact."""
    g = torch.Generator().manual_seed(seed)
    return torch.randint(-most, most + 1, shape, generator=g).float()


def bias_of(*shape: int) -> Tensor:
    """float32 quarters that no 16-bit dtype holds: exact, unless they are rounded on the way."""
    return whole_numbers(*shape, most=4000, seed=1) / 4
