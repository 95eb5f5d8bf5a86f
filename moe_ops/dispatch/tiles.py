"""Tile sizes: the rows of a tile, the size of plans, the config of a GEMM.

All of it is host arithmetic on sizes. Functions that compute sizes of tensors (`padded_slots`,
`num_tiles`) also accept symbolic integers, without adding guards; functions that choose
(`row_tile`) run inside an operator, where sizes are numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

ROW_TILES = (16, 32, 64, 128)
"""The row tiles of the portable kernels."""
TALL_ROW_TILE = 192
"""A row tile of 16-bit GEMMs on Hopper; the portable kernels take powers of two."""
KNOWN_ROW_TILES = (*ROW_TILES, TALL_ROW_TILE)
"""Every row tile that a plan for GEMMs may have."""
MAX_ROW_TILE = 4096
"""The largest row tile of any plan."""


@dataclass(frozen=True, eq=False)
class TileRule:
    """The row tile of a plan, by load. There are few rules; they are compared by identity.

    The load is 1.5 times the average rows per expert (`estimated_rows`): a tile of that many rows
    holds all rows of most experts, whose weights are then read once, and little padding.
    """

    steps: tuple[tuple[float, int], ...]
    """Pairs ``(load, row tile)``, ascending: the tile is used up to the load."""
    batch_invariant: bool = False
    """Whether the GEMMs, too, must not depend on the number of rows."""
    routed_experts: int | None = None
    """Experts among which slots are routed; None: those whose weights the GEMM has."""

    @property
    def smallest(self) -> int:
        """The smallest row tile."""
        return min(tile for _, tile in self.steps)

    @property
    def largest(self) -> int:
        """The largest row tile."""
        return max(tile for _, tile in self.steps)


@lru_cache(maxsize=4096)
def row_tile(rule: TileRule, num_slots: int, num_experts: int) -> int:
    """The row tile for ``num_slots`` routed rows, of which ``num_experts`` experts have theirs."""
    wanted = estimated_rows(num_slots, rule.routed_experts or num_experts)
    return next(tile for limit, tile in rule.steps if wanted <= limit)


@lru_cache(maxsize=64)
def one_row_tile(rows: int) -> TileRule:
    """The rule with a row tile of ``rows`` at every load."""
    return TileRule(((math.inf, rows),))


def estimated_rows(num_slots: int, num_experts: int) -> float:
    """1.5 times the average rows per expert, but at most all rows."""
    return min(1.5 * num_slots / num_experts, num_slots)


@dataclass(frozen=True)
class TileConfig:
    """Config of a portable GEMM kernel; ``block_n`` counts output columns."""

    block_m: int
    block_n: int
    block_k: int
    group_m: int
    num_warps: int
    num_stages: int

    def constants(self) -> dict[str, int]:
        """The fields as keyword arguments of a kernel launch."""
        return {
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "BLOCK_K": self.block_k,
            "GROUP_M": self.group_m,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
        }


DIRECT_SLOTS = 16
"""The most slots of an expert GEMM without a plan: see `is_direct`."""
PLAN_HEADER = 4
"""Entries of a plan before its slots: the number of rows in use, the offset of the experts, the
offset of the tiles' first rows, and a zero, so that slots begin at a multiple of 16 bytes."""
MAX_PLAN_ENTRIES = 2**31 - 1
"""The most entries of a plan: kernels count them in 32 bits."""
SINGLE_LAUNCH_SLOTS = 1024
"""The most slots that are sorted in one launch, in which each program counts all slots."""
PLAN_PROGRAMS = 128
"""Programs of that launch in alignment, for up to four times as many experts. Each program counts
all slots, so more concurrent programs would only slow it down."""
MANY_TOKENS = 2048
"""Token count from which a top-k program routes several tokens: programs that route one would end
before others begin."""


