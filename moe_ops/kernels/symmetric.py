"""Triton kernels that exchange rows through windows: one that sends tokens, one that returns sums.

Every rank launches the same number of programs. Program p of a rank takes the tokens p, p + step,
.. of each rank, and depends on the programs p of other ranks only. It writes to their windows, sets
its flag in each of them, and waits for the flags of all ranks in its own window. A flag is the
number of steps that the program has completed in all calls, which it keeps in device memory, so
graphs may be replayed at will.

A window needs no second buffer. Sends and returns alternate: whoever sends again has completed a
return, for which every rank had to finish reading its window of the send before; and likewise for
returns.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_ops.fake_impls.symmetric import symmetric_return as empty_returned
from moe_ops.fake_impls.symmetric import symmetric_send as empty_sent
from moe_ops.kernels._runtime.dependent import take_turn
from moe_ops.kernels._runtime.launch import Launch
from moe_ops.kernels._runtime.slots import dense
from moe_ops.kernels._symmetric.flags import (
    FAILED_AT,
    STRIDE,
    add_left_out,
    announce,
    check_sizes,
    goes_to,
    homes,
    part_of,
    signal,
    wait,
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
from moe_ops.kernels._symmetric.sums import (
    PACE,
    Pace,
    add_sums,
    find_rows,
    returned_of,
    warps_of,
    write_sums,
)
from moe_ops.windows import Parts, programs_of, windows_of


@triton.jit
def _slots_sent(
    topk_weights, topk_ids, expert_ranks, live, token, num_tokens, num_experts,
    RANKS: tl.constexpr, TOP_K: tl.constexpr,
):  # fmt: skip
    """Ids, weights and `homes` of a token's slots, and how many of them are left out."""
    slot = tl.arange(0, triton.next_power_of_2(TOP_K))
    valid = (slot < TOP_K) & (token < num_tokens)
    ids = tl.load(topk_ids + token * TOP_K + slot, mask=valid, other=-1)
    weights = tl.load(topk_weights + token * TOP_K + slot, mask=valid, other=0.0)
    valid = valid & (ids >= 0) & (ids < num_experts)
    home = homes(ids, valid, expert_ranks, live, RANKS)
    return ids, weights, home, tl.sum((valid & (home < 0)).to(tl.int32), 0)


