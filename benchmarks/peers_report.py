"""Layers beside the best peer of each cell: tables, and in words the cells that a peer wins."""

from __future__ import annotations

from collections import Counter
from statistics import geometric_mean
from typing import NamedTuple

from tables import OURS, TOKENS, Record, is_ours, markdown

from moe_ops.bench.problems import UNTUNED, find_problems

UNTUNED_SHAPES = {problem.name for problem in find_problems(UNTUNED)}
LEGEND = f"""\
The time of {OURS} over that of the best peer in the record: below 1, {OURS} is faster. A cell of
this table is the geometric mean over layers, with the peer that is the best in most of them."""
CELL_LEGEND = f"""\
The time of {OURS} over that of the best peer in the record, which is named; bold where the peer is
faster."""
MOST_NAMED = 8
"""Cells that the README names; the docs name all."""


class Cell(NamedTuple):
    """A layer with a number of tokens, beside its best peer."""

    scheme: str
    shape: str
    tokens: int
    peer: str
    ratio: float
    """The time of `OURS` over the peer's."""


def cells(record: Record) -> list[Cell]:
    """All cells that a peer was timed in, with uniform routing."""
    times: dict[tuple[str, str, int], dict[str, float]] = {}
    for row in record["rows"]:
        if row["routing"] == "uniform" and row["M"] in TOKENS:
            key = (row["scheme"], row["shape"], row["M"])
            times.setdefault(key, {})[row["impl"]] = row["time_us"]
    compared = []
    for key, of in sorted(times.items()):
        peers = {impl: time for impl, time in of.items() if not is_ours(impl)}
        if peers and OURS in of:
            best = min(peers, key=lambda impl: peers[impl])
            compared.append(Cell(*key, best, of[OURS] / peers[best]))
    return compared


def summary(record: Record) -> list[str]:
    """The README's parts: a line per scheme, one for untuned layers, and where a peer is faster."""
    compared = cells(record)
    tuned = [cell for cell in compared if not _untuned(cell)]
    groups = [(f"`{name}`", [c for c in tuned if c.scheme == name]) for name in _schemes(tuned)]
    groups.append(("all schemes", [cell for cell in compared if _untuned(cell)]))
    lines = [_line(name, mine) for name, mine in groups if mine]
    if not lines:
        return []
    table = markdown(["tokens:", *map(str, TOKENS)], lines, labels=1)
    return [LEGEND.replace("\n", " "), table, in_words(compared, MOST_NAMED)]


def report(records: list[Record]) -> str:
    """The docs' tables: a heading per GPU and scheme, a line per layer, and all cells lost."""
    parts = [CELL_LEGEND]
    for record in records:
        compared = cells(record)
        if not compared:
            continue
        parts += [f"### {record['gpu']} beside peers", in_words(compared)]
        for scheme in _schemes(compared):
            mine = [cell for cell in compared if cell.scheme == scheme]
            parts += [f"#### {record['gpu']} beside peers: {scheme}", _table(mine)]
    return "\n\n".join(parts)


def in_words(compared: list[Cell], most: int | None = None) -> str:
    """A sentence with the cells in which a peer is faster, those with the largest ratio first."""
    lost = sorted((cell for cell in compared if cell.ratio > 1), key=lambda cell: -cell.ratio)
    if not lost:
        return f"No peer is faster in any of the {len(compared)} cells."
    named = [
        f"`{c.scheme}` of {c.shape} with {c.tokens} tokens ({c.ratio:.2f}, {c.peer})"
        for c in lost[:most]
    ]
    more = len(lost) - len(named)
    listed = "; ".join(named) + (f"; and {more} more" if more else "")
    return f"A peer is faster in {len(lost)} of the {len(compared)} cells: {listed}."


def _schemes(compared: list[Cell]) -> list[str]:
    """The schemes of cells, ``bf16`` first."""
    return sorted({cell.scheme for cell in compared}, key=lambda scheme: (scheme != "bf16", scheme))


def _untuned(cell: Cell) -> bool:
    return cell.shape in UNTUNED_SHAPES


def _line(name: str, mine: list[Cell]) -> list[str]:
    """A line of the README's table: how many layers it is the mean of, and a cell per count."""
    count = len({cell.shape for cell in mine})
    layers = f"{count} layer{'s' * (count > 1)}" + " that nobody tuned" * _untuned(mine[0])
    return [f"{name} ({layers})", *(_mean(mine, tokens) for tokens in TOKENS)]


def _mean(mine: list[Cell], tokens: int) -> str:
    """The mean over layers, and the peer that is the best in most of them."""
    column = [cell for cell in mine if cell.tokens == tokens]
    if not column:
        return "-"
    (peer, _), *_ = Counter(cell.peer for cell in column).most_common(1)
    return f"{geometric_mean(cell.ratio for cell in column):.2f} {peer}"


def _table(mine: list[Cell]) -> str:
    by_place = {(cell.shape, cell.tokens): cell for cell in mine}
    tokens = [m for m in TOKENS if any(cell.tokens == m for cell in mine)]

    def text(shape: str, m: int) -> str:
        cell = by_place.get((shape, m))
        if cell is None:
            return "-"
        shown = f"{cell.ratio:.2f} {cell.peer}"
        return f"**{shown}**" if cell.ratio > 1 else shown

    shapes = sorted({cell.shape for cell in mine}, key=lambda s: (s in UNTUNED_SHAPES, s))
    lines = [[shape, *(text(shape, m) for m in tokens)] for shape in shapes]
    return markdown(["tokens:", *map(str, tokens)], lines, labels=1)
