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

from moe_ops.dispatch.tiles import cdiv
from moe_ops.fake_impls.symmetric import symmetric_return as empty_returned
from moe_ops.fake_impls.symmetric import symmetric_send as check_sent
from moe_ops.kernels._quantize.kernels import store_values
from moe_ops.kernels._quantize.rounding import (
    Rule,
    divide,
    divide_given,
    encode,
    magnitude,
    rule_of,
    scale_of,
    stored_scale,
)
from moe_ops.kernels._runtime.dependent import take_turn
from moe_ops.kernels._runtime.launch import Launch
from moe_ops.kernels._runtime.slots import dense, next_power_of_2
from moe_ops.scheme import WHOLE, parse_quant
from moe_ops.windows import FAILED, MOST_PROGRAMS, Parts, programs_of, windows_of

STRIDE = tl.constexpr(MOST_PROGRAMS)
FAILED_AT = tl.constexpr(FAILED)
TYPES = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.uint8: tl.uint8,
    torch.int8: tl.int8,
}
ROWS = tl.constexpr(8)
"""Tokens of each rank that a program returns before it says so."""
RETURNED = 8192
"""Numbers that a program returns at once."""
INTERPRETED_POLL = tl.constexpr(20_000)
"""Nanoseconds that a poll takes at least where kernels are interpreted."""


@triton.jit
def _pointer(base, offset, dtype: tl.constexpr):
    """A typed pointer ``offset`` bytes into the window at address ``base``."""
    return (base + offset).to(tl.pointer_type(dtype))


@triton.jit
def _part(base, offset, dtype: tl.constexpr):
    """A pointer to a part of the window at address ``base``: `moe_ops.windows.ALIGNMENT`."""
    # The hint belongs to the operation that makes the pointer, which a call would hide.
    return tl.multiple_of((base + offset).to(tl.pointer_type(dtype)), 16)


@triton.jit
def _homes(ids, known, expert_ranks):
    """The rank of each slot's expert, -1 for a slot that is not known."""
    if expert_ranks is None:
        home = tl.where(known, 0, -1)
    else:
        home = tl.load(expert_ranks + tl.where(known, ids, 0), mask=known, other=-1)
    return home


@triton.jit
def _goes_to(home, rank, EVERYWHERE: tl.constexpr):
    """Whether any slot's expert is on ``rank`` (EVERYWHERE: whether there is any)."""
    if EVERYWHERE:
        sent = tl.max(home, -1) >= 0
    else:
        sent = tl.max((home == rank).to(tl.int32), -1) > 0
    return sent


@triton.jit
def _signal(peers, flags, program, steps, RANK: tl.constexpr, RANKS: tl.constexpr):
    """Tell all ranks how many steps this program has written to their windows."""
    tl.debug_barrier()
    at = flags + 4 * (RANK * STRIDE + program)
    for i in range(RANKS):
        base = tl.load(peers + (RANK + i) % RANKS)
        tl.atomic_xchg(_pointer(base, at, tl.int32), steps, sem="release", scope="sys")


@triton.jit
def _fail(peers, state, error, RANKS: tl.constexpr):
    """Note an error for the other programs, and for the host."""
    tl.atomic_xchg(state + FAILED_AT, error, sem="relaxed")
    tl.store(_pointer(tl.load(peers + RANKS), 0, tl.int32), error)


@triton.constexpr_function
def _has_clock():
    """Whether kernels can read the time."""
    return not triton.knobs.runtime.interpret


@triton.jit
def _wait(peers, flags, program, steps, state, timeout, RANK: tl.constexpr, RANKS: tl.constexpr):
    """Wait for a program of all ranks; after ``timeout`` ns note a rank that did not answer."""
    rank = tl.arange(0, triton.next_power_of_2(RANKS))
    base = tl.load(peers + RANK)
    at = _pointer(base, flags, tl.int32) + rank * STRIDE + program
    zero = tl.zeros_like(rank)
    waiting = tl.load(state + FAILED_AT, volatile=True) == 0  # else results are wrong already
    missing, spent = tl.full((), -1, tl.int32), tl.full((), 0, tl.int64)
    if _has_clock():
        start = tl.extra.cuda.globaltimer()
    while waiting:
        seen = tl.atomic_add(at, zero, mask=rank < RANKS, sem="acquire", scope="sys")
        behind = (rank < RANKS) & (seen - steps < 0)
        missing = tl.max(tl.where(behind, rank, -1), 0)
        if _has_clock():
            spent = tl.extra.cuda.globaltimer() - start
        else:
            spent += INTERPRETED_POLL
        failed = tl.load(state + FAILED_AT, volatile=True) != 0
        waiting = (missing >= 0) & (spent < timeout) & (not failed)
    if (missing >= 0) & (spent >= timeout):
        _fail(peers, state, 1 + missing, RANKS)
    tl.debug_barrier()


