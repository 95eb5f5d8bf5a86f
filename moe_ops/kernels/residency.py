"""The kernel that makes experts resident: it decides which ones get which slots, and copies them.

Every program decides by itself, which takes less time than another launch, and copies its share.
The kernel reads host memory by addresses in a table on the device, and what there is to copy from
the state. So neither the host nor a graph knows what a call copies. See `moe_ops.residency.state`
for the rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels._gemm.rows import plan_constants, write_header, write_map, write_plan
from moe_ops.kernels._gemm.tile import planned_tiles
from moe_ops.kernels._runtime.dependent import take_turn
from moe_ops.kernels._runtime.launch import Launch
from moe_ops.kernels._runtime.slots import local_experts, map_size, next_power_of_2
from moe_ops.residency.slots import CHUNK, COLUMNS, Residency
from moe_ops.residency.state import (
    ARRIVED,
    BEGUN,
    BYTES,
    CLOCK,
    HITS,
    LEFT,
    MIRROR,
    MISSES,
    WAVES,
    StateLayout,
)
from moe_ops.tensors import AnyTiles

FEW_IDS, MANY_IDS = 128, 1024
"""Ids that a program reads at once."""
COMPARED = 2048
"""Pairs of experts that are compared at once."""
PROGRAMS = 32
"""The most programs of a launch: enough for the link. SMs without one have room for programs of the
next GEMM, which become resident while this kernel decides."""
REGISTERS = 128
"""maxnreg: without a bound ptxas spills, so that more CTAs fit on an SM."""
PIECE = tl.constexpr(2048)
"""Bytes that a program copies at once where addresses or sizes are odd."""
NEVER = tl.constexpr(2**62)
"""The key of an expert that does not lose its slot."""
_CLOCK = tl.constexpr(CLOCK)
_BEGUN = tl.constexpr(BEGUN)
_LEFT = tl.constexpr(LEFT)
_ARRIVED = tl.constexpr(ARRIVED)
_HITS = tl.constexpr(HITS)
_MISSES = tl.constexpr(MISSES)
_BYTES = tl.constexpr(BYTES)
_WAVES = tl.constexpr(WAVES)
_MIRROR = tl.constexpr(MIRROR)
_COLUMNS = tl.constexpr(COLUMNS)


class Sizes(NamedTuple):
    """Constants of the kernel."""

    E: int
    K: int
    MOST: int
    """The most experts of a wave."""
    EXPERTS: int
    """E, a power of two."""
    COMPARED: int
    IDS: int
    """Ids that a program reads at once."""
    SLOT: int
    """Offsets of the parts of a state: see `StateLayout`."""
    LAST_USE: int
    KEYS: int
    COPIED: int
    TARGETS: int
    FREED: int
    ROWS: int
    """In int32 entries."""
    LENGTH: int
    """Entries of a weight's state."""
    TABLE: int
    """Rows of a weight's table."""
    WIDE_TABLE: int
    """That number, rounded up to a power of two."""
    CHUNK: int
    TILE: int
    """Constants of `write_plan`."""
    WIDE: int
    TILES: int


@triton.jit
def _state_entries(state, wave, S: tl.constexpr):
    """The entries of the state that a wave reads: parts, clocks, and counters with their mirror.

    All are read at once, because reads that wait for each other are what a wave without copies
    takes its time for.
    """
    expert = tl.arange(0, S.EXPERTS)
    slot = tl.load(state + S.SLOT + expert, mask=expert < S.E, other=-1)
    used = tl.load(state + S.LAST_USE + expert, mask=expert < S.E, other=-1)
    now = tl.load(state + _CLOCK)
    begun = tl.where(wave == 0, now, tl.load(state + _BEGUN))
    hits, misses, waves = tl.load(state + _HITS), tl.load(state + _MISSES), tl.load(state + _WAVES)
    counters = hits, misses, waves, tl.load(state + _MIRROR)
    return slot, used, now, begun, counters


@triton.jit
def _write_counter(state, mirror, entry, total):
    """Write a counter, and the copy of it that the host reads."""
    tl.store(state + entry, total)
    if mirror != 0:
        tl.store(mirror.to(tl.pointer_type(tl.int64)) + (entry - _HITS), total)


@triton.jit
def _end_wave(state, counters, now, begun, left, hits, misses):
    """Write the entries of the state that every wave changes."""
    old_hits, old_misses, old_waves, mirror = counters
    tl.store(state + _CLOCK, now + 1)
    tl.store(state + _BEGUN, begun)
    tl.store(state + _LEFT, tl.zeros_like(now) + left)
    _write_counter(state, mirror, _HITS, old_hits + hits)
    _write_counter(state, mirror, _WAVES, old_waves + (hits + misses > 0).to(tl.int64))
    if misses > 0:
        _write_counter(state, mirror, _MISSES, old_misses + misses)