class Gemm(NamedTuple):
    """The sizes of an expert GEMM on which the choice of tiles depends."""

    num_slots: int
    num_experts: int
    n: int
    """Output columns."""
    k: int
    """Length of the contraction."""
    itemsize: int
    """Bytes per number of a row."""
    halves: int
    """Weight tiles per output tile: 2 if gate and up are computed together."""
    rule: TileRule
    """The rule by which the row tile of the plan was chosen."""

    @property
    def row_tile(self) -> int:
        """The row tile of the plan."""
        return row_tile(self.rule, self.num_slots, self.num_experts)

    @property
    def routed_experts(self) -> int:
        """Experts among which the slots are routed: slots of those elsewhere are skipped."""
        return self.rule.routed_experts or self.num_experts

    @property
    def load_class(self) -> int:
        """The bucket of rows per expert: see `load_class`."""
        return load_class(self.num_slots, self.routed_experts)

    def run_at_once(self, block_m: int, columns: int, processors: int) -> bool:
        """Whether there are at most as many tiles as processors, if experts have equal loads.

        A tile has ``block_m`` rows and ``columns`` output columns. False in batch-invariant mode,
        whose tiles do not depend on the load.
        """
        of_expert = cdiv(self.num_slots, self.routed_experts * block_m)
        few = self.num_experts * of_expert * cdiv(self.n, columns) <= processors
        return few and not self.rule.batch_invariant

    @property
    def active(self) -> int:
        """Upper bound on the experts that have rows."""
        every = self.rule.batch_invariant
        return self.num_experts if every else min(self.num_slots, self.num_experts)


def cdiv(a, b):
    """``ceil(a / b)``, also for symbolic integers."""
    return (a + b - 1) // b


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least ``n``."""
    return 1 << max(n - 1, 0).bit_length()


def padded_slots(num_slots, num_experts, tile: int):
    """Upper bound on the rows of a plan whose row tile is at most ``tile``.

    An expert is padded by at most ``tile - 1`` rows, and a slot to at most ``tile`` rows.
    """
    bounds = num_slots * tile, num_slots + num_experts * (tile - 1)
    if isinstance(bounds[0], int):
        return min(bounds)
    # No guard on symbols: PyTorch can prove that max(0, x) is a size, but not that a product of
    # sizes is. (It would add a guard on the product; a cached graph would add one on the minimum.)
    return torch.sym_max(0, torch.sym_min(*bounds))


def num_tiles(num_slots, num_experts, tile: int):
    """Upper bound on the tiles of a plan whose row tile is at least ``tile``."""
    return cdiv(padded_slots(num_slots, num_experts, tile), tile)


class PlanSizes(NamedTuple):
    """Layout of a plan in one int32 tensor: header, the slot of each row, two entries per tile.

    The two entries are the tile's expert and the tile's first row when rows are permuted (in the
    order of the plan, without padding); for the Batched format and for permuted inputs, the first
    row in that tensor. Both entries are -1 past the last tile.
    """

    rows: int
    tiles: int
    experts_at: int
    """Offset of the tiles' experts."""
    firsts_at: int
    """Offset of the tiles' first rows."""
    entries: int
    """Length of the tensor."""


@lru_cache(maxsize=4096)
def plan_sizes(num_slots: int, num_experts: int, rule: TileRule, pad_to: int = 1) -> PlanSizes:
    """Sizes of a plan that suffice for every row tile of its rule.

    Args:
        num_slots: number of slots to be sorted.
        num_experts: number of experts.
        rule: the rule by which the row tile is chosen.
        pad_to: the number of rows is rounded up to a multiple of this.
    """
    rows = cdiv(padded_slots(num_slots, num_experts, rule.largest), pad_to) * pad_to
    tiles = num_tiles(num_slots, num_experts, rule.smallest)
    experts_at = PLAN_HEADER + rows
    entries = experts_at + 2 * tiles
    if type(entries) is int and entries > MAX_PLAN_ENTRIES:
        row_tiles = sorted({tile for _, tile in rule.steps})
        raise NotImplementedError(
            f"topk_ids must have so few slots that a plan with row tiles {row_tiles} has at "
            f"most {MAX_PLAN_ENTRIES} entries, got {num_slots} slots"
        )
    return PlanSizes(rows, tiles, experts_at, experts_at + tiles, entries)


