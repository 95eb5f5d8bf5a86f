"""Moving experts to their new places, inside the tensors that hold them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moe_ops import checks

STAGING = -1
"""The staging row, as the source or target of a move."""


class Move(NamedTuple):
    """Copy one expert over another."""

    target: int
    source: int


def move_experts(weights: Sequence[Tensor], old_phy2log: Tensor, new_phy2log: Tensor) -> None:
    """Rearrange the experts of ``weights`` from one placement into another, in place.

    No tensor is replaced, so captured graphs, compiled code and other holders of the parameters see
    the new experts. Besides the weights one expert of one tensor is allocated at a time. Experts
    that stay are not copied. The copies are in the order of the current stream.

    Args:
        weights: tensors ``(P, ...)`` of any dtypes, expert by expert: weights, scales, biases.
        old_phy2log: ``(P,)`` int32 or int64, the logical expert that each row holds now; -1: none.
        new_phy2log: ``(P,)``, the one that it shall hold; -1: whatever is there.

    Raises:
        TypeError, ValueError: a wrong dtype or shape; ``new_phy2log`` has an expert that
            ``old_phy2log`` has not.
    """
    for name, x in (("old_phy2log", old_phy2log), ("new_phy2log", new_phy2log)):
        checks.tensor(name, x, 1, checks.INDICES)
    num_physical = old_phy2log.shape[0]
    rows = {"new_phy2log": new_phy2log, **{f"weights[{i}]": w for i, w in enumerate(weights)}}
    for name, x in rows.items():
        checks.size(f"len({name})", len(x), "len(old_phy2log)", num_physical)
    moves = plan_moves(old_phy2log.tolist(), new_phy2log.tolist())
    needs_staging = any(move.target == STAGING for move in moves)
    with torch.no_grad():
        for weight in weights:
            staging = torch.empty_like(weight[0]) if needs_staging else None
            for target, source in moves:
                _row(weight, staging, target).copy_(_row(weight, staging, source))


def _row(weight: Tensor, staging: Tensor | None, index: int) -> Tensor:
    return staging if index == STAGING and staging is not None else weight[index]


def plan_moves(old: Sequence[int], new: Sequence[int]) -> list[Move]:
    """Copies, one after another, that turn placement ``old`` into ``new``.

    Rows that no later copy reads are overwritten first. What is left are cycles, in which every row
    waits for the next: each is opened by putting one row aside.

    Raises:
        ValueError: an expert of ``new`` that ``old`` does not hold.
    """
    holder = {expert: row for row, expert in enumerate(old) if expert >= 0}
    source = {}
    for row, expert in enumerate(new):
        if expert >= 0 and expert not in holder:
            raise ValueError(f"new_phy2log must hold experts of old_phy2log only, got {expert}")
        if expert >= 0 and expert != old[row]:
            source[row] = holder[expert]
    readers = Counter(source.values())
    free = [row for row in source if not readers[row]]
    moves = []
    while source:
        if not free:  # only cycles are left, each row with one reader
            opened = next(iter(source))
            moves.append(Move(STAGING, opened))
            reader = next(row for row, read in source.items() if read == opened)
            source[reader] = STAGING
            free.append(opened)
        row = free.pop()
        read = source.pop(row)
        moves.append(Move(row, read))
        readers[read] -= 1
        if read in source and not readers[read]:
            free.append(read)
    return moves