@triton.jit
def _wanted(topk_ids, expert_map, plan, tiles, num_ids, num_global, S: tl.constexpr):
    """Which experts have slots of the routing: in a plan, the experts of its ``tiles``."""
    count = tl.full((S.EXPERTS,), 0, tl.int32)
    if plan is not None:
        of_tiles = plan + tl.load(plan + 1)
        for start in range(0, tiles, S.IDS):
            at = start + tl.arange(0, S.IDS)
            expert = tl.load(of_tiles + at, mask=at < tiles, other=-1)
            valid = (expert >= 0) & (expert < S.E)
            count += tl.histogram(tl.where(valid, expert, 0), S.EXPERTS, mask=valid)
    else:
        for start in range(0, num_ids, S.IDS):
            slot = start + tl.arange(0, S.IDS)
            expert = local_experts(topk_ids, expert_map, slot, slot < num_ids, num_global, S.E)
            count += tl.histogram(tl.maximum(expert, 0), S.EXPERTS, mask=expert >= 0)
    return (count > 0) & (tl.arange(0, S.EXPERTS) < S.E)


@triton.jit
def _rank(keys, own, S: tl.constexpr):
    """The number of experts with a smaller key than each has."""
    rank = tl.full((S.EXPERTS,), 0, tl.int32)
    for start in range(0, S.EXPERTS, S.COMPARED):
        other = start + tl.arange(0, S.COMPARED)
        key = tl.load(keys + other, mask=other < S.E, other=NEVER)
        rank += tl.sum((key[None, :] < own[:, None]).to(tl.int32), 1)
    return rank


@triton.jit
def _moved(state, slot, used, present, gains, index, S: tl.constexpr):
    """The slots of experts once all that are ``present`` have one; lists what is copied.

    All programs write the same numbers, and each reads what it has written itself.
    """
    expert = tl.arange(0, S.EXPERTS)
    loses, without = (slot >= 0) & ~present, gains & (slot < 0)
    number = tl.cumsum(without.to(tl.int32), 0) - 1
    key = tl.where(loses, used * S.K + slot, NEVER)
    tl.store(state + S.KEYS + expert, key, mask=expert < S.E)
    tl.debug_barrier()
    rank = _rank(state + S.KEYS, key, S)
    loses = loses & (rank < tl.sum(without.to(tl.int32), 0))
    tl.store(state + S.FREED + rank, slot, mask=loses)
    tl.debug_barrier()
    gained = tl.load(state + S.FREED + number, mask=without, other=-1)
    slot = tl.where(without, gained, tl.where(loses, -1, slot))
    tl.store(state + S.TARGETS + index, slot, mask=gains)
    tl.store(state + S.COPIED + index, expert.to(tl.int64), mask=gains)
    tl.debug_barrier()
    return slot


@triton.jit
def _last_to_arrive(state):
    """Whether all other programs of the weight have read the state."""
    tl.debug_barrier()
    return tl.atomic_add(state + _ARRIVED, 1, sem="acq_rel") == tl.num_programs(0) - 1


