"""Decisions that all ranks of a process group make together, on the host."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

Result = TypeVar("Result")
SHOWN = 8
"""Number of ranks with the same value that an error quotes."""


def process_group(group: Any, name: str = "group") -> dist.ProcessGroup:
    """Return the process group that ``group`` stands for.

    Args:
        group: a `torch.distributed` process group, the name of one, a 1-D `DeviceMesh`, a
            `RankGroup`, or None (all processes).
        name: the argument, for errors.

    Raises:
        TypeError: none of these.
        ValueError: a name that no group has, a group that this process is not in, a mesh of several
            dimensions, or None before `torch.distributed` is initialized.
    """
    if isinstance(group, tuple) and hasattr(group, "process_group"):
        return group.process_group()  # a RankGroup, which a higher layer defines
    if group is None:
        if not dist.is_initialized():
            raise ValueError(f"{name} must be given, or torch.distributed initialized, got neither")
        group = dist.group.WORLD
    if isinstance(group, str):
        return _group_of_name(group, name)
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"{name} must be a DeviceMesh of 1 dimension, got {group.ndim}")
        return group.get_group()
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"{name} must be one that this process is in, got NON_GROUP_MEMBER")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"{name} must be a ProcessGroup, its name, a DeviceMesh or a RankGroup, got "
            f"{type(group).__name__}"
        )
    return group


def _group_of_name(group: Any, name: str) -> Any:
    try:
        return dist.distributed_c10d._resolve_process_group(group)
    except (LookupError, RuntimeError, ValueError) as error:
        raise ValueError(f"{name} must be the name of a process group, got {group!r}") from error


def agree(
    gather: Callable[[str], list[str]],
    check: Callable[[], tuple[Result, Mapping[str, str]]],
) -> Result:
    """Run ``check`` on every rank, and raise on all ranks if it fails on any.

    The host waits for the other ranks.

    Args:
        gather: returns the texts of all ranks, in the order of ranks: see `gather_texts`.
        check: returns its result, and facts by name that must be the same on every rank.

    Raises:
        ValueError: another rank failed, or a fact differs. The rank that failed raises its own
            error.
    """
    result: Any = None
    failure: Exception | None = None
    facts: Mapping[str, str] = {}
    try:
        result, facts = check()
    except Exception as error:  # whatever it is, the other ranks must hear of it
        failure = error
    own = {"error": None if failure is None else str(failure), "facts": dict(facts)}
    heard = [json.loads(text) for text in gather(json.dumps(own))]
    if failure is not None:
        try:
            raise failure
        finally:
            failure = None  # the error's traceback has this frame: neither may keep the other
    for rank, other in enumerate(heard):
        if other["error"] is not None:
            raise ValueError(f"the call failed on rank {rank} of the group: {other['error']}")
    problem = _difference([other["facts"] for other in heard])
    if problem:
        raise ValueError(problem)
    return result


def _difference(of_ranks: Sequence[Mapping[str, str]]) -> str | None:
    """Name the first fact that differs between ranks, with its values; None: none does."""
    for name in dict.fromkeys(name for facts in of_ranks for name in facts):
        holders: dict[Any, list[int]] = {}
        for rank, facts in enumerate(of_ranks):
            holders.setdefault(facts.get(name), []).append(rank)
        if len(holders) > 1:
            values = ", ".join(
                f"{value} on {_name_ranks(ranks)}" for value, ranks in holders.items()
            )
            return f"{name} must be the same on every rank of the group, got {values}"
    return None


def _name_ranks(ranks: Sequence[int]) -> str:
    """Name some ranks in an error."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:SHOWN]))}{', ..' if len(ranks) > SHOWN else ''}"


def gather_texts(group: dist.ProcessGroup, device: torch.device, text: str) -> list[str]:
    """Return the texts of all ranks, in the order of ranks."""
    own = torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)
    lengths = _gather_tensors(group, torch.tensor([len(own)], device=device))
    sizes = [int(length) for length in lengths]
    padded = own.new_zeros(max(sizes))
    padded[: len(own)] = own
    texts = zip(_gather_tensors(group, padded), sizes, strict=True)
    return [bytes(x[:size].tolist()).decode() for x, size in texts]


def _gather_tensors(group: dist.ProcessGroup, x: Tensor) -> list[Tensor]:
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x, group=group)
    return parts
