"""The sums that travel back: written to their tokens' ranks by some programs, added by others.

A piece is the work between two flags: some tokens of each rank. Both sides first look up which rows
of a piece there are, as bits of integers. So no load of rows waits for that of ids, and rows of
several turns are under way at the same time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from moe_ops.dispatch.tiles import next_power_of_2
from moe_ops.kernels._symmetric.flags import goes_to, homes_of, part_of

WORD = tl.constexpr(64)
"""Rows that are looked up at once, a bit of an integer each."""


class Pace(NamedTuple):
    """How much is under way at the same time where many sums return."""

    rows: int
    """Tokens of each rank in a piece, a power of two."""
    written: int
    """Bytes of the rows of a writer's turn."""
    added: int
    """Numbers of a rank in an adder's turn."""
    stages: int
    """Turns that are under way, also while rows are added: one is worked on as others load."""
    warps: int
    """Most warps of a program."""


PACE = Pace(rows=4, written=32768, added=8192, stages=3, warps=8)
"""Two programs must fit on an SM."""
AHEAD = 65536
"""Bytes of shared memory for rows that are loaded ahead; wider rows are not."""


class Returned(NamedTuple):
    """How a program returns sums: a constant of the kernel."""

    rows: int
    """Tokens of each rank in a piece."""
    at_once: int
    """Rows of a writer's turn, a power of two."""
    tokens: int
    """Tokens of an adder's turn, a power of two."""
    cols: int
    """Columns of a row, a power of two."""
    stages: int
    """Turns that are under way."""