@triton.jit
def _copy_missing(table, state, count, S: tl.constexpr):
    """Copy chunks of ``count`` experts, program by program."""
    row = tl.arange(0, S.WIDE_TABLE)
    before = tl.load(table + row * _COLUMNS + 3, mask=row < S.TABLE, other=2**62)
    size = tl.load(table + row * _COLUMNS + 2, mask=row < S.TABLE, other=0)
    chunks = tl.sum((size + S.CHUNK - 1) // S.CHUNK, 0)
    for unit in range(tl.program_id(0), count * chunks, tl.num_programs(0)):
        at = state + (unit // chunks).to(tl.int32)
        _copy_chunk(table, at + S.COPIED, at + S.TARGETS, unit % chunks, before, S)
    if tl.program_id(0) == 0:
        total = tl.load(state + _BYTES) + tl.sum(size, 0) * count
        _write_counter(state, tl.load(state + _MIRROR), _BYTES, total)


@triton.jit
def _copy_chunk(table, expert, slot, chunk, before, S: tl.constexpr):
    """Copy one chunk of one expert: words of 16 bytes a thread where all addresses allow it."""
    row = tl.sum((before <= chunk).to(tl.int32), 0) - 1
    entry = table + row * _COLUMNS
    size, inside = tl.load(entry + 2), (chunk - tl.load(entry + 3)) * S.CHUNK
    source = tl.load(entry) + tl.load(expert) * size + inside
    to = tl.load(entry + 1) + tl.load(slot) * size + inside
    left = size - inside
    if ((source | to | size) & 15) == 0:
        words, word = tl.multiple_of(left // 4, 4), tl.arange(0, S.CHUNK // 4)
        read = tl.multiple_of(source.to(tl.pointer_type(tl.int32)), 16)
        write = tl.multiple_of(to.to(tl.pointer_type(tl.int32)), 16)
        tl.store(write + word, tl.load(read + word, mask=word < words), mask=word < words)
    else:
        first, target = source.to(tl.pointer_type(tl.int8)), to.to(tl.pointer_type(tl.int8))
        for start in range(0, tl.minimum(left, S.CHUNK), PIECE):
            byte = start + tl.arange(0, PIECE)
            tl.store(target + byte, tl.load(first + byte, mask=byte < left), mask=byte < left)


@triton.jit
def _decide(state, rows, entries, wanted, wave, S: tl.constexpr):
    """Write the rows of a wave, and the state once all programs have read it.

    ``entries``: the `_state_entries` of the state; ``wanted``: the `_wanted` experts. Returns the
    number of experts to copy.
    """
    slot, used, _, begun, _ = entries
    todo = wanted & ((wave == 0) | (used < begun))
    resident = todo & (slot >= 0) & (used >= 0)
    missing = todo & ~resident
    num_missing = tl.sum(missing.to(tl.int32), 0)
    if (S.MOST == S.K) & (wave == 0) & (num_missing == 0):
        _note_hits(state, rows, entries, resident, S)
        count = num_missing
    else:
        count = _gain(state, rows, entries, todo, resident, missing, num_missing, S)
    return count


@triton.jit
def _note_hits(state, rows, entries, resident, S: tl.constexpr):
    """Write the rows and the state of a first wave that copies nothing.

    No program waits for another one: what the first program changes decides nothing in such a wave.
    """
    expert = tl.arange(0, S.EXPERTS)
    slot, _, now, begun, counters = entries
    tl.store(rows + expert, tl.where(resident, slot, -1).to(tl.int32), mask=expert < S.E)
    if tl.program_id(0) == 0:
        tl.store(state + S.LAST_USE + expert, tl.zeros_like(slot) + now, mask=resident)
        _end_wave(state, counters, now, begun, 0, tl.sum(resident.to(tl.int32), 0), 0)


@triton.jit
def _gain(state, rows, entries, todo, resident, missing, num_missing, S: tl.constexpr):
    """`_decide` for a wave that may copy; returns the number of experts to copy."""
    expert = tl.arange(0, S.EXPERTS)
    inside = expert < S.E
    slot, used, now, begun, counters = entries
    if S.MOST < S.K:
        resident = resident & (tl.cumsum(resident.to(tl.int32), 0) <= S.MOST)
    index = tl.cumsum(missing.to(tl.int32), 0) - 1
    num_resident = tl.sum(resident.to(tl.int32), 0)
    count = tl.minimum(num_missing, S.MOST - num_resident)
    gains = missing & (index < count)
    present = resident | gains
    if count > 0:
        slot = _moved(state, slot, used, present, gains, index, S)
    tl.store(rows + expert, tl.where(present, slot, -1).to(tl.int32), mask=inside)
    if _last_to_arrive(state):
        tl.store(state + S.SLOT + expert, slot, mask=inside)
        tl.store(state + S.LAST_USE + expert, tl.where(present, now, used), mask=inside)
        tl.store(state + _ARRIVED, tl.full((), 0, tl.int64))
        left = tl.sum(todo.to(tl.int32), 0) - num_resident - count
        _end_wave(state, counters, now, begun, left, num_resident, count)
    return count


@triton.jit(do_not_specialize=["num_ids", "num_global", "num_entries", "wave"])
def _make_resident_kernel(
    topk_ids, expert_map, plan, map_out, plan_out, next_map, next_plan, table, state,
    num_ids, num_global, num_entries, wave, S: tl.constexpr,
):  # fmt: skip
    """Serve one wave of the weight ``program_id(1)``: rows, what GEMMs read of them, and copies."""
    take_turn()
    state += tl.program_id(1) * S.LENGTH
    entries, left = _state_entries(state, wave, S), tl.load(state + _LEFT)
    rows = state.to(tl.pointer_type(tl.int32), bitcast=True) + S.ROWS
    tiles = tl.full((), 0, tl.int32)
    if plan is not None:
        if tl.program_id(1) > 0:
            plan_out = next_plan
        tiles = planned_tiles(plan, num_entries, S.TILE)
    if map_out is not None:  # noqa: SIM102 (a constant)
        if tl.program_id(1) > 0:
            map_out = next_map
    count = tl.full((), 0, tl.int32)
    if (wave > 0) & (left == 0):
        expert = tl.arange(0, S.EXPERTS)
        tl.store(rows + expert, tl.full((S.EXPERTS,), -1, tl.int32), mask=expert < S.E)
        tl.debug_barrier()
        if plan is not None:
            write_header(plan, plan_out, 0)
    else:
        wanted = _wanted(topk_ids, expert_map, plan, tiles, num_ids, num_global, S)
        count = _decide(state, rows, entries, wanted, wave, S)
        if plan is not None:
            write_plan(plan, tiles, rows, plan_out, S.E, S.TILE, S.WIDE, S.TILES)
    if map_out is not None:
        write_map(expert_map, rows, map_out, num_global, S.E)
    if count > 0:
        _copy_missing(table + tl.program_id(1) * S.TABLE * _COLUMNS, state, count, S)


@lru_cache(maxsize=1024)
def _make_resident_launch(
    num_experts: int, num_slots: int, most: int, table_rows: int, few: bool, row_tile: int
) -> Launch:
    at, wide = StateLayout(num_experts, num_slots), next_power_of_2(num_experts)
    sizes = Sizes(
        E=num_experts,
        K=num_slots,
        MOST=most,
        EXPERTS=wide,
        COMPARED=min(16, wide, COMPARED // wide),
        IDS=FEW_IDS if few else MANY_IDS,
        SLOT=at.slot,
        LAST_USE=at.last_use,
        KEYS=at.keys,
        COPIED=at.experts,
        TARGETS=at.targets,
        FREED=at.freed,
        ROWS=2 * at.rows,
        LENGTH=at.length,
        TABLE=table_rows,
        WIDE_TABLE=next_power_of_2(table_rows),
        CHUNK=CHUNK,
        **plan_constants(row_tile),
    )
    num_warps = 4 if wide <= 128 else 8 if wide <= 512 else 16
    return Launch(_make_resident_kernel, S=sizes, num_warps=num_warps, maxnreg=REGISTERS)


def tiles_in_rows(
    owner: Residency, first: int, tiles: AnyTiles, *, overlapping: bool = False
) -> list[AnyTiles]:
    """Room for the tiles in rows of each weight from the ``first`` on.

    Args:
        owner: the slots.
        first: the number of the first weight.
        tiles: ids, expert map, and the plan if GEMMs read one.
        overlapping: whether a wave's rows are written while the GEMMs of the wave before run.
            These find their slots by the plan, and their map stays that of all experts.
    """
    plan, topk_ids, expert_map = tiles

    def of_weight(rows: Tensor) -> AnyTiles:
        mapped = rows
        if overlapping:
            mapped = expert_map
        elif expert_map is not None:
            mapped = torch.empty_like(expert_map, dtype=torch.int32)
        return None if plan is None else torch.empty_like(plan), topk_ids, mapped

    return [of_weight(rows) for rows in owner.row_maps[first:]]


def make_resident(
    owner: Residency,
    first: int,
    tiles: AnyTiles,
    row_tile: int,
    wave: int,
    out: Sequence[AnyTiles],
    *,
    most: int,
) -> None:
    """Make the experts of a wave resident.

    Args:
        owner: the slots.
        first: the number of the first weight.
        tiles: ids, expert map, and the plan if GEMMs read one.
        row_tile: the row tile of the plan.
        wave: the number of the wave.
        out: the `tiles_in_rows` of one weight or two, to write to.
        most: the most experts of a wave.
    """
    plan, topk_ids, expert_map = tiles
    plans, _, maps = zip(out[0], out[-1], strict=True)
    if expert_map is None or maps[0] is expert_map:  # rows serve as the map, or none is read
        maps = None, None
    (table, state), num_ids, weights = owner.parts[first], topk_ids.numel(), len(out)
    units = min(num_ids, most) * max(owner.chunks[first : first + weights])
    programs = max(1, min(PROGRAMS // weights, units))
    few, rows, entries = num_ids <= FEW_IDS, table.shape[1], 0 if plan is None else plan.shape[0]
    num_global = map_size(expert_map, owner.num_experts)
    _make_resident_launch(owner.num_experts, owner.num_slots, most, rows, few, row_tile)(
        (programs, weights), topk_ids, expert_map, plan, maps[0], plans[0], maps[1], plans[1],
        table, state, num_ids, num_global, entries, wave,
    )  # fmt: skip
