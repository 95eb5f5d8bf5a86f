"""Kernels for experts in host memory: one decides which experts get which slots, one copies them.

The copy kernel reads host memory by addresses in a table on the device, and how many experts there
are to copy from the state. So neither the host nor a graph knows what a call copies.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_ops.dispatch.tiles import cdiv
from moe_ops.fake_impls import residency as fakes
from moe_ops.kernels import expert_product as products
from moe_ops.kernels._runtime.dependent import take_turn
from moe_ops.kernels._runtime.launch import Launch
from moe_ops.kernels._runtime.slots import dense, local_experts, map_size, next_power_of_2
from moe_ops.kernels.weight_and_reduce import moe_fused_mul_sum
from moe_ops.residency.slots import CHUNK, Residency, Waves, residency_of
from moe_ops.residency.state import (
    BYTES,
    CLOCK,
    HEADER,
    HITS,
    MIRROR,
    MISSES,
    MISSING,
    RESIDENT,
    WAVES,
    StateLayout,
    waves_of,
)
from moe_ops.tensors import AnyTiles, ExpertWeight

BLOCK = 1024
"""Ids that the deciding program reads at once."""
COMPARED = 16
"""Slots that are ranked against all others at once."""
PROGRAMS = 256
"""The most programs that copy."""
PIECE = tl.constexpr(2048)
"""Bytes that a program copies at once where addresses or sizes are odd."""
NEVER = tl.constexpr(2**62)
"""The last use of a slot whose expert is wanted: it is no victim."""
_CLOCK = tl.constexpr(CLOCK)
_HITS = tl.constexpr(HITS)
_MISSES = tl.constexpr(MISSES)
_BYTES = tl.constexpr(BYTES)
_WAVES = tl.constexpr(WAVES)
_MIRROR = tl.constexpr(MIRROR)
_RESIDENT = tl.constexpr(RESIDENT)
_MISSING = tl.constexpr(MISSING)
_HELD = tl.constexpr(HEADER)


@triton.jit
def _add_to(state, mirror, entry, more):
    """Add to a counter, and to the copy of it that the host reads."""
    total = tl.load(state + entry) + more
    tl.store(state + entry, total)
    if mirror != 0:
        tl.store(mirror.to(tl.pointer_type(tl.int64)) + (entry - _HITS), total)


@triton.jit
def _wanted(
    topk_ids, expert_map, num_ids, num_global, num_experts, EXPERTS: tl.constexpr, IDS: tl.constexpr
):
    """Which experts have slots of the routing."""
    count = tl.zeros((EXPERTS,), tl.int32)
    for start in range(0, num_ids, IDS):
        slot = start + tl.arange(0, IDS)
        expert = local_experts(topk_ids, expert_map, slot, slot < num_ids, num_global, num_experts)
        count += tl.histogram(tl.maximum(expert, 0), EXPERTS, mask=expert >= 0)
    return (count > 0) & (tl.arange(0, EXPERTS) < num_experts)


@triton.jit
def _rank(keys, num_slots, SLOTS: tl.constexpr, COMPARED: tl.constexpr):
    """For each slot the number of slots with a smaller key, or the same key and a lower number."""
    slot = tl.arange(0, SLOTS)
    own = tl.load(keys + slot, mask=slot < num_slots, other=NEVER)
    rank = tl.zeros((SLOTS,), tl.int32)
    for start in range(0, SLOTS, COMPARED):
        other = start + tl.arange(0, COMPARED)
        key = tl.load(keys + other, mask=other < num_slots, other=NEVER)
        same = (key[None, :] == own[:, None]) & (other[None, :] < slot[:, None])
        rank += tl.sum(((key[None, :] < own[:, None]) | same).to(tl.int32), 1)
    return rank


@triton.jit
def _assign(
    experts, targets, pending, in_slot, used, kept, missing, number, index, free,
    K: tl.constexpr, EXPERTS: tl.constexpr, SLOTS: tl.constexpr, COMPARED: tl.constexpr,
):  # fmt: skip
    """Write the missing experts and the slots that they get; ``pending`` gets the old experts."""
    expert, slot = tl.arange(0, EXPERTS), tl.arange(0, SLOTS)
    is_slot = slot < K
    key = tl.where(in_slot < 0, -1, used)
    tl.store(pending + slot, tl.where(kept, NEVER, key), mask=is_slot)
    tl.debug_barrier()
    rank = _rank(pending, K, SLOTS, COMPARED)
    tl.debug_barrier()
    tl.store(targets + rank, slot.to(tl.int64), mask=is_slot & (rank < free))
    later = missing & (number >= K)
    tl.store(targets + index, (number % K).to(tl.int64), mask=later)
    tl.store(experts + index, expert.to(tl.int64), mask=missing)
    tl.store(pending + slot, in_slot, mask=is_slot)
    tl.debug_barrier()


@triton.jit
def _count_call(state, now, num_resident, num_missing, K: tl.constexpr):
    """Write the numbers of the call, and add them to the counters."""
    mirror = tl.load(state + _MIRROR)
    tl.store(state + _CLOCK, now + 1)
    tl.store(state + _RESIDENT, num_resident.to(tl.int64))
    tl.store(state + _MISSING, num_missing.to(tl.int64))
    _add_to(state, mirror, _HITS, num_resident)
    _add_to(state, mirror, _MISSES, num_missing)
    _add_to(state, mirror, _WAVES, (num_resident + num_missing + K - 1) // K)


@triton.jit(do_not_specialize=["num_ids"])
def _make_resident_kernel(
    topk_ids, expert_map, state, num_ids, num_global,
    E: tl.constexpr, K: tl.constexpr, EXPERTS: tl.constexpr, SLOTS: tl.constexpr,
    IDS: tl.constexpr, COMPARED: tl.constexpr,
):  # fmt: skip
    """One program decides: see `reference/residency.py`. Parts of the state serve as scratch."""
    take_turn()
    held, last_use, pending = state + _HELD, state + _HELD + K, state + _HELD + 2 * K
    place = state + _HELD + 3 * K
    experts, targets = place + E, place + 2 * E
    expert, slot = tl.arange(0, EXPERTS), tl.arange(0, SLOTS)
    is_expert, is_slot = expert < E, slot < K
    wanted = _wanted(topk_ids, expert_map, num_ids, num_global, E, EXPERTS, IDS)
    in_slot = tl.load(held + slot, mask=is_slot, other=-1)
    used = tl.load(last_use + slot, mask=is_slot, other=0)
    now = tl.load(state + _CLOCK)

    tl.store(place + expert, tl.full((EXPERTS,), -1, tl.int64), mask=is_expert)
    tl.store(experts + expert, wanted.to(tl.int64), mask=is_expert)
    tl.debug_barrier()
    tl.store(place + in_slot, slot.to(tl.int64), mask=in_slot >= 0)
    kept = tl.load(experts + in_slot, mask=in_slot >= 0, other=0) != 0
    tl.debug_barrier()
    slot_of = tl.load(place + expert, mask=is_expert, other=-1)
    missing = wanted & (slot_of < 0)
    num_missing = tl.sum(missing.to(tl.int32), 0)
    num_resident = tl.sum(wanted.to(tl.int32), 0) - num_missing
    index = tl.cumsum(missing.to(tl.int32), 0) - 1
    number = num_resident + index  # of missing experts
    if num_missing > 0:
        free = tl.minimum(num_missing, K - num_resident)  # missing experts of the first wave
        _assign(
            experts, targets, pending, in_slot, used, kept, missing, number, index, free,
            K, EXPERTS, SLOTS, COMPARED,
        )  # fmt: skip
    target = tl.load(targets + index, mask=missing, other=0)
    at = tl.where(missing, number // K * K + target, tl.where(wanted, slot_of, -1))
    tl.store(place + expert, at, mask=is_expert)
    if num_missing > 0:
        # The number that has the same slot next, if there is one.
        following = tl.where(number < K, K + target, number + K)
        ends_there = missing & (following >= num_resident + num_missing)
        tl.store(pending + target, expert.to(tl.int64), mask=ends_there)
        tl.debug_barrier()
        then = tl.load(pending + slot, mask=is_slot, other=-1)
        tl.store(held + slot, tl.where(then == in_slot, in_slot, -1), mask=is_slot)
        used = tl.where(then == in_slot, used, now)
    tl.store(last_use + slot, tl.where(kept, now, used), mask=is_slot)
    _count_call(state, now, num_resident, num_missing, K)


@triton.jit(do_not_specialize=["wave"])
def _copy_experts_kernel(
    table, state, wave,
    E: tl.constexpr, K: tl.constexpr, EXPERTS: tl.constexpr, SLOTS: tl.constexpr,
    ROWS: tl.constexpr, WIDE_ROWS: tl.constexpr, LAST: tl.constexpr, AT_ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Copy chunks of missing experts, program by program; the first one also finishes the state."""
    take_turn()
    held, pending = state + _HELD, state + _HELD + 2 * K
    place = state + _HELD + 3 * K
    experts, targets = place + E, place + 2 * E
    resident = tl.load(state + _RESIDENT).to(tl.int32)
    missing = tl.load(state + _MISSING).to(tl.int32)
    first = tl.maximum(0, wave * K - resident)
    count = tl.maximum(0, tl.minimum(missing, (wave + 1) * K - resident) - first)
    row = tl.arange(0, WIDE_ROWS)
    before = tl.load(table + row * 4 + 3, mask=row < ROWS, other=2**62)
    base = tl.load(table + 3)
    size = tl.load(table + row * 4 + 2, mask=row < ROWS, other=0)
    chunks = tl.sum((size + CHUNK - 1) // CHUNK, 0)
    for unit in range(tl.program_id(0), count * chunks, tl.num_programs(0)):
        which = first + (unit // chunks).to(tl.int32)
        chunk = base + unit % chunks
        _copy_chunk(table, experts + which, targets + which, chunk, before, CHUNK)
    if tl.program_id(0) == 0:
        expert, slot = tl.arange(0, EXPERTS), tl.arange(0, SLOTS)
        at = tl.load(place + expert, mask=expert < E, other=-1).to(tl.int32)
        rows = tl.where((at >= 0) & (at // K == wave), at % K, -1)
        to = (state + AT_ROWS).to(tl.pointer_type(tl.int32), bitcast=True)
        tl.store(to + expert, rows, mask=expert < E)
        if LAST and missing > 0:
            then = tl.load(pending + slot, mask=slot < K, other=-1)
            tl.store(held + slot, then, mask=slot < K)
        _add_to(state, tl.load(state + _MIRROR), _BYTES, tl.sum(size, 0) * count)


@triton.jit
def _copy_chunk(table, expert, slot, chunk, before, CHUNK: tl.constexpr):
    """Copy one chunk of one expert: words of 16 bytes a thread where all addresses allow it."""
    row = tl.sum((before <= chunk).to(tl.int32), 0) - 1
    entry = table + row * 4
    size, inside = tl.load(entry + 2), (chunk - tl.load(entry + 3)) * CHUNK
    source = tl.load(entry) + tl.load(expert) * size + inside
    to = tl.load(entry + 1) + tl.load(slot) * size + inside
    left = size - inside
    if ((source | to | size) & 15) == 0:
        words, word = tl.multiple_of(left // 4, 4), tl.arange(0, CHUNK // 4)
        read = tl.multiple_of(source.to(tl.pointer_type(tl.int32)), 16)
        write = tl.multiple_of(to.to(tl.pointer_type(tl.int32)), 16)
        tl.store(write + word, tl.load(read + word, mask=word < words), mask=word < words)
    else:
        first, target = source.to(tl.pointer_type(tl.int8)), to.to(tl.pointer_type(tl.int8))
        for start in range(0, tl.minimum(left, CHUNK), PIECE):
            byte = start + tl.arange(0, PIECE)
            tl.store(target + byte, tl.load(first + byte, mask=byte < left), mask=byte < left)


@lru_cache(maxsize=1024)
def _decide_launch(experts: int, slots: int) -> Launch:
    wide = next_power_of_2(slots)
    return Launch(
        _make_resident_kernel, E=experts, K=slots, EXPERTS=next_power_of_2(experts), SLOTS=wide,
        IDS=BLOCK, COMPARED=min(COMPARED, wide), num_warps=8,
    )  # fmt: skip


@lru_cache(maxsize=1024)
def _copy_launch(experts: int, slots: int, rows: int, last: bool) -> Launch:
    return Launch(
        _copy_experts_kernel, E=experts, K=slots, EXPERTS=next_power_of_2(experts),
        SLOTS=next_power_of_2(slots), ROWS=rows, WIDE_ROWS=next_power_of_2(rows), LAST=last,
        AT_ROWS=StateLayout(experts, slots).rows, CHUNK=CHUNK, num_warps=4,
    )  # fmt: skip


def make_resident(
    topk_ids: Tensor,
    expert_map: Tensor | None,
    state: Tensor,
    num_experts: int,
    num_slots: int,
) -> None:
    """Launch one program."""
    fakes.make_resident(topk_ids, expert_map, state, num_experts, num_slots)
    num_global = map_size(expert_map, num_experts)
    ids, launch = topk_ids.contiguous(), _decide_launch(num_experts, num_slots)
    launch((1,), ids, dense(expert_map), state, ids.numel(), num_global)


def copy_experts(
    table: Tensor, state: Tensor, num_experts: int, num_slots: int, wave: int, last: bool
) -> None:
    """Launch as many programs as the wave may have chunks, up to `PROGRAMS`."""
    fakes.copy_experts(table, state, num_experts, num_slots, wave, last)
    owner = residency_of(table)[0]
    chunks = sum(cdiv(x.shape[1:].numel() * x.itemsize, CHUNK) for x, _ in owner.pairs_of(table))
    grid = (min(PROGRAMS, num_slots * chunks),)
    _copy_launch(num_experts, num_slots, len(table), last)(grid, table, state, wave)


_DECIDE_AND_COPY = Waves(make_resident, copy_experts)


def host_product(
    a: Tensor,
    a_scale: Tensor | None,
    table: Tensor,
    state: Tensor,
    topk_weights: Tensor | None,
    tiles: AnyTiles,
    top_k: int,
    num_rows: int,
    out_dtype: torch.dtype,
    activation: str = "",
    expert_order: bool = False,
    batch_invariant: bool = False,
) -> Tensor:
    """Launch for each wave the copy, and the kernel that the plan of all experts chooses."""
    owner = residency_of(table)[0]
    settings = {
        "top_k": top_k,
        "out_dtype": out_dtype,
        "activation": activation,
        "expert_order": expert_order,
        "batch_invariant": batch_invariant,
    }
    out = fakes.host_product(
        a, a_scale, table, state, topk_weights, tiles, num_rows=num_rows, **settings
    )

    def multiply(weight: ExpertWeight) -> None:
        products.expert_product(
            a, a_scale, weight, topk_weights, tiles, scheme=owner.scheme, **settings, out=out
        )

    _wait_for_other_stream(owner, a)
    _DECIDE_AND_COPY.run(table, state, tiles, multiply)
    return out


def host_product_sum(
    a: Tensor,
    a_scale: Tensor | None,
    table: Tensor,
    state: Tensor,
    topk_weights: Tensor | None,
    tiles: AnyTiles,
    num_rows: int,
    out_dtype: torch.dtype,
    expert_order: bool = False,
    batch_invariant: bool = False,
) -> Tensor:
    """Run the kernel that also sums for one token, which one wave serves; else product and sum."""
    owner = residency_of(table)[0]
    _, topk_ids, expert_map = tiles
    settings = {
        "out_dtype": out_dtype,
        "expert_order": expert_order,
        "batch_invariant": batch_invariant,
    }
    sizes = (owner.num_experts, owner.num_slots)
    if topk_ids is None or topk_ids.shape[0] != 1 or waves_of(*sizes, topk_ids.numel()) > 1:
        y = host_product(a, a_scale, table, state, None, tiles, 1, num_rows, **settings)
        return moe_fused_mul_sum(y, topk_weights, topk_ids, expert_map, None, owner.num_experts)
    out: list[Tensor] = []

    def multiply(weight: ExpertWeight) -> None:
        out.append(
            products.expert_product_sum(
                a, a_scale, weight, topk_weights, tiles, owner.scheme, **settings
            )
        )

    _wait_for_other_stream(owner, a)
    _DECIDE_AND_COPY.run(table, state, tiles, multiply)
    return out[0]


def _wait_for_other_stream(owner: Residency, x: Tensor) -> None:
    """Let the current stream wait for the stream of the call before, which uses the same slots.

    Calls that are captured wait for nothing: whoever replays them orders the replays.
    """
    if not x.is_cuda:
        return
    stream = triton.runtime.driver.active.get_current_stream(x.get_device())
    before = owner.stream
    if before is None:
        owner.stream = stream
    elif before != stream and not torch.cuda.is_current_stream_capturing():
        owner.stream = stream
        default = torch.cuda.default_stream(x.device)
        other = torch.cuda.ExternalStream(before, x.device) if before else default
        torch.cuda.current_stream(x.device).wait_stream(other)