@triton.jit(do_not_specialize=["num_tokens", "rows_per_rank", "num_experts"])
def _send_kernel(
    x, scale, topk_weights, topk_ids, expert_ranks, peers, state, live, row_scale,
    num_tokens, rows_per_rank, num_experts, timeout,
    RANK: tl.constexpr, RANKS: tl.constexpr, TOP_K: tl.constexpr, HOW: tl.constexpr,
    AT: tl.constexpr,
):  # fmt: skip
    """Quantize this rank's tokens and write each to the ranks of its experts; ids go to all.

    The next token's row is on its way while a row is written.
    """
    WIDTH: tl.constexpr = HOW.width
    TILE: tl.constexpr = HOW.tile
    SCALES: tl.constexpr = HOW.scales
    RULE: tl.constexpr = HOW.rule
    GIVEN: tl.constexpr = HOW.static
    ON_INPUT: tl.constexpr = HOW.on_input
    ROW_TYPE: tl.constexpr = HOW.row_type
    SCALE_TYPE: tl.constexpr = HOW.scale_type
    take_turn()
    program, step = tl.program_id(0), tl.num_programs(0)
    steps = tl.load(state + program) + 1
    slot = tl.arange(0, triton.next_power_of_2(TOP_K))
    group = tl.arange(0, triton.next_power_of_2(SCALES) if SCALES > 0 else 1)
    there = program < num_tokens
    left_out = tl.zeros((), dtype=tl.int32)
    ahead = row_of(x, program, topk_weights, there, WIDTH, TILE, ON_INPUT)
    for i in range(0, (rows_per_rank - program + step - 1) // step):
        token = program + i * step
        value, there = ahead, token + step < num_tokens
        ahead = row_of(x, token + step, topk_weights, there, WIDTH, TILE, ON_INPUT)
        ids, weights, home, without = _slots_sent(
            topk_weights, topk_ids, expert_ranks, live, token, num_tokens, num_experts,
            RANKS, TOP_K,
        )  # fmt: skip
        left_out += without
        routed = tl.max(home, 0) >= 0
        ids = tl.where(home >= 0, ids, -1).to(tl.int32)
        if RULE is not None:
            value, own = quantized_row(value, scale, RULE, GIVEN)
        elif SCALES > 0:
            here = routed & (group < SCALES)
            own = tl.load(scale + token.to(tl.int64) * SCALES + group, mask=here, other=0)
        row = (RANK * rows_per_rank + token).to(tl.int64)
        for j in range(RANKS):
            rank = (RANK + j) % RANKS
            base, source = window_for(peers, rank, live, RANK)
            at = (source * rows_per_rank + token).to(tl.int64) * TOP_K + slot
            there_ids = tl.where(source == RANK, ids, -1)
            store_slots(base, at, there_ids, weights, slot < TOP_K, AT)
            sent = goes_to(home, rank, expert_ranks is None)
            store_row(part_of(base, AT.rows, ROW_TYPE), row, value, sent, WIDTH, RULE)
            if SCALES > 0:
                to = part_of(base, AT.scales, SCALE_TYPE) + row * SCALES + group
                tl.store(to, own.to(SCALE_TYPE), mask=sent & (group < SCALES))
    if row_scale is not None:
        tl.store(row_scale, tl.load(scale).to(tl.float32), mask=program == 0)
    add_left_out(live, left_out, RANKS)
    announce(peers, live, rows_per_rank, program, RANK, RANKS, AT)
    signal(peers, live, AT.sent, program, steps, RANK, RANKS)
    wait(peers, live, AT.sent, program, steps, state, timeout, RANK, RANKS)
    if program == 0:
        check_sizes(peers, AT.sizes, rows_per_rank, state, RANK, RANKS)
    tl.store(state + program, steps)


@triton.jit(do_not_specialize=["rows_per_rank", "num_experts"])
def _return_kernel(
    sums, expert_ranks, peers, state, live, out, rows_per_rank, num_experts, timeout,
    RANK: tl.constexpr, RANKS: tl.constexpr, TOP_K: tl.constexpr, WIDTH: tl.constexpr,
    TILE: tl.constexpr, AT: tl.constexpr,
):  # fmt: skip
    """Half of the programs write partial sums to their tokens' ranks, half add what arrives.

    Both take some tokens of each rank at a time, so that links and memory are busy together.
    """
    take_turn()
    step = tl.num_programs(0) // 2
    program = tl.program_id(0) % step
    done = tl.load(state + STRIDE + program)
    pieces = (rows_per_rank + step * TILE.rows - 1) // (step * TILE.rows)
    if tl.program_id(0) < step:
        for piece in range(0, pieces):
            if RANKS > 1:
                write_sums(
                    sums, expert_ranks, peers, live, program + piece * TILE.rows * step, step,
                    rows_per_rank, num_experts, RANK, RANKS, TOP_K, WIDTH, TILE, AT,
                )  # fmt: skip
            signal(peers, live, AT.returned, program, done + piece + 1, RANK, RANKS)
    else:
        own = tl.load(peers + RANK)
        for piece in range(0, pieces):
            first = program + piece * TILE.rows * step
            words = find_rows(
                own, first, step, rows_per_rank, expert_ranks, live, num_experts,
                RANKS, RANK, RANKS, TOP_K, TILE, AT,
            )  # fmt: skip
            flag = done + piece + 1
            wait(peers, live, AT.returned, program, flag, state, timeout, RANK, RANKS)
            failed = tl.load(state + FAILED_AT, volatile=True) != 0
            add_sums(
                sums, peers, out, words, first, step, rows_per_rank, failed,
                RANK, RANKS, WIDTH, TILE, AT,
            )  # fmt: skip
        tl.store(state + STRIDE + program, done + pieces)


@lru_cache(maxsize=1024)
def _return_launch(
    rank: int, ranks: int, parts: Parts, top_k: int, width: int, dtype: torch.dtype, pace: Pace
) -> Launch:
    tile = returned_of(ranks, width, dtype, pace)
    return Launch(
        _return_kernel,
        RANK=rank,
        RANKS=ranks,
        num_warps=warps_of(tile, pace),
        TOP_K=top_k,
        WIDTH=width,
        TILE=tile,
        AT=parts,
    )


def symmetric_send(
    x: Tensor,
    scale: Tensor | None,
    topk_weights: Tensor,
    topk_ids: Tensor,
    expert_ranks: Tensor | None,
    peers: Tensor,
    state: Tensor,
    rows_per_rank: int,
    num_experts: int,
    on_input: bool,
    quant: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One launch; the results are views of this rank's window."""
    empty = empty_sent(
        x,
        scale,
        topk_weights,
        topk_ids,
        expert_ranks,
        peers,
        state,
        rows_per_rank,
        num_experts,
        on_input,
        quant,
    )
    windows, top_k = windows_of(peers), topk_ids.shape[1]
    arrived = windows.arrived(empty[0], empty[1], top_k, quant)
    if x.itemsize == 1:
        x = x.view(torch.uint8)
    if scale is not None and scale.itemsize == 1:
        scale = scale.view(torch.uint8)
    own = None if scale is None else (1 if quant else scale.shape[1], scale.dtype)
    travel = travel_of(x.shape[1], x.dtype, quant, own, on_input)
    where = windows.rank, windows.layout
    kernel = send_launch(_send_kernel, where, top_k, travel, row_warps(travel.width))
    kernel(
        (programs_of(rows_per_rank),),
        x.contiguous(),
        dense(scale),
        dense(topk_weights),
        dense(topk_ids),
        dense(expert_ranks),
        peers,
        state,
        windows.live,
        arrived[1] if quant and not travel.scales else None,
        x.shape[0],
        rows_per_rank,
        num_experts,
        windows.timeout_ns,
    )
    return arrived


def symmetric_return(
    sums: Tensor,
    expert_ranks: Tensor | None,
    peers: Tensor,
    state: Tensor,
    top_k: int,
) -> Tensor:
    """One launch."""
    out = empty_returned(sums, expert_ranks, peers, state, top_k)
    windows, (rows, width) = windows_of(peers), out.shape
    layout = windows.layout
    layout.check_room("sums", rows, top_k, width * sums.itemsize)
    where = windows.rank, layout.ranks, layout.parts
    kernel = _return_launch(*where, top_k, width, sums.dtype, PACE)
    num_experts = 0 if expert_ranks is None else expert_ranks.shape[0]
    sums, placement = sums.contiguous(), dense(expert_ranks)
    kernel(
        (2 * programs_of(rows),),
        sums,
        placement,
        peers,
        state,
        windows.live,
        out,
        rows,
        num_experts,
        windows.timeout_ns,
    )
    return out