@triton.jit
def _check_sizes(peers, sizes, rows_per_rank, state, RANK: tl.constexpr, RANKS: tl.constexpr):
    """Note a rank whose P is another one."""
    rank = tl.arange(0, triton.next_power_of_2(RANKS))
    at = _pointer(tl.load(peers + RANK), sizes, tl.int32) + rank
    size = tl.load(at, mask=rank < RANKS, other=rows_per_rank)
    other = tl.max(tl.where(size != rows_per_rank, rank, -1), 0)
    if (other >= 0) & (tl.load(state + FAILED_AT, volatile=True) == 0):
        _fail(peers, state, -1 - other, RANKS)


@triton.jit
def _homes_of(own, rank, token, rows_per_rank, expert_ranks, TOP_K: tl.constexpr, AT: tl.constexpr):
    """`_homes` of tokens of a rank, ``(tokens, slots)``, by the ids in this rank's window.

    The tokens' rank has checked the ids. A token past the rank's last one has no home.
    """
    slot = tl.arange(0, triton.next_power_of_2(TOP_K))[None, :]
    count = tl.load(_pointer(own, AT.counts, tl.int32) + rank)
    count = tl.minimum(count, rows_per_rank)  # it is less, unless ranks differ in P: an error
    known = (token < count)[:, None] & (slot < TOP_K)
    row = (rank * rows_per_rank + token).to(tl.int64)[:, None]
    ids = tl.load(_part(own, AT.ids, tl.int32) + row * TOP_K + slot, mask=known, other=-1)
    return _homes(ids, ids >= 0, expert_ranks)


@triton.jit
def _row_of(
    x, token, topk_weights, routed, WIDTH: tl.constexpr, TILE: tl.constexpr, ON_INPUT: tl.constexpr
):
    """A token's row as a TILE; with ON_INPUT in float32, multiplied by its router weight.

    A token without experts is not read.
    """
    col = tl.arange(0, TILE[0])[:, None] * TILE[1] + tl.arange(0, TILE[1])[None, :]
    inside = routed & (col < WIDTH)
    value = tl.load(x + token.to(tl.int64) * WIDTH + col, mask=inside, other=0)
    if ON_INPUT:
        weight = tl.load(topk_weights + token, mask=routed, other=0.0).to(tl.float32)
        value = value.to(tl.float32) * weight
    return value


@triton.jit
def _quantized(value, given, RULE: tl.constexpr, GIVEN: tl.constexpr):
    """The stored values of a row, and its scales ``(COUNT,)`` as float32 or (e8m0) exponents."""
    value = value.to(tl.float32)
    if GIVEN:
        own = tl.load(given).to(tl.float32)
        stored = encode(divide_given(value, own), RULE)
        return stored, tl.zeros((value.shape[0],), dtype=tl.float32) + own
    if given is not None:
        value = tl.div_rn(value, tl.load(given).to(tl.float32))
    own = scale_of(tl.max(magnitude(value), 1).to(tl.float32, bitcast=True), RULE)
    return encode(divide(value, own[:, None], RULE), RULE), stored_scale(own, RULE)


@triton.jit
def _store_row(rows, row, value, sent, WIDTH: tl.constexpr, RULE: tl.constexpr):
    """Store a TILE as a row of the window's ``rows``, if it is ``sent``."""
    first = tl.arange(0, value.shape[0])[:, None] * value.shape[1]
    known = tl.zeros((value.shape[0],), dtype=tl.int1) | sent
    if RULE is None:
        col = first + tl.arange(0, value.shape[1])[None, :]
        to = rows + row * WIDTH + col
        tl.store(to, value.to(rows.dtype.element_ty), mask=sent & (col < WIDTH))
    else:
        store_values(rows, value, row, first, WIDTH, known, RULE)