def symbolic_plan_sizes(num_slots, num_experts, rule: TileRule, pad_to: int = 1) -> PlanSizes:
    """`plan_sizes` for numbers that may be symbolic, which the cache cannot look up."""
    numbers = isinstance(num_slots, int) and isinstance(num_experts, int)
    sizes = plan_sizes if numbers else plan_sizes.__wrapped__
    return sizes(num_slots, num_experts, rule, pad_to)


@lru_cache(maxsize=4096)
def load_class(num_slots: int, num_experts: int) -> int:
    """The rows-per-expert bucket: the least i with ``16 * 2**i`` at least the `estimated_rows`."""
    return _class_of(estimated_rows(num_slots, num_experts))


def last_class(rule: TileRule) -> int:
    """The first rows-per-expert bucket in which all loads have a rule's last row tile."""
    return _class_of(rule.steps[-2][0]) + 1 if len(rule.steps) > 1 else 0


def _class_of(wanted: float) -> int:
    i = 0
    while ROW_TILES[0] << i < wanted:
        i += 1
    return i


@lru_cache(maxsize=4096)
def is_direct(num_slots: int, num_experts: int) -> bool:
    """Whether an expert GEMM that gets the routing needs no plan because it has one slot per tile.

    The weights of an expert with several slots are then read once per slot. With few slots and many
    experts this is rare and costs less than the launch that makes a plan. (8 tokens with 2 of 8
    experts each took 1.8 times as long.)
    """
    return num_slots <= direct_slots(num_experts)


def direct_slots(num_experts: int) -> int:
    """The largest number of slots for which `is_direct` holds."""
    return min(DIRECT_SLOTS, max(2, num_experts // 8))


def max_programs(gemm: Gemm, config: TileConfig) -> int:
    """Upper bound on the programs of a GEMM, with a plan or without."""
    tile = gemm.row_tile
    blocks = tile // config.block_m * cdiv(gemm.n, config.block_n)
    return max_row_tiles(gemm.num_slots, gemm.num_experts, tile) * blocks


def own_plan(gemm: Gemm, config: Any) -> bool:
    """Whether a kernel sorts the slots again because its tiles do not divide the plan's."""
    return gemm.row_tile % config.block_m != 0


def with_own_plan(gemm: Gemm, config: Any) -> Gemm:
    """The sizes of a GEMM over a plan that has the kernel's row tile."""
    return gemm._replace(rule=one_row_tile(config.block_m))


def cuts_up(gemm: Gemm, config: TileConfig) -> int | None:
    """BLOCK_M if smaller than the plan's row tile, else None."""
    return None if config.block_m == gemm.row_tile else config.block_m


@lru_cache(maxsize=4096)
def max_row_tiles(num_slots: int, num_experts: int, block_m: int) -> int:
    """Upper bound on the row tiles of a GEMM, with a plan or without."""
    if is_direct(num_slots, num_experts):
        return num_slots
    return num_tiles(num_slots, num_experts, block_m)


class Scan(NamedTuple):
    """Slots and warps per program of a counting sort."""

    chunk: int
    num_warps: int


def scan_sizes(num_slots: int) -> Scan:
    """Sizes of a counting sort's programs.

    Few slots: a program handles all of them, with as few idle lanes and threads as possible, which
    cost time. Many slots: a program handles one block. Blocks grow with the number of slots, since
    every program adds up the counts of all blocks.
    """
    if num_slots <= SINGLE_LAUNCH_SLOTS:
        chunk = max(64, next_power_of_2(num_slots))
        return Scan(chunk, 2 if chunk <= 256 else 4)
    if num_slots <= 32768:
        return Scan(256, 4)
    return Scan(1024 if num_slots <= 262144 else 4096, 8)
