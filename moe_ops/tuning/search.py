"""The search for tiles: coordinate descent from the analytic defaults.

Both GEMMs of a layer are timed at each number of tokens. The search starts from the analytic
default of every kernel, changes one field of the config at a time, and keeps what is faster. The
clock that times a GEMM is passed in.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, cast

import torch

from moe_ops.dispatch.blackwell import is_block_scaled
from moe_ops.dispatch.device import Device
from moe_ops.dispatch.gemm_plan import FIXED, analytic_tiles, is_hoppers, plan_gemm, stored_gemm
from moe_ops.dispatch.hopper import (
    KERNELS,
    PACKED,
    HopperTiles,
    KernelTiles,
    hopper_tiles,
    most_stages,
    packed_tiles,
    stream_tiles,
    unfit,
    widths,
)
from moe_ops.dispatch.hopper_decode import (
    DECODE_FEW,
    FEW_CTAS,
    FEW_STAGES,
    MANY_ROW_TILES,
    ctas_per_sm,
    decode_tiles,
    decode_unfit,
    decodes_weights,
    few_tiles,
    many_tiles,
    with_stages,
)
from moe_ops.dispatch.operands import layer_operands
from moe_ops.dispatch.portable import shared_bytes
from moe_ops.dispatch.problem import GemmProblem, problem_of
from moe_ops.dispatch.row_tiles import rule_of
from moe_ops.dispatch.tiles import ROW_TILES, load_class
from moe_ops.dispatch.tuned_file import Sizes, file_name, scaled_group, written
from moe_ops.pipeline.packing import serves_packed
from moe_ops.scheme import Quant, Scheme

DTYPE = torch.bfloat16
"""Dtype of the rows."""
DIMENSIONS = ("block_n", "ctas", "num_warps", "block_k", "num_stages", "group_m", "on_demand")
"""The order in which fields are tried; twice, if the first round found anything."""
GROUPS = (1, 8, 32)
"""Values of ``group_m`` to try for the portable kernels."""
PACKED_GROUPS = (3, 4, 8, 16, 32)
"""Values of ``group_m`` to try for the persistent Hopper kernels that pack rows."""
FEW_GROUPS = (1, 2, 4, 8)
"""Values of ``group_m`` to try for the kernel that decodes packed weights for few rows."""
ACCUMULATORS = 128
"""The most registers per thread for accumulators, of 255."""
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

    Weights have the form in which a layer keeps them: packed if a kernel of the GPU decodes them.

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

    def packed(self, which: int) -> bool:
        """Whether the weight of GEMM 1 or 2 is packed."""
        return serves_packed(self._weight(which), self.scheme, DTYPE, self.device, False)

    def problem(self, num_tokens: int, which: int) -> GemmProblem:
        """GEMM 1 or 2 of the layer."""
        activation, top_k = ("silu", self.top_k) if which == 1 else ("", 1)
        facts = self.device.arch, self.device.row_tile
        rule = rule_of(self.scheme.key, DTYPE.itemsize, *facts, False)
        return problem_of(layer_operands(
            self._weight(which), self.scheme, DTYPE, rule, num_tokens * self.top_k,
            num_tokens=num_tokens, top_k=top_k, activation=activation, packed=self.packed(which),
        ))  # fmt: skip

    def has_tiles(self, num_tokens: int) -> bool:
        """Whether tiles that a file can set serve a GEMM of so many tokens."""
        plans = (plan_gemm(self.problem(num_tokens, which), self.device) for which in (1, 2))
        return any(plan.kernel not in FIXED for plan in plans)

    def kernels(self, num_tokens: int, which: int) -> list[KernelTiles]:
        """Every kernel's analytic tiles for GEMM 1 or 2; the default first."""
        problem = self.problem(num_tokens, which)
        if problem.packed:
            return self._decoding(problem)
        row_tile, plain = problem.sizes.row_tile, analytic_tiles(problem, self.device)
        found: list[KernelTiles] = [plain] * (row_tile in ROW_TILES)
        if not is_hoppers(problem, self.device):
            return found
        gemm, _ = stored_gemm(problem.sizes, self.scheme)
        for kernel in KERNELS:
            if widths(kernel, row_tile, gemm.itemsize):
                make = packed_tiles if kernel == PACKED else stream_tiles
                tiles = make(gemm, row_tile, self.device)
                found += [tiles] * (unfit(tiles, gemm, self.device) is None)
        default = hopper_tiles(gemm, self.device)
        return sorted(found, key=lambda tiles: tiles != default)

    @property
    def _quant(self) -> Quant:
        """The format of the weights, which are quantized."""
        return cast(Quant, self.scheme.weight)

    def _decoding(self, problem: GemmProblem) -> list[KernelTiles]:
        """Analytic tiles of every kernel for a packed weight; the default first."""
        gemm, quant = problem.sizes, self._quant
        default = decode_tiles(gemm, quant, self.device)
        made = {default.kernel: default}
        for makes, tiles in ((few_tiles, FEW_CTAS), (many_tiles, MANY_ROW_TILES)):
            if gemm.row_tile in tiles:
                other = makes(gemm, quant, self.device)
                made.setdefault(other.kernel, other)
        return [t for t in made.values() if decode_unfit(t, gemm, quant, self.device) is None]

    def allows(self, trial: Trial) -> bool:
        """Whether a trial's tiles fit the scheme's groups, shared memory and registers."""
        tokens, which, tiles = trial
        gemm, bits = stored_gemm(self.problem(tokens, which).sizes, self.scheme)
        if isinstance(tiles, HopperTiles) and decodes_weights(tiles):
            fits = decode_unfit(tiles, gemm, self._quant, self.device) is None
            return fits and tiles.num_stages <= FEW_STAGES
        if isinstance(tiles, HopperTiles):
            return unfit(tiles, gemm, self.device) is None
        group = scaled_group(self.scheme)
        sums = tiles.block_m * tiles.block_n * gemm.halves // (32 * tiles.num_warps)
        if gemm.itemsize == 1:  # the product of a step of K takes registers of its own
            sums *= 2
        return (
            16 <= tiles.block_n <= 256
            and min(32, group or 32) <= tiles.block_k <= min(256, group or 256)
            and 2 <= tiles.num_warps <= 16
            and 1 <= tiles.num_stages <= 6
            and sums <= ACCUMULATORS
            and shared_bytes(tiles, gemm, bits) <= self.device.shared_memory
        )

    def neighbours(self, trial: Trial, size: str) -> list[Trial]:
        """The allowed trials that differ in one field by a step."""
        if isinstance(trial.tiles, HopperTiles):
            return self._hopper_neighbours(trial, trial.tiles, size)
        now = getattr(trial.tiles, size, 0)  # a TileConfig has no "on_demand"
        values: Sequence[int] = (now // 2, now * 2) if now else ()
        if size == "num_stages":
            values = (now - 1, now + 1)
        elif size == "group_m":  # with one row tile per expert there is nothing to group
            values = [g for g in GROUPS if g != now] if self.load(trial.num_tokens) else ()
        tried = (trial._replace(tiles=replace(trial.tiles, **{size: v})) for v in values)
        return [trial for trial in tried if self.allows(trial)]

    def _hopper_neighbours(self, trial: Trial, tiles: HopperTiles, size: str) -> list[Trial]:
        """`neighbours` for a Hopper kernel; another ``block_n`` comes with the most stages."""
        found: list[HopperTiles] = []
        decoding, few = decodes_weights(tiles), tiles.kernel == DECODE_FEW
        if size == "ctas" and decoding:  # fewer have room for more stages
            counts = ctas_per_sm(tiles.kernel, tiles.block_m)
            found = [replace(tiles, ctas=n) for n in counts if n != tiles.ctas]
            found = [with_stages(t, self._quant, self.device) for t in found]
        elif size == "block_n" and not decoding:
            gemm, _ = stored_gemm(self.problem(trial.num_tokens, 1).sizes, self.scheme)
            wide = widths(tiles.kernel, tiles.block_m, gemm.itemsize)
            found = [replace(tiles, block_n=n) for n in wide if n != tiles.block_n]
            found = [replace(t, num_stages=most_stages(t, self.device)) for t in found]
        elif size == "num_stages":
            found = [replace(tiles, num_stages=tiles.num_stages + s) for s in (-2, -1, 1, 2)]
        elif size == "on_demand" and (tiles.packed or (decoding and not few)):
            found = [replace(tiles, on_demand=not tiles.on_demand)]
        elif size == "group_m":
            values = self._groups(trial.num_tokens, tiles)
            found = [replace(tiles, group_m=g) for g in values if g != tiles.group_m]
        tried = (trial._replace(tiles=other) for other in found)
        return [trial for trial in tried if self.allows(trial)]

    def _groups(self, num_tokens: int, tiles: HopperTiles) -> Sequence[int]:
        """Values of ``group_m`` of a Hopper kernel; none if there is one row tile per expert."""
        if tiles.kernel == DECODE_FEW:
            return FEW_GROUPS if self.load(num_tokens) else ()
        return PACKED_GROUPS if tiles.packed or decodes_weights(tiles) else ()

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
        found: list[Trial] = []
        for start in chain.from_iterable(self.beginnings(num_tokens, which) for which in (1, 2)):
            steps = (self.neighbours(start, size) for size in DIMENSIONS)
            found += [start, *chain.from_iterable(steps)]
        return found


def _search(subject: Subject, times: dict[Trial, float], clock: Clock, prepare: Prepare) -> Trial:
    """The fastest trial of a GEMM, searched from all kernels' starts that are not hopeless."""
    near = [trial for trial, us in times.items() if us <= HOPELESS * min(times.values())]
    walks = (_walk(subject, start, times[start], clock, prepare) for start in near)
    return min(walks, key=lambda walk: walk[1])[0]


def _walk(
    subject: Subject, start: Trial, start_us: float, clock: Clock, prepare: Prepare
) -> tuple[Trial, float]:
    """Coordinate descent from ``start``: the fastest trial and its time."""
    known, best = {start: start_us}, start
    for _ in range(2):
        before = best
        for size in DIMENSIONS:
            new = [trial for trial in subject.neighbours(best, size) if trial not in known]
            prepare(new)
            known |= {trial: clock(trial) for trial in new}
            near = [t for t in subject.neighbours(best, size) if t in known]
            best = min((best, *near), key=known.__getitem__)
        if best == before:
            break
    return best, known[best]


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
    begin = ({trial: clock(trial) for trial in found} for found in kernels)
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
