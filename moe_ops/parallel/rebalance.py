"""Which experts get replicas, and which GPU holds them, given the load of each expert.

Three greedy steps for every layer: pack groups of experts onto nodes, replicate the busiest experts
of each node, and pack the replicas onto the GPUs of the node. This runs on the host, outside the
forward pass.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from moe_ops import checks

LOADS = (torch.int32, torch.int64, *checks.FLOATS, torch.float64)
"""Dtypes of a load."""


class LogicalMaps(NamedTuple):
    """The replicas of every logical expert, in the order of their physical ids."""

    logical_to_physical_map: Tensor
    """int64 ``(.., E, R)``: physical experts, then -1."""
    logical_replica_count: Tensor
    """int64 ``(.., E)``: how many there are."""


def rebalance_experts(
    weight: Tensor, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Place ``num_replicas`` physical experts so that every GPU gets about the same load.

    If ``num_nodes`` divides ``num_groups``, all replicas of a group's experts stay on one node, and
    every node gets the same number of groups (for routers that choose groups first). Otherwise
    nodes and groups are ignored. The load of an expert is assumed to be shared evenly among its
    replicas. Replicas of one expert may land on one GPU. Ties go to the lower index.

    Args:
        weight: ``(L, E)``, the load of each expert of each layer, an integer or float dtype.
        num_replicas: P >= E, a multiple of ``num_gpus``.
        num_groups: groups of experts, dividing E.
        num_nodes: nodes, dividing ``num_gpus``.
        num_gpus: GPU g holds the physical experts from ``g * P / num_gpus`` on.

    Returns:
        ``(phy2log, log2phy, logcnt)``, int64 on the device of ``weight``: the logical expert of
        each physical one ``(L, P)``, its inverse ``(L, E, R)`` padded with -1, and the number of
        replicas of each expert ``(L, E)``, whose largest is R.

    Raises:
        TypeError: a wrong dtype.
        ValueError: numbers that do not divide each other, fewer replicas than experts, or a load
            that is negative or not finite.

    Source:
        DeepSeek's expert-parallel load balancer, from its description.
    """
    checks.tensor("weight", weight, 2, LOADS)
    num_experts = weight.shape[1]
    _check_cluster_sizes(num_experts, num_replicas, num_groups, num_nodes, num_gpus)
    if weight.is_meta:
        raise ValueError("weight must hold numbers, got a Tensor on meta")
    load = weight.double()
    wrong = load[~(load.isfinite() & (load >= 0))]
    if wrong.numel():
        raise ValueError(f"weight must be finite and not negative, got {wrong[0].item()}")
    if num_groups % num_nodes:
        num_groups, num_nodes = 1, 1
    phy2log = [
        _place_layer(row, num_replicas, num_groups, num_nodes, num_gpus) for row in load.tolist()
    ]
    placed = torch.tensor(phy2log, dtype=torch.int64, device=weight.device)
    placed = placed.view(len(phy2log), num_replicas)
    return placed, *compute_logical_maps(placed, num_experts)


