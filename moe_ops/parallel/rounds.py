"""Which rows travel between ranks, in what order, so that a placement becomes another one.

A round is a set of copies that first read all their sources and then overwrite all their targets.
A rank has room for a fixed number of rows that it sends and that it receives in a round. A row is
overwritten in the round of its last reader, or later. Cycles that do not fit into a round are
opened: one row of the group at a time is copied aside on its rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from moe_ops import checks


class Copy(NamedTuple):
    """Row ``source`` over row ``target``; ``source = ~row`` is the copy of ``row`` kept aside."""

    target: int
    source: int


class Round(NamedTuple):
    """Copies of which none overwrites what another one still has to read."""

    aside: int | None
    """A row to copy aside before anything else; None: none."""
    copies: list[Copy]


class Spread(NamedTuple):
    """How the rows of all ranks are numbered: rank r holds those from ``r * rows`` on."""

    rows: int
    """Rows of a rank."""
    ranks: int
    nodes: int = 1
    """Nodes with equally many ranks each, in the order of ranks."""

    def rank(self, row: int) -> int:
        """The rank that holds a row, or the copy ``~row`` of a row."""
        return max(row, ~row) // self.rows

    def node(self, row: int) -> int:
        """The node that holds a row."""
        return self.rank(row) * self.nodes // self.ranks


def plan_rounds(old: Sequence[int], new: Sequence[int], spread: Spread, limit: int) -> list[Round]:
    """Plan the rounds that turn placement ``old`` into ``new``.

    Every rank makes the same plan from the same placements.

    Args:
        old: the expert that each row holds; -1: none.
        new: the expert that each row is to hold; -1: any.
        spread: the ranks of the rows.
        limit: the most rows that a rank sends, and the most that it receives, in a round.

    Raises:
        ValueError: an expert of ``new`` that ``old`` does not hold, or a limit below 1.
    """
    checks.at_least(1, limit=limit)
    source = choose_sources(old, new, spread)
    readers = Counter(source.values())
    free = [row for row in source if not readers[row]]
    rounds = []
    while source:
        room, aside = _Room(spread, limit), None
        copies = [] if free else _whole_cycles(source, room)
        for copy in copies:
            del source[copy.target]
        if not free and not copies:  # no cycle fits into a round
            aside = next(iter(source))
            reader = next(row for row, read in source.items() if read == aside)
            source[reader] = ~aside
            free = [aside]
        waiting = []
        while free:
            row = free.pop(0)
            copy = Copy(row, source[row])
            if not room.take([copy]):
                waiting.append(row)
                continue
            copies.append(copy)
            del source[row]
            readers[copy.source] -= 1
            if copy.source in source and not readers[copy.source]:
                free.append(copy.source)
        free = waiting
        rounds.append(Round(aside, copies))
    return rounds


def choose_sources(old: Sequence[int], new: Sequence[int], spread: Spread) -> dict[int, int]:
    """Return the row that each changing row copies: near ones first, then idle ranks.

    Raises:
        ValueError: an expert of ``new`` that ``old`` does not hold.
    """
    holders: dict[int, list[int]] = {}
    for row, expert in enumerate(old):
        holders.setdefault(expert, []).append(row)
    changing = {row: expert for row, expert in enumerate(new) if expert >= 0 and expert != old[row]}
    sent: Counter[int] = Counter()
    source = {}
    for row, expert in changing.items():
        if expert not in holders:
            raise ValueError(f"new_phy2log must hold experts of old_phy2log only, got {expert}")

        def cost(held: int, row: int = row) -> tuple[bool, bool, int, bool, int]:
            far = spread.rank(held) != spread.rank(row), spread.node(held) != spread.node(row)
            return (*far, sent[spread.rank(held)], held in changing, held)

        source[row] = min(holders[expert], key=cost)
        if spread.rank(source[row]) != spread.rank(row):
            sent[spread.rank(source[row])] += 1
    return source


def _whole_cycles(source: dict[int, int], room: _Room) -> list[Copy]:
    """Return the cycles that fit into a round, where every row of ``source`` is in a cycle."""
    copies: list[Copy] = []
    seen: set[int] = set()
    for start in source:
        cycle, row = [], start
        while row not in seen:
            seen.add(row)
            cycle.append(Copy(row, source[row]))
            row = source[row]
        if cycle and room.take(cycle):
            copies += cycle
    return copies


class _Room:
    """What is left of each rank's room in a round."""

    def __init__(self, spread: Spread, limit: int) -> None:
        self._spread, self._limit = spread, limit
        self._sent: dict[int, set[int]] = {}
        self._received: Counter[int] = Counter()

    def take(self, copies: Iterable[Copy]) -> bool:
        """Take room for all of the copies, or for none of them; return which."""
        received, sent = self._received.copy(), {rank: {*of} for rank, of in self._sent.items()}
        for target, source in copies:
            to, of = self._spread.rank(target), self._spread.rank(source)
            received[to] += 1
            if to != of:
                sent.setdefault(of, set()).add(source)
            if received[to] > self._limit or len(sent.get(of, ())) > self._limit:
                return False
        self._received, self._sent = received, sent
        return True
