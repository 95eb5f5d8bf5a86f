"""Triton kernel that writes each slot's row straight into its expert's rows on another rank.

Two steps of one launch. First all ranks get the ids of all tokens: these say which row of its
expert each slot takes, since rows are in the order of ranks, tokens and slots. Then rows are
written to their places. See `moe_ops.kernels.symmetric` for windows and flags.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moe_ops.fake_impls.symmetric_batched import symmetric_send_batched as empty_sent
from moe_ops.kernels._runtime.dependent import take_turn
from moe_ops.kernels._runtime.slots import dense
from moe_ops.kernels._symmetric.flags import (
    add_left_out,
    announce,
    check_sizes,
    homes,
    part_of,
    signal,
    wait,
    wait_for_all,
    window_for,
)
from moe_ops.kernels._symmetric.rows import (
    quantized_row,
    row_of,
    row_warps,
    send_launch,
    store_row,
    store_slots,
    travel_of,
)
from moe_ops.windows import programs_of, windows_of

IDS = tl.constexpr(1024)
"""Ids that a program compares at once."""


@triton.jit
def _placed(ids, valid, placement, live, num_experts, num_local_experts, RANKS: tl.constexpr):
    """Rank and local expert of each slot; rank -1 for a slot that no expert computes.

    Ids and placement may be anything: what leads out of the ranks or their experts has no expert.
    """
    valid = valid & (ids >= 0) & (ids < num_experts)
    home = homes(ids, valid, placement, live, RANKS)
    expert = tl.load(placement + num_experts + tl.where(valid, ids, 0), mask=valid, other=-1)
    inside = (home < RANKS) & (expert >= 0) & (expert < num_local_experts)
    return tl.where(inside, home, -1), expert


@triton.jit
def _send_ids(
    topk_weights, topk_ids, placement, peers, live, token, num_tokens, rows_per_rank, num_experts,
    num_local_experts,
    RANK: tl.constexpr, RANKS: tl.constexpr, TOP_K: tl.constexpr, AT: tl.constexpr,
):  # fmt: skip
    """Write a token's ids and weights to all ranks, and return the number of slots left out.

    Ids are -1 in slots without an expert.
    """
    slot = tl.arange(0, triton.next_power_of_2(TOP_K))
    valid = (slot < TOP_K) & (token < num_tokens)
    ids = tl.load(topk_ids + token * TOP_K + slot, mask=valid, other=-1)
    weights = tl.load(topk_weights + token * TOP_K + slot, mask=valid, other=0.0)
    home, _ = _placed(ids, valid, placement, live, num_experts, num_local_experts, RANKS)
    left_out = valid & (ids >= 0) & (ids < num_experts) & (home < 0)
    ids = tl.where(home >= 0, ids, -1).to(tl.int32)
    for i in range(RANKS):
        base, source = window_for(peers, (RANK + i) % RANKS, live, RANK)
        at = (source * rows_per_rank + token) * TOP_K + slot
        store_slots(base, at, tl.where(source == RANK, ids, -1), weights, slot < TOP_K, AT)
    return tl.sum(left_out.to(tl.int32), 0)


@triton.jit
def _places(all_ids, ids, first, TOP_K: tl.constexpr):
    """Number of earlier slots of the same expert, for the slots of a token from ``first`` on."""
    slot = tl.arange(0, triton.next_power_of_2(TOP_K))
    place = tl.zeros_like(slot)
    for at in range(0, first + TOP_K, IDS):
        other = at + tl.arange(0, IDS)
        earlier = tl.load(all_ids + other, mask=other < first + TOP_K, other=-1)
        before = other[None, :] < (first + slot)[:, None]
        place += tl.sum(((earlier[None, :] == ids[:, None]) & before).to(tl.int32), 1)
    return place


@triton.jit
def _count_slots(all_ids, expert, num_slots):
    """Number of slots of an expert."""
    count = tl.zeros((IDS,), dtype=tl.int32)
    for at in range(0, num_slots, IDS):
        other = at + tl.arange(0, IDS)
        experts = tl.load(all_ids + other, mask=other < num_slots, other=-1)
        count += (experts == expert).to(tl.int32)
    return tl.sum(count, 0)


@triton.jit
def _send_rows(
    x, scale, topk_weights, placement, peers, live, all_ids, token, rows_per_rank, num_experts,
    num_local_experts,
    RANK: tl.constexpr, RANKS: tl.constexpr, TOP_K: tl.constexpr, HOW: tl.constexpr,
    AT: tl.constexpr,
):  # fmt: skip
    """Quantize a token and write a row for each of its slots to the slot's expert."""
    WIDTH: tl.constexpr = HOW.width
    TILE: tl.constexpr = HOW.tile
    RULE: tl.constexpr = HOW.rule
    GIVEN: tl.constexpr = HOW.static
    ROW_TYPE: tl.constexpr = HOW.row_type
    SCALE_TYPE: tl.constexpr = HOW.scale_type
    SCALES: tl.constexpr = HOW.scales
    slot = tl.arange(0, triton.next_power_of_2(TOP_K))
    first, room = (RANK * rows_per_rank + token) * TOP_K, RANKS * rows_per_rank
    ids = tl.load(all_ids + first + slot, mask=slot < TOP_K, other=-1)
    place = _places(all_ids, ids, first, TOP_K)
    valid = place < room
    home, expert = _placed(ids, valid, placement, live, num_experts, num_local_experts, RANKS)
    to_row = tl.where(home >= 0, expert.to(tl.int64) * room + place, 0)
    value = row_of(x, token, topk_weights, tl.max(home, 0) >= 0, WIDTH, TILE, False)
    for j in range(TOP_K):
        this = slot == j
        rank = tl.max(tl.where(this, home, -1), 0)
        row = tl.sum(tl.where(this, to_row, 0), 0)
        stored = value
        if HOW.on_input:
            weight = tl.load(topk_weights + token * TOP_K + j).to(tl.float32)
            stored = value.to(tl.float32) * weight
        if RULE is not None:
            stored, own = quantized_row(stored, scale, RULE, GIVEN)
        base = tl.load(peers + tl.maximum(rank, 0))
        rows = part_of(base, AT.rows, ROW_TYPE)
        store_row(rows, row, stored, rank >= 0, WIDTH, RULE)
        if SCALES > 0:
            group = tl.arange(0, TILE[0])
            to = part_of(base, AT.scales, SCALE_TYPE) + row * SCALES + group
            tl.store(to, own.to(SCALE_TYPE), mask=(rank >= 0) & (group < SCALES))