def _check_cluster_sizes(
    num_experts: int, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> None:
    sizes = {"num_groups": num_groups, "num_nodes": num_nodes, "num_gpus": num_gpus}
    checks.at_least(1, **sizes)
    checks.at_least(1, num_replicas=num_replicas)
    if not 1 <= num_experts <= num_replicas:
        raise ValueError(
            f"num_replicas must be at least the {num_experts} experts, which must be at least 1, "
            f"got {num_replicas}"
        )
    for name, value, divisor in (
        ("num_replicas", num_replicas, "num_gpus"),
        ("num_gpus", num_gpus, "num_nodes"),
        ("weight.shape[1]", num_experts, "num_groups"),
    ):
        if value % sizes[divisor]:
            raise ValueError(
                f"{name} must be a multiple of {divisor} = {sizes[divisor]}, got {value}"
            )


def _place_layer(
    load: Sequence[float], num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> list[int]:
    """Return the logical expert of every physical one."""
    size = len(load) // num_groups
    group_load = [sum(load[start : start + size]) for start in range(0, len(load), size)]
    phy2log: list[int] = []
    for groups in _pack(group_load, num_nodes):
        experts = [group * size + i for group in groups for i in range(size)]
        replicas = _replicate([load[e] for e in experts], num_replicas // num_nodes)
        count = Counter(replicas)
        share = [load[experts[i]] / count[i] for i in replicas]
        for held in _pack(share, num_gpus // num_nodes):
            phy2log += (experts[replicas[i]] for i in held)
    return phy2log


def _pack(load: Sequence[float], num_packs: int) -> list[list[int]]:
    """Pack equally many items into each pack: the heaviest item next, into the lightest pack."""
    room = len(load) // num_packs
    if room == 1:
        return [[item] for item in range(num_packs)]
    packs: list[list[int]] = [[] for _ in range(num_packs)]
    lightest = [(0.0, pack) for pack in range(num_packs)]
    for item in sorted(range(len(load)), key=lambda i: -load[i]):
        total, pack = heapq.heappop(lightest)
        packs[pack].append(item)
        if len(packs[pack]) < room:
            heapq.heappush(lightest, (total + load[item], pack))
    return packs


def _replicate(load: Sequence[float], num_replicas: int) -> list[int]:
    """Return every item once, then again and again the item whose replicas carry most each."""
    replicas = list(range(len(load)))
    busiest = [(-item_load, item, 1) for item, item_load in enumerate(load)]
    heapq.heapify(busiest)
    while len(replicas) < num_replicas:
        _, item, count = busiest[0]
        replicas.append(item)
        heapq.heapreplace(busiest, (-load[item] / (count + 1), item, count + 1))
    return replicas


def keep_rows(old: Tensor, new: Tensor, num_gpus: int) -> Tensor:
    """Reorder each GPU's experts so that the experts it holds already stay in their rows.

    The load of a GPU does not depend on the order of its rows.

    Args:
        old: ``(L, P)``, the logical expert that each row holds now.
        new: ``(L, P)``, a placement as `rebalance_experts` returns it.
        num_gpus: GPU g holds the rows from ``g * P / num_gpus`` on.

    Returns:
        int64 ``(L, P)`` with the experts of ``new`` on each GPU.
    """
    kept = [
        sum((_kept(*rows) for rows in zip(*pair, strict=True)), [])
        for pair in zip(
            old.view(len(old), num_gpus, -1).tolist(),
            new.view(len(new), num_gpus, -1).tolist(),
            strict=True,
        )
    ]
    return torch.tensor(kept, dtype=torch.int64, device=new.device).view(new.shape)


def _kept(held: Sequence[int], wanted: Sequence[int]) -> list[int]:
    """Return the experts ``wanted``; the ones that ``held`` has stay in their places."""
    left = Counter(wanted)
    places: list[int | None] = []
    for expert in held:
        stays = left[expert] > 0
        left[expert] -= stays
        places.append(expert if stays else None)
    others = left.elements()
    return [next(others) if expert is None else expert for expert in places]


def compute_logical_maps(
    physical_to_logical_map: Tensor, num_logical_experts: int, max_replicas: int | None = None
) -> LogicalMaps:
    """Invert a placement.

    Args:
        physical_to_logical_map: ``(P,)`` or ``(L, P)`` int32 or int64; -1 is an empty slot.
        num_logical_experts: E.
        max_replicas: R; None: the largest number of replicas. A fixed number keeps the shape, so
            that the maps of a captured graph can be overwritten.

    Returns:
        The physical experts of each logical one, ``(.., E, R)`` with -1 in empty places, and their
        number ``(.., E)``.

    Raises:
        TypeError, ValueError: a wrong dtype or shape, an id of E or more, or more than
            ``max_replicas`` replicas of one expert.

    Source:
        vLLM ``compute_logical_maps``.
    """
    checks.tensor("physical_to_logical_map", physical_to_logical_map, None, checks.INDICES)
    checks.at_least(1, num_logical_experts=num_logical_experts)
    if max_replicas is not None:
        checks.at_least(0, max_replicas=max_replicas)
    if physical_to_logical_map.is_meta:
        raise ValueError("physical_to_logical_map must hold numbers, got a Tensor on meta")
    *leading, num_physical = physical_to_logical_map.shape
    placed = physical_to_logical_map.reshape(prod(leading), num_physical).long()
    if placed.numel() and placed.max() >= num_logical_experts:
        raise ValueError(
            f"physical_to_logical_map must be below num_logical_experts = {num_logical_experts}, "
            f"got {placed.max()}"
        )
    # Empty slots count for an expert after the last one, which is removed at the end.
    expert = torch.where(placed < 0, num_logical_experts, placed)
    counts = placed.new_zeros((len(placed), num_logical_experts + 1))
    counts.scatter_add_(1, expert, torch.ones_like(expert))
    replica_count = counts[:, :-1].contiguous()
    most = int(replica_count.max()) if replica_count.numel() else 0
    width = most if max_replicas is None else max_replicas
    if width < most:
        raise ValueError(f"max_replicas must be at least {most}, got {width}")
    order = expert.argsort(dim=1, stable=True)
    sorted_expert = expert.gather(1, order)
    first = (counts.cumsum(1) - counts).gather(1, sorted_expert)
    rank = torch.arange(num_physical, device=placed.device) - first
    held = sorted_expert < num_logical_experts
    layer = torch.arange(len(placed), device=placed.device)[:, None].expand_as(order)
    replicas = placed.new_full((len(placed), num_logical_experts, width), -1)
    replicas[layer[held], sorted_expert[held], rank[held]] = order[held]
    return LogicalMaps(
        replicas.view(*leading, num_logical_experts, width),
        replica_count.view(*leading, num_logical_experts),
    )
