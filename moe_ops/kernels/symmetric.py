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
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_ops.fake_impls.symmetric import symmetric_return as empty_returned
from moe_ops.fake_impls.symmetric import symmetric_send as empty_sent
from moe_ops.kernels._runtime.dependent import take_turn
from moe_ops.kernels._runtime.launch import Launch
from moe_ops.kernels._runtime.slots import dense, next_power_of_2
from moe_ops.kernels._symmetric.flags import (
    FAILED_AT,
    STRIDE,
    announce,
    check_sizes,
    goes_to,
    homes,
    homes_of,
    part_of,
    signal,
    wait,
)
from moe_ops.kernels._symmetric.rows import (
    quantized,
    row_of,
    send_launch,
    store_row,
    store_slots,
    travel_of,
    warps,
)
from moe_ops.windows import Parts, programs_of, windows_of

RETURNED_ROWS = 8
"""Tokens of each rank that a program returns before it says so."""
RETURNED = 8192
"""Numbers that a program returns at once."""


@triton.jit(do_not_specialize=["num_tokens", "rows_per_rank", "num_experts"])
def _send_kernel(
    x, scale, topk_weights, topk_ids, expert_ranks, peers, state, row_scale,
    num_tokens, rows_per_rank, num_experts, timeout,
    RANK: tl.constexpr, RANKS: tl.constexpr, TOP_K: tl.constexpr, HOW: tl.constexpr,
    AT: tl.constexpr,
):  # fmt: skip
    """Quantize this rank's tokens and write each to the ranks of its experts; ids go to all."""
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
    for i in range(0, (rows_per_rank - program + step - 1) // step):
        token = program + i * step
        valid = (slot < TOP_K) & (token < num_tokens)
        ids = tl.load(topk_ids + token * TOP_K + slot, mask=valid, other=-1)
        weights = tl.load(topk_weights + token * TOP_K + slot, mask=valid, other=0.0)
        home = homes(ids, valid & (ids >= 0) & (ids < num_experts), expert_ranks)
        routed = tl.max(home, 0) >= 0
        ids = tl.where(home >= 0, ids, -1).to(tl.int32)
        value = row_of(x, token, topk_weights, routed, WIDTH, TILE, ON_INPUT)
        if RULE is not None:
            value, own = quantized(value, scale, RULE, GIVEN)
        elif SCALES > 0:
            here = routed & (group < SCALES)
            own = tl.load(scale + token.to(tl.int64) * SCALES + group, mask=here, other=0)
        row = (RANK * rows_per_rank + token).to(tl.int64)
        for j in range(RANKS):
            rank = (RANK + j) % RANKS
            base = tl.load(peers + rank)
            store_slots(base, row * TOP_K + slot, ids, weights, slot < TOP_K, AT)
            sent = goes_to(home, rank, expert_ranks is None)
            store_row(part_of(base, AT.rows, ROW_TYPE), row, value, sent, WIDTH, RULE)
            if SCALES > 0:
                to = part_of(base, AT.scales, SCALE_TYPE) + row * SCALES + group
                tl.store(to, own.to(SCALE_TYPE), mask=sent & (group < SCALES))
    if row_scale is not None:
        tl.store(row_scale, tl.load(scale).to(tl.float32), mask=program == 0)
    announce(peers, num_tokens, rows_per_rank, program, RANK, RANKS, AT)
    signal(peers, AT.sent, program, steps, RANK, RANKS)
    wait(peers, AT.sent, program, steps, state, timeout, RANK, RANKS)
    if program == 0:
        check_sizes(peers, AT.sizes, rows_per_rank, state, RANK, RANKS)
    tl.store(state + program, steps)


@triton.jit(do_not_specialize=["rows_per_rank", "num_experts"])
def _return_kernel(
    sums, expert_ranks, peers, state, out, rows_per_rank, num_experts, timeout,
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
            first = program + piece * TILE.rows * step
            _write_sums(
                sums, expert_ranks, peers, first, step, rows_per_rank, num_experts,
                RANK, RANKS, TOP_K, WIDTH, TILE, AT,
            )  # fmt: skip
            signal(peers, AT.returned, program, done + piece + 1, RANK, RANKS)
    else:
        for piece in range(0, pieces):
            flag = done + piece + 1
            wait(peers, AT.returned, program, flag, state, timeout, RANK, RANKS)
            failed = tl.load(state + FAILED_AT, volatile=True) != 0
            first = program + piece * TILE.rows * step
            _add_sums(
                sums, expert_ranks, peers, out, first, step, rows_per_rank, num_experts, failed,
                RANK, RANKS, TOP_K, WIDTH, TILE, AT,
            )  # fmt: skip
        tl.store(state + STRIDE + program, done + pieces)


@triton.jit
def tiles_of(first, step, rows_per_rank, TILE: tl.constexpr):
    """Number of tiles of a piece, whose tokens are first, first + step, .."""
    tokens = (rows_per_rank - first + step - 1) // step
    return (tl.minimum(tl.maximum(tokens, 0), TILE.rows) + TILE.at_once - 1) // TILE.at_once


@triton.jit
def _write_sums(
    sums, expert_ranks, peers, first, step, rows_per_rank, num_experts,
    RANK: tl.constexpr, RANKS: tl.constexpr, TOP_K: tl.constexpr, WIDTH: tl.constexpr,
    TILE: tl.constexpr, AT: tl.constexpr,
):  # fmt: skip
    """Write this rank's sums of a piece of each other rank: tokens first, first + step, .."""
    col = tl.arange(0, TILE.cols)[None, :]
    dtype: tl.constexpr = sums.dtype.element_ty
    own = tl.load(peers + RANK)
    for i in range(1, RANKS):
        rank = (RANK + i) % RANKS
        to = part_of(tl.load(peers + rank), AT.sums, dtype)
        for j in range(0, tiles_of(first, step, rows_per_rank, TILE)):
            token = first + (j * TILE.at_once + tl.arange(0, TILE.at_once)) * step
            home = homes_of(own, rank, token, rows_per_rank, expert_ranks, num_experts, TOP_K, AT)
            sent = goes_to(home, RANK, expert_ranks is None)[:, None] & (col < WIDTH)
            row = (rank * rows_per_rank + token).to(tl.int64)[:, None]
            part = tl.load(sums + row * WIDTH + col, mask=sent, other=0.0)
            row = (RANK * rows_per_rank + token).to(tl.int64)[:, None]
            tl.store(to + row * WIDTH + col, part, mask=sent)


@triton.jit
def _add_sums(
    sums, expert_ranks, peers, out, first, step, rows_per_rank, num_experts, failed,
    RANK: tl.constexpr, RANKS: tl.constexpr, TOP_K: tl.constexpr, WIDTH: tl.constexpr,
    TILE: tl.constexpr, AT: tl.constexpr,
):  # fmt: skip
    """Add the ranks' sums of a piece of this rank's tokens, in float32 in the order of ranks.

    Once a rank has failed to answer all sums are NaN.
    """
    TOKENS: tl.constexpr = TILE.at_once
    COLS: tl.constexpr = TILE.cols
    col = tl.arange(0, COLS)[None, :]
    dtype: tl.constexpr = sums.dtype.element_ty
    own = tl.load(peers + RANK)
    came = part_of(own, AT.sums, dtype)
    for j in range(0, tiles_of(first, step, rows_per_rank, TILE)):
        token = first + (j * TILE.at_once + tl.arange(0, TILE.at_once)) * step
        home = homes_of(own, RANK, token, rows_per_rank, expert_ranks, num_experts, TOP_K, AT)
        total = tl.zeros((TOKENS, COLS), dtype=tl.float32)
        for rank in range(RANKS):
            at = (rank * rows_per_rank + token).to(tl.int64)[:, None] * WIDTH + col
            valid = goes_to(home, rank, expert_ranks is None)[:, None] & (col < WIDTH)
            if rank == RANK:
                part = tl.load(sums + at, mask=valid, other=0.0)
            else:
                part = tl.load(came + at, mask=valid, other=0.0)
            part = part.to(tl.float32)
            total = tl.where(rank == 0, part, total + part)  # 0 + x would lose the sign of zeros
        total = tl.where(failed, float("nan"), total)
        inside = (token < rows_per_rank)[:, None] & (col < WIDTH)
        tl.store(out + token.to(tl.int64)[:, None] * WIDTH + col, total.to(dtype), mask=inside)


class Returned(NamedTuple):
    """How a program returns sums: a constant of the kernel."""

    rows: int
    """Tokens of each rank in a piece."""
    at_once: int
    """Tokens of a tile, a power of two."""
    cols: int
    """Columns of a tile, a power of two."""


@lru_cache(maxsize=1024)
def _return_launch(rank: int, ranks: int, parts: Parts, top_k: int, width: int) -> Launch:
    cols = next_power_of_2(width)
    at_once = min(RETURNED_ROWS, max(1, RETURNED // cols))
    return Launch(
        _return_kernel,
        RANK=rank,
        RANKS=ranks,
        TOP_K=top_k,
        WIDTH=width,
        TILE=Returned(RETURNED_ROWS, at_once, cols),
        AT=parts,
        num_warps=max(1, min(16, at_once * cols // 1024)),
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
    kernel = send_launch(_send_kernel, where, top_k, travel, warps(travel.width))
    kernel(
        (programs_of(rows_per_rank),),
        x.contiguous(),
        dense(scale),
        dense(topk_weights),
        dense(topk_ids),
        dense(expert_ranks),
        peers,
        state,
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
    kernel = _return_launch(windows.rank, layout.ranks, layout.parts, top_k, width)
    num_experts = 0 if expert_ranks is None else expert_ranks.shape[0]
    sums, placement = sums.contiguous(), dense(expert_ranks)
    kernel(
        (2 * programs_of(rows),),
        sums,
        placement,
        peers,
        state,
        out,
        rows,
        num_experts,
        windows.timeout_ns,
    )
    return out