@triton.jit
def _local_facts(
    scale, placement, live, held, row_scale, counts, dropped, local_ids, all_ids,
    room, num_experts, num_local_experts,
    RANK: tl.constexpr, RANKS: tl.constexpr, TOP_K: tl.constexpr,
):  # fmt: skip
    """Write the counts of this rank's experts, and the local experts of all tokens."""
    program, step = tl.program_id(0), tl.num_programs(0)
    slot = tl.arange(0, triton.next_power_of_2(TOP_K))
    for i in range(0, (num_local_experts - program + step - 1) // step):
        row = program + i * step
        expert = tl.load(held + row)
        count = tl.where(expert >= 0, _count_slots(all_ids, expert, room * TOP_K), 0)
        tl.store(counts + row, tl.minimum(count, room))
        tl.store(dropped + row, tl.maximum(count - room, 0))
        if row_scale is not None:
            tl.store(row_scale + row, tl.load(scale).to(tl.float32))
    for i in range(0, (room - program + step - 1) // step):
        at = (program + i * step) * TOP_K + slot
        ids = tl.load(all_ids + at, mask=slot < TOP_K, other=-1)
        valid = ids >= 0
        home, expert = _placed(ids, valid, placement, live, num_experts, num_local_experts, RANKS)
        tl.store(local_ids + at, tl.where(home == RANK, expert, -1), mask=slot < TOP_K)


@triton.jit(do_not_specialize=["num_tokens", "rows_per_rank", "num_experts", "num_local_experts"])
def _send_batched_kernel(
    x, scale, topk_weights, topk_ids, placement, held, peers, state, live,
    row_scale, counts, dropped, local_ids,
    num_tokens, rows_per_rank, num_experts, num_local_experts, timeout,
    RANK: tl.constexpr, RANKS: tl.constexpr, TOP_K: tl.constexpr, HOW: tl.constexpr,
    AT: tl.constexpr,
):  # fmt: skip
    """Send ids; then quantize this rank's tokens, and write a row for each of their slots."""
    take_turn()
    program, step = tl.program_id(0), tl.num_programs(0)
    steps = tl.load(state + program)
    all_ids = part_of(tl.load(peers + RANK), AT.ids, tl.int32)
    left_out = tl.zeros((), dtype=tl.int32)
    for i in range(0, (rows_per_rank - program + step - 1) // step):
        left_out += _send_ids(
            topk_weights, topk_ids, placement, peers, live, program + i * step, num_tokens,
            rows_per_rank, num_experts, num_local_experts, RANK, RANKS, TOP_K, AT,
        )  # fmt: skip
    add_left_out(live, left_out, RANKS)
    announce(peers, live, rows_per_rank, program, RANK, RANKS, AT)
    signal(peers, live, AT.sent, program, steps + 1, RANK, RANKS)
    wait_for_all(peers, live, AT.sent, step, steps + 1, state, timeout, RANK, RANKS)
    for i in range(0, (num_tokens - program + step - 1) // step):
        _send_rows(
            x, scale, topk_weights, placement, peers, live, all_ids, program + i * step,
            rows_per_rank, num_experts, num_local_experts, RANK, RANKS, TOP_K, HOW, AT,
        )  # fmt: skip
    signal(peers, live, AT.sent, program, steps + 2, RANK, RANKS)
    _local_facts(
        scale, placement, live, held, row_scale, counts, dropped, local_ids, all_ids,
        RANKS * rows_per_rank, num_experts, num_local_experts, RANK, RANKS, TOP_K,
    )  # fmt: skip
    if program == 0:
        check_sizes(peers, AT.sizes, rows_per_rank, state, RANK, RANKS)
    wait(peers, live, AT.sent, program, steps + 2, state, timeout, RANK, RANKS)
    tl.store(state + program, steps + 2)


def symmetric_send_batched(
    x: Tensor,
    scale: Tensor | None,
    topk_weights: Tensor,
    topk_ids: Tensor,
    placement: Tensor,
    held: Tensor,
    peers: Tensor,
    state: Tensor,
    rows_per_rank: int,
    on_input: bool,
    quant: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """One launch; rows, scales and weights are views of this rank's window."""
    out = empty_sent(
        x,
        scale,
        topk_weights,
        topk_ids,
        placement,
        held,
        peers,
        state,
        rows_per_rank,
        on_input,
        quant,
    )
    windows = windows_of(peers)
    (rows, row_scale, counts, dropped, local_ids, _), top_k = out, topk_ids.shape[1]
    rows, row_scale, weights, _ = windows.arrived(rows, row_scale, top_k, quant)
    own = None if scale is None else (1, scale.dtype)
    travel = travel_of(x.shape[1], x.dtype, quant, own, on_input)
    where, num_warps = (windows.rank, windows.layout), max(4, row_warps(travel.width))
    kernel = send_launch(_send_batched_kernel, where, top_k, travel, num_warps)
    kernel(
        (programs_of(rows_per_rank),),
        x.contiguous(),
        dense(scale),
        dense(topk_weights),
        dense(topk_ids),
        dense(placement),
        held,
        peers,
        state,
        windows.live,
        row_scale if quant and not travel.scales else None,
        counts,
        dropped,
        local_ids,
        x.shape[0],
        rows_per_rank,
        placement.shape[1],
        held.shape[0],
        windows.timeout_ns,
    )
    return rows, row_scale, counts, dropped, local_ids, weights
