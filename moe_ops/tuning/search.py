"""The search for tiles: coordinate descent from the analytic defaults.

Both GEMMs of a layer are timed at each number of tokens. The search starts from the analytic
default of every kernel, changes one field of the config at a time, and keeps what is faster. The
clock that times a GEMM is passed in.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch

from moe_ops.dispatch.blackwell import is_block_scaled
from moe_ops.dispatch.device import Device
from moe_ops.dispatch.families import FIXED, TUNABLE, serving
from moe_ops.dispatch.families.base import Tunable
from moe_ops.dispatch.gemm_plan import plan_gemm
from moe_ops.dispatch.hopper import KernelTiles
from moe_ops.dispatch.operands import layer_operands
from moe_ops.dispatch.problem import GemmProblem, problem_of, without_sum
from moe_ops.dispatch.row_tiles import row_tile_rule
from moe_ops.dispatch.tiles import load_class
from moe_ops.dispatch.tuned_file import Sizes, file_name, written
from moe_ops.pipeline.forms import serves_packed
from moe_ops.scheme import Scheme

DTYPE = torch.bfloat16
"""Dtype of the rows."""
DIMENSIONS = ("block_n", "ctas", "num_warps", "block_k", "num_stages", "group_m", "on_demand")
"""The order in which fields are tried; twice, if the first round found anything."""
HOPELESS = 1.25
"""A kernel is not searched if its default takes more than this many times the best time."""
MARGIN = 0.02
"""Fraction of its time by which a winner has to beat the default; less is noise."""
REPEATS = 3
"""Repeated timings of the default and of the winner, in turn."""


class Trial(NamedTuple):
    """One GEMM to time."""

    num_tokens: int
    gemm: int
    """GEMM 1 or 2."""
    tiles: KernelTiles


Clock = Callable[[Trial], float]
"""Times a trial in microseconds; infinite if the tiles do not run or their result is wrong."""


Prepare = Callable[[Sequence[Trial]], object]
"""Called with trials before they are timed, so that their kernels can be compiled in parallel."""


class Pair(NamedTuple):
    """Tiles of both GEMMs and their times."""

    tiles: tuple[KernelTiles, KernelTiles]
    times: tuple[float, float]

    @property
    def time_us(self) -> float:
        """The time of both GEMMs."""
        return sum(self.times)


@dataclass(frozen=True)
class Subject:
    """The layer to tune: gated, with bf16 rows, on a GPU.

    Weights have the form in which a layer keeps them: packed if a kernel of the GPU reads them.

    Raises:
        NotImplementedError: a scheme that runs on block-scaled instructions on that GPU.
    """

    sizes: Sizes
    top_k: int
    scheme: Scheme
    device: Device

    def __post_init__(self) -> None:
        if is_block_scaled(self.scheme.key, self.device.arch):
            raise NotImplementedError(
                f"scheme must not run on block-scaled instructions, whose tiles cannot be tuned, "
                f"got {self.scheme.name} on sm_{self.device.arch}"
            )

    @property
    def file(self) -> str:
        """The name of the layer's tuned file."""
        return file_name(self.sizes, self.device.name, self.scheme.key)

    def load(self, num_tokens: int) -> int:
        """The rows-per-expert bucket of a number of tokens."""
        return load_class(num_tokens * self.top_k, self.sizes[0])

    def _weight(self, which: int) -> tuple[int, int, int]:
        experts, width, hidden = self.sizes
        return (experts, 2 * width, hidden) if which == 1 else (experts, hidden, width)

    def _activation(self, which: int) -> str:
        return "silu" if which == 1 else ""

    def in_fragments(self, which: int) -> bool:
        """Whether the weight of GEMM 1 or 2 is packed."""
        return serves_packed(
            self._weight(which), self.scheme, DTYPE, self.device, False, self._activation(which)
        )

    def problem(self, num_tokens: int, which: int) -> GemmProblem:
        """GEMM 1 or 2 of the layer."""
        activation, top_k = self._activation(which), self.top_k if which == 1 else 1
        facts = self.device.arch, self.device.row_tile
        rule = row_tile_rule(self.scheme.key, DTYPE.itemsize, *facts, False)
        operands = layer_operands(
            self._weight(which),
            self.scheme,
            DTYPE,
            rule,
            num_tokens * self.top_k,
            num_tokens=num_tokens,
            top_k=top_k,
            activation=activation,
            fragments=self.in_fragments(which),
        )
        return problem_of(operands)

    def has_tiles(self, num_tokens: int) -> bool:
        """Whether tiles that a file can set serve a GEMM of so many tokens."""
        fixed = {family.kernel for family in FIXED}
        plans = (plan_gemm(self.problem(num_tokens, which), self.device) for which in (1, 2))
        return any(plan.kernel not in fixed for plan in plans)

    def kernels(self, num_tokens: int, which: int) -> list[KernelTiles]:
        """Every family's analytic tiles for GEMM 1 or 2; the default first."""
        problem, device = without_sum(self.problem(num_tokens, which)), self.device
        takers = [family for family in TUNABLE if family.why_not(problem, device) is None]
        takers.sort(key=lambda family: family.why_another(problem, device) is not None)
        made = [(family, family.tiles(problem, device)) for family in takers]
        return [
            tiles
            for family, tiles in made
            if tiles.block_m == problem.sizes.row_tile
            and family.unfit(tiles, problem, device) is None
        ]

    def allows(self, trial: Trial) -> bool:
        """Whether a trial's tiles fit the scheme's groups, shared memory and registers."""
        problem = without_sum(self.problem(trial.num_tokens, trial.gemm))
        family = serving(trial.tiles, problem, self.device)
        return isinstance(family, Tunable) and family.worth(trial.tiles, problem)

    def neighbours(self, trial: Trial, size: str) -> list[Trial]:
        """The allowed trials that differ in one field by a step."""
        problem = without_sum(self.problem(trial.num_tokens, trial.gemm))
        family = serving(trial.tiles, problem, self.device)
        if not isinstance(family, Tunable):
            return []
        steps = family.steps(trial.tiles, size, problem, self.device)
        tried = (trial._replace(tiles=tiles) for tiles in steps)
        return [trial for trial in tried if self.allows(trial)]

    def starts(self, num_tokens: int) -> tuple[Trial, Trial]:
        """The tiles of both GEMMs that run without a tuned file."""
        first, second = (self.beginnings(num_tokens, which)[0] for which in (1, 2))
        return first, second

    def beginnings(self, num_tokens: int, which: int) -> list[Trial]:
        """The starting points of the search: one trial per kernel, the default first."""
        make = partial(Trial, num_tokens, which)
        return [make(tiles) for tiles in self.kernels(num_tokens, which)]

    def candidates(self, num_tokens: int) -> list[Trial]:
        """The trials that the search may try first: defaults and their neighbours."""
        trials: list[Trial] = []
        for start in chain.from_iterable(self.beginnings(num_tokens, which) for which in (1, 2)):
            steps = (self.neighbours(start, size) for size in DIMENSIONS)
            trials += [start, *chain.from_iterable(steps)]
        return trials