def returned_of(ranks: int, width: int, dtype: torch.dtype, pace: Pace) -> Returned:
    """Tiles of rows of ``width`` numbers of ``dtype``."""
    cols, rows = next_power_of_2(width), pace.rows
    row_bytes = cols * dtype.itemsize
    most = min(WORD.value, next_power_of_2(rows * max(1, ranks - 1)))
    at_once = min(most, max(1, pace.written // row_bytes))
    tokens = min(rows, max(1, pace.added // cols))
    stages = min(pace.stages, 1 + AHEAD // (max(at_once, tokens) * row_bytes))
    return Returned(rows, at_once, tokens, cols, stages)


def warps_of(tile: Returned, pace: Pace) -> int:
    """Number of warps for a tile: at least 32 numbers of a thread."""
    return max(1, min(pace.warps, max(tile.at_once, tile.tokens) * tile.cols // 1024))


@triton.jit
def tokens_of(first, step, rows_per_rank, ROWS: tl.constexpr):
    """Number of a piece's tokens, which are first, first + step, .."""
    tokens = (rows_per_rank - first + step - 1) // step
    return tl.minimum(tl.maximum(tokens, 0), ROWS)


@triton.jit
def find_rows(
    own, first, step, rows_per_rank, expert_ranks, live, num_experts, EACH: tl.constexpr,
    RANK: tl.constexpr, RANKS: tl.constexpr, TOP_K: tl.constexpr, TILE: tl.constexpr,
    AT: tl.constexpr,
):  # fmt: skip
    """Bits that say which rows of a piece there are, as a tuple of integers.

    Row n belongs to the piece's token n // EACH and to rank (RANK + 1 + n % EACH) % RANKS. EACH is
    R - 1 for tokens of other ranks that have experts here, and R for tokens of this rank that have
    experts on any rank.
    """
    ROWS: tl.constexpr = TILE.rows * EACH
    LANES: tl.constexpr = min(WORD, triton.next_power_of_2(ROWS))
    lane = tl.arange(0, LANES)
    words = ()
    for word in tl.static_range((ROWS + WORD - 1) // WORD):
        row = word * WORD + lane
        rank = (RANK + 1 + row % EACH) % RANKS
        token = tl.where(row < ROWS, first + row // EACH * step, rows_per_rank)
        source = rank if EACH < RANKS else RANK
        home = homes_of(
            own, source, token, rows_per_rank, expert_ranks, live, num_experts, RANKS, TOP_K, AT
        )
        to = RANK if EACH < RANKS else rank[:, None]
        there = goes_to(home, to, expert_ranks is None)
        words += (tl.sum(there.to(tl.int64) << lane, 0),)
    return words


@triton.jit
def is_there(words, row):
    """Whether each row of a vector is there, by the bits of `find_rows`."""
    word = words[0]
    for i in tl.static_range(1, len(words)):
        word = tl.where(row // WORD == i, words[i], word)
    return ((word >> (row % WORD)) & 1) != 0


@triton.jit
def write_sums(
    sums, expert_ranks, peers, live,
    first, step, rows_per_rank, num_experts,
    RANK: tl.constexpr, RANKS: tl.constexpr, TOP_K: tl.constexpr, WIDTH: tl.constexpr,
    TILE: tl.constexpr, AT: tl.constexpr,
):  # fmt: skip
    """Write this rank's sums of a piece of each other rank: tokens first, first + step, .."""
    EACH: tl.constexpr = RANKS - 1
    col = tl.arange(0, TILE.cols)[None, :]
    dtype: tl.constexpr = sums.dtype.element_ty
    words = find_rows(
        tl.load(peers + RANK), first, step, rows_per_rank, expert_ranks, live, num_experts,
        EACH, RANK, RANKS, TOP_K, TILE, AT,
    )  # fmt: skip
    rows = tokens_of(first, step, rows_per_rank, TILE.rows) * EACH
    turns = (rows + TILE.at_once - 1) // TILE.at_once
    for turn in tl.range(0, turns, num_stages=TILE.stages):
        row = turn * TILE.at_once + tl.arange(0, TILE.at_once)
        rank = (RANK + 1 + row % EACH) % RANKS
        token = (first + row // EACH * step).to(tl.int64)
        sent = is_there(words, row)[:, None] & (col < WIDTH)
        at = (rank * rows_per_rank + token)[:, None] * WIDTH + col
        part = tl.load(sums + at, mask=sent, other=0.0)
        to = part_of(tl.load(peers + rank), AT.sums, dtype)[:, None]
        tl.store(to + (RANK * rows_per_rank + token)[:, None] * WIDTH + col, part, mask=sent)


@triton.jit
def add_sums(
    sums, peers, out, words, first, step, rows_per_rank, failed,
    RANK: tl.constexpr, RANKS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
    AT: tl.constexpr,
):  # fmt: skip
    """Add the ranks' sums of a piece of this rank's tokens, in float32 in the order of ranks.

    Once a rank has failed to answer all sums are NaN.
    """
    TOKENS: tl.constexpr = TILE.tokens
    COLS: tl.constexpr = TILE.cols
    col = tl.arange(0, COLS)[None, :]
    dtype: tl.constexpr = sums.dtype.element_ty
    came = part_of(tl.load(peers + RANK), AT.sums, dtype)
    tokens = tokens_of(first, step, rows_per_rank, TILE.rows)
    turns = (tokens + TOKENS - 1) // TOKENS
    total = tl.zeros((TOKENS, COLS), dtype=tl.float32)
    for turn in tl.range(0, turns * RANKS, num_stages=TILE.stages):
        rank = turn % RANKS
        number = turn // RANKS * TOKENS + tl.arange(0, TOKENS)
        token = (first + number * step).to(tl.int64)
        there = is_there(words, number * RANKS + (rank + RANKS - RANK - 1) % RANKS)
        at = (rank * rows_per_rank + token)[:, None] * WIDTH + col
        source = came
        if rank == RANK:
            source = sums
        part = tl.load(source + at, mask=there[:, None] & (col < WIDTH), other=0.0).to(tl.float32)
        total = tl.where(rank == 0, part, total + part)  # 0 + x would lose the sign of zeros
        last = (token < rows_per_rank)[:, None] & (col < WIDTH) & (rank == RANKS - 1)
        result = tl.where(failed, float("nan"), total).to(dtype)
        tl.store(out + token[:, None] * WIDTH + col, result, mask=last)