@triton.jit(do_not_specialize=["num_tokens", "rows_per_rank", "num_experts"])
def _send_kernel(
    x, scale, topk_weights, topk_ids, expert_ranks, peers, state, row_scale,
    num_tokens, rows_per_rank, num_experts, timeout,
    RANK: tl.constexpr, RANKS: tl.constexpr, TOP_K: tl.constexpr, WIDTH: tl.constexpr,
    TILE: tl.constexpr, SCALES: tl.constexpr, RULE: tl.constexpr, GIVEN: tl.constexpr,
    ON_INPUT: tl.constexpr, ROW_TYPE: tl.constexpr, SCALE_TYPE: tl.constexpr, AT: tl.constexpr,
):  # fmt: skip
    """Quantize this rank's tokens and write each to the ranks of its experts; ids go to all."""
    take_turn()
    program, step = tl.program_id(0), tl.num_programs(0)
    steps = tl.load(state + program) + 1
    slot = tl.arange(0, triton.next_power_of_2(TOP_K))
    group = tl.arange(0, triton.next_power_of_2(SCALES) if SCALES > 0 else 1)
    for i in range(0, (rows_per_rank - program + step - 1) // step):
        token = program + i * step
        known = (slot < TOP_K) & (token < num_tokens)
        ids = tl.load(topk_ids + token * TOP_K + slot, mask=known, other=-1)
        weights = tl.load(topk_weights + token * TOP_K + slot, mask=known, other=0.0)
        home = _homes(ids, known & (ids >= 0) & (ids < num_experts), expert_ranks)
        routed = tl.max(home, 0) >= 0
        ids = tl.where(home >= 0, ids, -1).to(tl.int32)
        value = _row_of(x, token, topk_weights, routed, WIDTH, TILE, ON_INPUT)
        if RULE is not None:
            value, own = _quantized(value, scale, RULE, GIVEN)
        elif SCALES > 0:
            here = routed & (group < SCALES)
            own = tl.load(scale + token.to(tl.int64) * SCALES + group, mask=here, other=0)
        row = (RANK * rows_per_rank + token).to(tl.int64)
        for j in range(RANKS):
            rank = (RANK + j) % RANKS
            base = tl.load(peers + rank)
            at, inside = row * TOP_K + slot, slot < TOP_K
            tl.store(_part(base, AT.ids, tl.int32) + at, ids, mask=inside)
            to = _part(base, AT.weights, tl.float32) + at
            tl.store(to, weights.to(tl.float32), mask=inside)
            sent = _goes_to(home, rank, expert_ranks is None)
            _store_row(_part(base, AT.rows, ROW_TYPE), row, value, sent, WIDTH, RULE)
            if SCALES > 0:
                to = _part(base, AT.scales, SCALE_TYPE) + row * SCALES + group
                tl.store(to, own.to(SCALE_TYPE), mask=sent & (group < SCALES))
    if row_scale is not None:
        tl.store(row_scale, tl.load(scale).to(tl.float32), mask=program == 0)
    if program == 0:
        for i in range(RANKS):
            base = tl.load(peers + i)
            tl.store(_pointer(base, AT.counts, tl.int32) + RANK, num_tokens)
            tl.store(_pointer(base, AT.sizes, tl.int32) + RANK, rows_per_rank)
    _signal(peers, AT.sent, program, steps, RANK, RANKS)
    _wait(peers, AT.sent, program, steps, state, timeout, RANK, RANKS)
    if program == 0:
        _check_sizes(peers, AT.sizes, rows_per_rank, state, RANK, RANKS)
    tl.store(state + program, steps)


@triton.jit(do_not_specialize=["rows_per_rank"])
def _return_kernel(
    sums, expert_ranks, peers, state, out, rows_per_rank, timeout,
    RANK: tl.constexpr, RANKS: tl.constexpr, TOP_K: tl.constexpr, WIDTH: tl.constexpr,
    TILE: tl.constexpr, AT: tl.constexpr,
):  # fmt: skip
    """Half of the programs write partial sums to their tokens' ranks, half add what arrives.

    Both take ROWS tokens of each rank at a time, so that links and memory are busy together.
    """
    take_turn()
    step = tl.num_programs(0) // 2
    program = tl.program_id(0) % step
    done = tl.load(state + STRIDE + program)
    pieces = (rows_per_rank + step * ROWS - 1) // (step * ROWS)
    if tl.program_id(0) < step:
        for piece in range(0, pieces):
            first = program + piece * ROWS * step
            _write_sums(
                sums, expert_ranks, peers, first, step, rows_per_rank,
                RANK, RANKS, TOP_K, WIDTH, TILE, AT,
            )  # fmt: skip
            _signal(peers, AT.returned, program, done + piece + 1, RANK, RANKS)
    else:
        for piece in range(0, pieces):
            flag = done + piece + 1
            _wait(peers, AT.returned, program, flag, state, timeout, RANK, RANKS)
            first = program + piece * ROWS * step
            _add_sums(
                sums, expert_ranks, peers, out, first, step, rows_per_rank,
                RANK, RANKS, TOP_K, WIDTH, TILE, AT,
            )  # fmt: skip
        tl.store(state + STRIDE + program, done + pieces)


@triton.jit
def _write_sums(
    sums, expert_ranks, peers, first, step, rows_per_rank,
    RANK: tl.constexpr, RANKS: tl.constexpr, TOP_K: tl.constexpr, WIDTH: tl.constexpr,
    TILE: tl.constexpr, AT: tl.constexpr,
):  # fmt: skip
    """Write this rank's sums of ROWS tokens of each other rank: tokens first, first + step, .."""
    col = tl.arange(0, TILE[1])[None, :]
    dtype: tl.constexpr = sums.dtype.element_ty
    own = tl.load(peers + RANK)
    for i in range(1, RANKS):
        rank = (RANK + i) % RANKS
        to = _part(tl.load(peers + rank), AT.sums, dtype)
        for j in range(0, ROWS // TILE[0]):
            token = first + (j * TILE[0] + tl.arange(0, TILE[0])) * step
            home = _homes_of(own, rank, token, rows_per_rank, expert_ranks, TOP_K, AT)
            sent = _goes_to(home, RANK, expert_ranks is None)[:, None] & (col < WIDTH)
            row = (rank * rows_per_rank + token).to(tl.int64)[:, None]
            part = tl.load(sums + row * WIDTH + col, mask=sent, other=0.0)
            row = (RANK * rows_per_rank + token).to(tl.int64)[:, None]
            tl.store(to + row * WIDTH + col, part, mask=sent)


@triton.jit
def _add_sums(
    sums, expert_ranks, peers, out, first, step, rows_per_rank,
    RANK: tl.constexpr, RANKS: tl.constexpr, TOP_K: tl.constexpr, WIDTH: tl.constexpr,
    TILE: tl.constexpr, AT: tl.constexpr,
):  # fmt: skip
    """Add the ranks' sums of ROWS tokens of this rank, in float32 in the order of ranks."""
    col = tl.arange(0, TILE[1])[None, :]
    dtype: tl.constexpr = sums.dtype.element_ty
    own = tl.load(peers + RANK)
    came = _part(own, AT.sums, dtype)
    for j in range(0, ROWS // TILE[0]):
        token = first + (j * TILE[0] + tl.arange(0, TILE[0])) * step
        home = _homes_of(own, RANK, token, rows_per_rank, expert_ranks, TOP_K, AT)
        total = tl.zeros(TILE, dtype=tl.float32)
        for rank in range(RANKS):
            at = (rank * rows_per_rank + token).to(tl.int64)[:, None] * WIDTH + col
            known = _goes_to(home, rank, expert_ranks is None)[:, None] & (col < WIDTH)
            if rank == RANK:
                part = tl.load(sums + at, mask=known, other=0.0)
            else:
                part = tl.load(came + at, mask=known, other=0.0)
            part = part.to(tl.float32)
            total = tl.where(rank == 0, part, total + part)  # 0 + x would lose the sign of zeros
        inside = (token < rows_per_rank)[:, None] & (col < WIDTH)
        tl.store(out + token.to(tl.int64)[:, None] * WIDTH + col, total.to(dtype), mask=inside)


class Travel(NamedTuple):
    """What kernels need to know of the rows that they send."""

    width: int
    """Numbers of a row."""
    tile: tuple[int, int]
    """Groups of a row and numbers of a group, powers of two."""
    scales: int
    """Scales of a row that travel; 0: none."""
    rule: Rule | None
    given: bool
    """Whether one scale is given for all rows."""
    row_type: tl.dtype
    scale_type: tl.dtype


def _warps(width: int) -> int:
    """Number of warps for a row: 32 bytes per thread of 16-bit numbers."""
    return max(1, min(16, next_power_of_2(width) // 512))


@lru_cache(maxsize=1024)
def _send_launch(
    rank: int, ranks: int, parts: Parts, top_k: int, travel: Travel, on_input: bool
) -> Launch:
    return Launch(
        _send_kernel,
        RANK=rank,
        RANKS=ranks,
        TOP_K=top_k,
        WIDTH=travel.width,
        TILE=travel.tile,
        SCALES=travel.scales,
        RULE=travel.rule,
        GIVEN=travel.given,
        ON_INPUT=on_input,
        ROW_TYPE=travel.row_type,
        SCALE_TYPE=travel.scale_type,
        AT=parts,
        num_warps=_warps(travel.width),
    )


@lru_cache(maxsize=1024)
def _return_launch(rank: int, ranks: int, parts: Parts, top_k: int, width: int) -> Launch:
    cols = next_power_of_2(width)
    return Launch(
        _return_kernel,
        RANK=rank,
        RANKS=ranks,
        TOP_K=top_k,
        WIDTH=width,
        TILE=(min(ROWS.value, max(1, RETURNED // cols)), cols),
        AT=parts,
        num_warps=max(1, min(16, cols // 256)),
    )


@lru_cache(maxsize=1024)
def _travel(width: int, dtype: torch.dtype, quant: str, given: bool, own: tuple) -> Travel:
    """How rows of ``dtype`` travel; ``own``: the scales of a row that is quantized already."""
    if not quant:
        scales, scale_dtype = own
        tile, row_type = (1, next_power_of_2(width)), TYPES[dtype]
        return Travel(width, tile, scales, None, False, row_type, TYPES[scale_dtype])
    rule = parse_quant(quant)
    whole = rule.group.cols == WHOLE
    cols = next_power_of_2(width) if whole else rule.group.cols
    groups = 1 if whole else cdiv(width, cols)
    return Travel(
        width,
        (next_power_of_2(groups), cols),
        0 if rule.per_tensor else groups,
        rule_of(rule),
        given,
        TYPES[rule.dtype],
        TYPES[rule.scale_dtype],
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
    windows = windows_of(peers)
    arrived = windows.arrived(x, scale, topk_ids.shape[1], rows_per_rank, quant)
    check = (x, scale, topk_weights, topk_ids, expert_ranks, peers, state)
    check_sent(*check, rows_per_rank, num_experts, on_input, quant)
    rule = parse_quant(quant) if quant else None
    given = rule is not None and scale is not None and not rule.global_scale
    own = (0, torch.float32) if quant or scale is None else (scale.shape[1], scale.dtype)
    if x.itemsize == 1:
        x = x.view(torch.uint8)
    if scale is not None and scale.itemsize == 1:
        scale = scale.view(torch.uint8)
    layout = windows.layout
    travel = _travel(x.shape[1], x.dtype, quant, given, own)
    rank, ranks, top_k = windows.rank, layout.ranks, topk_ids.shape[1]
    kernel = _send_launch(rank, ranks, layout.parts, top_k, travel, on_input)
    kernel(
        (programs_of(rows_per_rank),),
        x.contiguous(),
        dense(scale),
        dense(topk_weights),
        dense(topk_ids),
        dense(expert_ranks),
        peers,
        state,
        arrived[1] if rule is not None and rule.per_tensor else None,
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
    windows = windows_of(peers)
    rank, ranks, parts = windows.rank, windows.layout.ranks, windows.layout.parts
    kernel = _return_launch(rank, ranks, parts, top_k, sums.shape[1])
    sums, rows = sums.contiguous(), out.shape[0]
    arguments = (sums, dense(expert_ranks), peers, state, out, rows)
    kernel((2 * programs_of(rows),), *arguments, windows.timeout_ns)
    return out