def _search(subject: Subject, times: dict[Trial, float], clock: Clock, prepare: Prepare) -> Trial:
    """The fastest trial of a GEMM, searched from all kernels' starts that are not hopeless."""
    near = [trial for trial, us in times.items() if us <= HOPELESS * min(times.values())]
    walks = (_walk(subject, start, times[start], clock, prepare) for start in near)
    return min(walks, key=lambda walk: walk[1])[0]


def _walk(
    subject: Subject, start: Trial, start_us: float, clock: Clock, prepare: Prepare
) -> tuple[Trial, float]:
    """Coordinate descent from ``start``: the fastest trial and its time."""
    times, best = {start: start_us}, start
    for _ in range(2):
        before = best
        for size in DIMENSIONS:
            new = [trial for trial in subject.neighbours(best, size) if trial not in times]
            prepare(new)
            times |= {trial: clock(trial) for trial in new}
            near = [t for t in subject.neighbours(best, size) if t in times]
            best = min((best, *near), key=times.__getitem__)
        if best == before:
            break
    return best, times[best]


def tune_tokens(
    subject: Subject, num_tokens: int, clock: Clock, prepare: Prepare = list
) -> dict[str, Any]:
    """Search the tiles for one number of tokens; returns the entry of the tuned file.

    The winner and the default are timed again, in turn. The default wins unless the winner is
    clearly faster.

    Args:
        subject: the layer.
        num_tokens: T.
        clock: times a GEMM.
        prepare: called with trials before they are timed.

    Raises:
        RuntimeError: the default does not run.
    """
    prepare(subject.candidates(num_tokens))
    starts = subject.starts(num_tokens)
    default = _timed(starts, clock)
    if not math.isfinite(default.time_us):
        raise RuntimeError(f"the default tiles do not run: {default}")
    kernels = (subject.beginnings(num_tokens, which) for which in (1, 2))
    begin = ({trial: clock(trial) for trial in trials} for trials in kernels)
    first, second = (_search(subject, times, clock, prepare) for times in begin)
    default, won = _side_by_side(starts, (first, second), clock)
    if won.time_us > (1 - MARGIN) * default.time_us:
        won = default
    return _entry(won, default)


def _timed(trials: tuple[Trial, Trial], clock: Clock) -> Pair:
    first, second = trials
    return Pair((first.tiles, second.tiles), (clock(first), clock(second)))


def _side_by_side(
    starts: tuple[Trial, Trial], best: tuple[Trial, Trial], clock: Clock
) -> tuple[Pair, Pair]:
    """Median times of the default and of the winner, timed in turn."""
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
            **written(tiles),
            "time_us": round(won.times[which], 2),
            "default_us": round(default.times[which], 2),
        }
    times = {"time_us": round(won.time_us, 2), "default_us": round(default.time_us, 2)}
    return {**entry, **times}
