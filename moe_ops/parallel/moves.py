"""Moving experts to new places inside the tensors that hold them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moe_ops import checks

STAGING = -1
"""The staging row, as the source or target of a move."""


class Move(NamedTuple):
    """Copy row ``source`` over row ``target``."""

    target: int
    source: int


def move_experts(weights: Sequence[Tensor], old_phy2log: Tensor, new_phy2log: Tensor) -> None:
    """Rearrange the experts of ``weights`` from one placement into another, in place.

    No tensor is replaced, so captured graphs, compiled code and other holders of the parameters see
    the new experts. The memory of one row of one tensor is allocated. Experts that stay are not
    copied. The copies run on the current stream.

    Args:
        weights: tensors ``(P, ...)`` of any dtypes, one row per expert: weights, scales, biases.
            They must not share memory.
        old_phy2log: ``(P,)`` int32 or int64, the logical expert that each row holds now; -1: none.
        new_phy2log: ``(P,)``, the logical expert that each row is to hold; -1: any.

    Raises:
        TypeError, ValueError: a wrong dtype or shape; weights that share memory; an expert in
            ``new_phy2log`` that is not in ``old_phy2log``. Nothing has been moved then.
    """
    for which, x in (("old_phy2log", old_phy2log), ("new_phy2log", new_phy2log)):
        checks.tensor(which, x, 1, checks.INDICES)
    num_physical = old_phy2log.shape[0]
    checks.size("len(new_phy2log)", len(new_phy2log), "len(old_phy2log)", num_physical)
    check_rows("weights", weights, "len(old_phy2log)", num_physical)
    moves = plan_moves(old_phy2log.tolist(), new_phy2log.tolist())
    check_apart({f"weights[{i}]": weight for i, weight in enumerate(weights)})
    apply_moves(weights, moves, staging_for(weights))


def check_rows(name: str, weights: Sequence[Tensor], rule: str, num_rows: int) -> None:
    """Check one layer's ``weights``, which errors call ``name``: tensors of ``num_rows`` rows.

    Raises:
        TypeError: something else than a Tensor.
        ValueError: another number of rows than ``rule`` says, or rows that repeat an element.
    """
    for i, weight in enumerate(weights):
        checks.tensor(f"{name}[{i}]", weight, None, None)
        rows = weight.shape[0] if weight.dim() else 0
        checks.size(f"len({name}[{i}])", rows, rule, num_rows)
        if any(
            step == 0 and size > 1 for size, step in zip(weight.shape, weight.stride(), strict=True)
        ):
            raise ValueError(
                f"{name}[{i}] must hold each element once, got strides {weight.stride()}"
            )


def check_apart(weights: dict[str, Tensor]) -> None:
    """Check that no two weights share memory, since a shared row would be moved twice.

    Raises:
        ValueError: two tensors, or views, that overlap.
    """
    by_address = sorted((_extent(w), name) for name, w in weights.items() if w.numel())
    for i, ((first, end), name) in enumerate(by_address):
        for (start, _), other in by_address[i + 1 :]:
            if start >= end:
                break
            period = weights[name].stride(0) * weights[name].itemsize
            length, other_length = (_row_extent(weights[n]) for n in (name, other))
            same_period = period == weights[other].stride(0) * weights[other].itemsize
            distance = (start - first) % period if period else 0
            if not (same_period and length <= distance <= period - other_length):
                raise ValueError(f"{other} must share no memory with {name}")


def _extent(weight: Tensor) -> tuple[int, int]:
    """Return the addresses of the first byte and of the byte after the last."""
    start = weight.data_ptr()
    return start, start + weight.itemsize + _reach(weight.shape, weight.stride()) * weight.itemsize


def _row_extent(weight: Tensor) -> int:
    return weight.itemsize * (1 + _reach(weight.shape[1:], weight.stride()[1:]))


def _reach(shape: Sequence[int], strides: Sequence[int]) -> int:
    return sum((size - 1) * step for size, step in zip(shape, strides, strict=True))


def staging_for(weights: Iterable[Tensor]) -> dict[torch.device, Tensor]:
    """Allocate on each device a buffer for one row, as large as the largest row of ``weights``."""
    largest: dict[torch.device, int] = {}
    for weight in weights:
        row_bytes = weight.itemsize * weight.shape[1:].numel()
        largest[weight.device] = max(row_bytes, largest.get(weight.device, 0))
    return {d: torch.empty(size, dtype=torch.uint8, device=d) for d, size in largest.items()}


def apply_moves(
    weights: Sequence[Tensor], moves: Sequence[Move], staging: dict[torch.device, Tensor]
) -> None:
    """Copy the rows of every weight as planned; allocates nothing."""
    with torch.no_grad():
        for weight in weights:
            shape = weight.shape[1:]
            aside = staging[weight.device][: weight.itemsize * shape.numel()]
            rows = {STAGING: aside.view(weight.dtype).view(shape)}
            for target, source in moves:
                to, taken = (rows[i] if i in rows else weight[i] for i in (target, source))
                to.copy_(taken)


def plan_moves(old: Sequence[int], new: Sequence[int]) -> list[Move]:
    """Plan the copies, one after another, that turn placement ``old`` into ``new``.

    Rows that no later copy reads are overwritten first. Only cycles are left then, in which every
    row waits for the next. Copying one row of a cycle to the staging row opens it.

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
