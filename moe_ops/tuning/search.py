"""The search for tiles: which are tried, and which win.

Both GEMMs of a layer are timed at each number of tokens, from the analytic default outwards: one
size of a tile at a time, keeping what is faster. What times them is passed in.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

from moe_ops.activation import formula
from moe_ops.block_scaled import is_block_scaled
from moe_ops.gemm_tiles import shared_bytes
from moe_ops.pipeline.costs import analytic_tiles, stored_gemm
from moe_ops.scheme import Scheme
from moe_ops.tiles import ROW_TILES, Device, Gemm, TileConfig, load_class, pick_row_tile
from moe_ops.tuned import SIZES, Sizes, default_row_tiles, file_name, scaled_group

DIMENSIONS = ("block_n", "num_warps", "block_k", "num_stages", "group_m")
"""The order in which sizes are tried; twice, if the first round found anything."""
GROUPS = (1, 8, 32)
ACCUMULATORS = 128
"""Registers of a thread that sums may take, of 255."""
HOPELESS = 1.25
"""Row tiles whose defaults take so many times the best are not searched."""
MARGIN = 0.02
"""By how much of its time a winner has to beat the default: less is chance."""
REPEATS = 3


class Trial(NamedTuple):
    """One GEMM to time."""

    num_tokens: int
    gemm: int
    """1 or 2."""
    tiles: TileConfig


Clock = Callable[[Trial], float]
"""Microseconds; infinite for tiles that do not run, or whose result is wrong."""


class Pair(NamedTuple):
    """Tiles of both GEMMs and their times."""

    tiles: tuple[TileConfig, TileConfig]
    times: tuple[float, float]

    @property
    def time_us(self) -> float:
        """Of both."""
        return sum(self.times)


@dataclass(frozen=True)
class Subject:
    """What is tuned: a gated layer of bf16 rows, on a GPU.

    Raises:
        NotImplementedError: a scheme whose products are block-scaled on that GPU.
    """

    sizes: Sizes
    top_k: int
    scheme: Scheme
    device: Device

    def __post_init__(self) -> None:
        if is_block_scaled(self.scheme.name, self.device.arch):
            raise NotImplementedError(
                f"scheme must not run on block-scaled instructions, whose tiles are not looked up, "
                f"got {self.scheme.name} on sm_{self.device.arch}"
            )

    @property
    def file(self) -> str:
        """The name of its file."""
        return file_name(self.sizes, self.device.name, self.scheme.name)

    def load(self, num_tokens: int) -> int:
        """The class of load that a number of tokens is in."""
        return load_class(num_tokens * self.top_k, self.sizes[0])

    def row_tile(self, num_tokens: int) -> int:
        """The default."""
        tiles = default_row_tiles(self.scheme)
        return pick_row_tile(tiles, num_tokens * self.top_k, self.sizes[0])

    def _gemm(self, num_tokens: int, which: int, row_tile: int) -> Gemm:
        experts, width, hidden = self.sizes
        n, k, halves = (width, hidden, 2) if which == 1 else (hidden, width, 1)
        # Twice the tile: a single one stands for tiles that do not follow the load.
        return Gemm(num_tokens * self.top_k, experts, n, k, 2, halves, (row_tile, row_tile))

    def default(self, num_tokens: int, which: int, row_tile: int) -> TileConfig:
        """The analytic choice for GEMM 1 or 2 with tiles of so many rows."""
        gemm, rule = self._gemm(num_tokens, which, row_tile), formula("silu")
        return analytic_tiles(gemm, self.scheme, rule if which == 1 else None, self.device)

    def allows(self, trial: Trial) -> bool:
        """Whether tiles fit the scheme's groups, the shared memory and the registers."""
        tokens, which, tiles = trial
        gemm, bits = stored_gemm(self._gemm(tokens, which, tiles.block_m), self.scheme)
        group = scaled_group(self.scheme)
        sums = tiles.block_m * tiles.block_n * gemm.halves // (32 * tiles.num_warps)
        if gemm.itemsize == 1:  # those of a piece of K are added up in registers of their own
            sums *= 2
        return (
            16 <= tiles.block_n <= 256
            and 32 <= tiles.block_k <= min(256, group or 256)
            and 2 <= tiles.num_warps <= 16
            and 1 <= tiles.num_stages <= 6
            and sums <= ACCUMULATORS
            and shared_bytes(tiles, gemm, bits) <= self.device.shared_memory
        )

    def neighbours(self, trial: Trial, size: str) -> list[Trial]:
        """The trials that differ in one size, by a step."""
        now = getattr(trial.tiles, size)
        values: Sequence[int] = (now // 2, now * 2)
        if size == "num_stages":
            values = (now - 1, now + 1)
        elif size == "group_m":  # with one tile an expert there is nothing to group
            values = [g for g in GROUPS if g != now] if self.load(trial.num_tokens) else ()
        tried = (trial._replace(tiles=replace(trial.tiles, **{size: v})) for v in values)
        return [trial for trial in tried if self.allows(trial)]

    def row_tiles(self, num_tokens: int) -> list[int]:
        """The default and its neighbours."""
        place = ROW_TILES.index(self.row_tile(num_tokens))
        near = ROW_TILES[max(place - 1, 0) : place + 2]
        return sorted(near, key=lambda tile: tile != ROW_TILES[place])

    def starts(self, num_tokens: int, row_tile: int) -> tuple[Trial, Trial]:
        """Where the search begins."""
        tiles = (self.default(num_tokens, which, row_tile) for which in (1, 2))
        first, second = (Trial(num_tokens, which, t) for which, t in enumerate(tiles, start=1))
        return first, second

    def candidates(self, num_tokens: int) -> list[Trial]:
        """What the search may try first: defaults and all that is one step from them."""
        found: list[Trial] = []
        for tile in self.row_tiles(num_tokens):
            for start in self.starts(num_tokens, tile):
                steps = (self.neighbours(start, size) for size in DIMENSIONS)
                found += [start, *chain.from_iterable(steps)]
        return found


def _walk(subject: Subject, start: Trial, clock: Clock) -> tuple[Trial, float]:
    """From the start to what is faster, one size at a time."""
    known = {start: clock(start)}
    best = start
    for _ in range(2):
        before = best
        for size in DIMENSIONS:
            for trial in subject.neighbours(best, size):
                if trial not in known:
                    known[trial] = clock(trial)
            near = [t for t in subject.neighbours(best, size) if t in known]
            best = min((best, *near), key=known.__getitem__)
        if best == before:
            break
    return best, known[best]


def tune_tokens(
    subject: Subject, num_tokens: int, row_tiles: Sequence[int], clock: Clock
) -> dict[str, Any]:
    """The entry of a file for one number of tokens.

    The winner and the default are timed again, in turn; the default stays where the winner is
    not clearly faster.

    Args:
        subject: the layer.
        num_tokens: T.
        row_tiles: those that may win.
        clock: what times a GEMM.

    Raises:
        RuntimeError: the default does not run.
    """
    starts = subject.starts(num_tokens, subject.row_tile(num_tokens))
    default = _timed(starts, clock)
    if not math.isfinite(default.time_us):
        raise RuntimeError(f"the default tiles do not run: {default}")
    best, best_us = starts, math.inf
    for tile in row_tiles:
        begin = subject.starts(num_tokens, tile)
        if best_us < math.inf and _timed(begin, clock).time_us > HOPELESS * best_us:
            continue
        (first, us1), (second, us2) = (_walk(subject, start, clock) for start in begin)
        if us1 + us2 < best_us:
            best, best_us = (first, second), us1 + us2
    default, won = _side_by_side(starts, best, clock)
    if starts[0].tiles.block_m in row_tiles and won.time_us > (1 - MARGIN) * default.time_us:
        won = default
    return _entry(won, default)


def _timed(trials: tuple[Trial, Trial], clock: Clock) -> Pair:
    first, second = trials
    return Pair((first.tiles, second.tiles), (clock(first), clock(second)))


def _side_by_side(
    starts: tuple[Trial, Trial], best: tuple[Trial, Trial], clock: Clock
) -> tuple[Pair, Pair]:
    """Medians of the default and of the winner."""
    runs = [(_timed(starts, clock), _timed(best, clock)) for _ in range(REPEATS)]

    def median(pairs: Sequence[Pair]) -> Pair:
        first, second = zip(*(pair.times for pair in pairs), strict=True)
        return Pair(pairs[0].tiles, (statistics.median(first), statistics.median(second)))

    default, won = (median(pairs) for pairs in zip(*runs, strict=True))
    return default, won


def _entry(won: Pair, default: Pair) -> dict[str, Any]:
    entry: dict[str, Any] = {"BLOCK_M": won.tiles[0].block_m}
    for which, tiles in enumerate(won.tiles):
        entry[f"gemm{which + 1}"] = {
            **{size: getattr(tiles, size.lower()) for size in SIZES},
            "time_us": round(won.times[which], 2),
            "default_us": round(default.times[which], 2),
        }
    times = {"time_us": round(won.time_us, 2), "default_us": round(default.time_us, 2)}
    return {**entry, **times}
