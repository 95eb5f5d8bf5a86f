"""Ranks that are still there once others have died, and the replicas of experts that they hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_ops import checks
from moe_ops.parallel.agreement import process_group


def check_live_ranks(ranks: Sequence[int], size: int) -> list[int]:
    """Return the live ranks of a group of ``size`` in their order.

    Raises:
        TypeError: ``ranks`` is not a sequence of int.
        ValueError: no ranks, a rank twice, or one outside 0..size-1.
    """
    if not isinstance(ranks, Sequence) or isinstance(ranks, str):
        raise TypeError(f"ranks must be a sequence of int, got {type(ranks).__name__}")
    for rank in ranks:
        checks.integer("ranks", rank)
        if not 0 <= rank < size:
            raise ValueError(f"ranks must be in 0..{size - 1}, got {rank}")
    if not ranks or len({*ranks}) < len(ranks):
        raise ValueError(f"ranks must be at least one rank, each of them once, got {[*ranks]}")
    return sorted(ranks)


def group_of_live_ranks(ranks: Sequence[int], of: dist.ProcessGroup, group: Any) -> Any:
    """Return the process group of these ranks of the group ``of``; None: there is one rank alone.

    Raises:
        TypeError: ``group`` is no process group.
        ValueError: this process is not one of the ranks; ``group`` has other processes.
    """
    if of.rank() not in ranks:
        raise ValueError(f"ranks must have this rank, {of.rank()}, got {[*ranks]}")
    if group is None and len(ranks) == 1:
        return None
    if group is None:
        raise ValueError(f"group must be a process group of the live ranks {[*ranks]}, got None")
    group = process_group(group)
    expected = [dist.get_global_rank(of, rank) for rank in ranks]
    if (actual := sorted(dist.get_process_group_ranks(group))) != sorted(expected):
        raise ValueError(
            f"group must have the processes of the live ranks, {sorted(expected)}, got {actual}"
        )
    return group


def live_replicas(replicas: Tensor, live: Tensor) -> tuple[Tensor, Tensor]:
    """Return the replicas with the live ones first, and their number.

    Args:
        replicas: int64 ``(.., R)``, the replicas of each expert, padded with -1.
        live: bool ``(P,)``, whether the rank of each physical expert is live.

    Returns:
        int64 ``(.., R)`` and int64 ``(..)``. An expert without a live replica keeps one that is
        not: exchanges leave its slots out, and count them.
    """
    usable = (replicas >= 0) & live[replicas.clamp(min=0)]
    order = (~usable).to(torch.int8).argsort(dim=-1, stable=True)
    return replicas.gather(-1, order), usable.sum(-1).clamp(min=1)
