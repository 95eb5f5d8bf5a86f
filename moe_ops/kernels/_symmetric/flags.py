"""Pointers into windows, the flags by which ranks wait for each other, and the ranks of experts."""

from __future__ import annotations

import triton
import triton.language as tl

from moe_ops.windows import FAILED, MOST_PROGRAMS

STRIDE = tl.constexpr(MOST_PROGRAMS)
LANES = tl.constexpr(1 << (MOST_PROGRAMS - 1).bit_length())
"""MOST_PROGRAMS, rounded up to a power of two."""
FAILED_AT = tl.constexpr(FAILED)
INTERPRETED_POLL = tl.constexpr(20_000)
"""Nanoseconds that a poll takes at least where kernels are interpreted."""


@triton.jit
def pointer(base, offset, dtype: tl.constexpr):
    """A typed pointer ``offset`` bytes into the window at address ``base``."""
    return (base + offset).to(tl.pointer_type(dtype))


@triton.jit
def part_of(base, offset, dtype: tl.constexpr):
    """A pointer to a part of the window at address ``base``: `moe_ops.windows.ALIGNMENT`."""
    # The hint belongs to the operation that makes the pointer, which a call would hide. Triton 3.8
    # loses the hint if the offset is added to the address before that.
    start = tl.multiple_of(base.to(tl.pointer_type(dtype)), 16)
    return start + offset // (dtype.primitive_bitwidth // 8)


@triton.jit
def living(live, rank, valid):
    """Whether ranks are ``valid`` and live; where ``live`` is None, all are live."""
    if live is not None:
        valid = valid & (tl.load(live + tl.where(valid, rank, 0)) != 0)
    return valid


@triton.jit
def window_for(peers, rank, live, RANK: tl.constexpr):
    """Address of the window to write to for ``rank``, and the rank whose tokens to write there.

    These are the window of ``rank`` and this rank's tokens. The memory of a dead rank may be gone:
    instead, its tokens in this rank's window are written, which must have no ids.
    """
    source = RANK
    if live is not None:
        alive = tl.load(live + rank) != 0
        source = tl.where(alive, RANK, rank)
        rank = tl.where(alive, rank, RANK)
    return tl.load(peers + rank), source


@triton.jit
def homes(ids, valid, expert_ranks, live, RANKS: tl.constexpr):
    """The rank of each slot's expert, -1 for a slot that is not known or whose rank is dead."""
    if expert_ranks is None:
        home = tl.where(valid, 0, -1)
    else:
        home = tl.load(expert_ranks + tl.where(valid, ids, 0), mask=valid, other=-1)
        if live is not None:
            home = tl.where(living(live, home, (home >= 0) & (home < RANKS)), home, -1)
    return home


@triton.jit
def add_left_out(live, count, RANKS: tl.constexpr):
    """Add to the number of slots that are left out."""
    if live is not None:
        tl.atomic_add(live + RANKS, count.to(tl.int64), mask=count > 0, sem="relaxed")


@triton.jit
def goes_to(home, rank, EVERYWHERE: tl.constexpr):
    """Whether any slot's expert is on ``rank`` (EVERYWHERE: whether there is any)."""
    wanted = home >= 0 if EVERYWHERE else home == rank
    return tl.max(wanted.to(tl.int32), -1) > 0


@triton.jit
def announce(
    peers, live, rows_per_rank, program, RANK: tl.constexpr, RANKS: tl.constexpr, AT: tl.constexpr
):
    """Tell all ranks this rank's P."""
    if program == 0:
        for i in range(RANKS):
            base, source = window_for(peers, i, live, RANK)
            tl.store(pointer(base, AT.sizes, tl.int32) + source, rows_per_rank)


@triton.jit
def signal(peers, live, flags, program, steps, RANK: tl.constexpr, RANKS: tl.constexpr):
    """Tell all ranks how many steps this program has written to their windows."""
    tl.debug_barrier()
    at = flags + 4 * (RANK * STRIDE + program)
    rank = tl.arange(0, triton.next_power_of_2(RANKS))
    told = living(live, rank, rank < RANKS)
    base = tl.load(peers + rank, mask=told, other=0)
    to = pointer(base, at, tl.int32)  # by one instruction, so that one fence serves all ranks
    tl.atomic_xchg(to, tl.zeros_like(rank) + steps, mask=told, sem="release", scope="sys")


@triton.jit
def fail(peers, state, error, RANKS: tl.constexpr):
    """Note an error for the other programs, and for the host."""
    tl.atomic_xchg(state + FAILED_AT, error, sem="relaxed")
    tl.store(pointer(tl.load(peers + RANKS), 0, tl.int32), error)


@triton.constexpr_function
def has_clock():
    """Whether kernels can read the time."""
    return not triton.knobs.runtime.interpret


@triton.jit
def _wait_for(at, rank, asked, steps, peers, state, timeout, RANKS: tl.constexpr):
    """Wait for the flags ``at`` that are ``asked``; after ``timeout`` ns note their ``rank``.

    Each warp reads the clock and the note of a failure for itself, and may see other values than
    the next one. All must leave in the same poll, as those that stay would reduce what is not
    there: so what a thread sees is part of what is reduced. The result is 0 once all flags are
    there, and 1 before; 2 once that is too late, and 3 after a failure: results are wrong already.
    """
    result, spent = tl.full((), 1, tl.int32), tl.zeros((), tl.int64)
    if has_clock():
        start = tl.extra.cuda.globaltimer()
    while result == 1:
        seen = tl.load(at, mask=asked, other=0, volatile=True)
        if has_clock():
            spent = tl.extra.cuda.globaltimer() - start
        else:
            spent += INTERPRETED_POLL
        failed = tl.load(state + FAILED_AT, volatile=True) != 0
        behind = tl.where(failed, 3, tl.where(spent >= timeout, 2, 1))
        result = tl.max(tl.where(asked & (seen - steps < 0), behind, 0), 0)
    if result == 2:
        seen = tl.load(at, mask=asked, other=0, volatile=True)
        missing = tl.max(tl.where(asked & (seen - steps < 0), rank, -1), 0)
        if missing >= 0:  # else the flags have come meanwhile
            fail(peers, state, 1 + missing, RANKS)
    # What other ranks wrote before they set their flags is visible after this, to all threads.
    tl.atomic_add(at, tl.zeros_like(rank), mask=asked, sem="acquire", scope="sys")
    tl.debug_barrier()


@triton.jit
def wait(
    peers, live, flags, program, steps, state, timeout, RANK: tl.constexpr, RANKS: tl.constexpr
):
    """Wait for one program of all ranks."""
    rank = tl.arange(0, triton.next_power_of_2(RANKS))
    at = pointer(tl.load(peers + RANK), flags, tl.int32) + rank * STRIDE + program
    asked = living(live, rank, rank < RANKS)
    _wait_for(at, rank, asked, steps, peers, state, timeout, RANKS)


@triton.jit
def wait_for_all(
    peers, live, flags, programs, steps, state, timeout, RANK: tl.constexpr, RANKS: tl.constexpr
):
    """Wait for all programs of all ranks."""
    lane = tl.arange(0, triton.next_power_of_2(RANKS) * LANES)
    rank = lane // LANES
    program = lane % LANES
    at = pointer(tl.load(peers + RANK), flags, tl.int32) + rank * STRIDE + program
    asked = living(live, rank, (rank < RANKS) & (program < programs))
    _wait_for(at, rank, asked, steps, peers, state, timeout, RANKS)


@triton.jit
def check_sizes(peers, sizes, rows_per_rank, state, RANK: tl.constexpr, RANKS: tl.constexpr):
    """Note a rank whose P is another one."""
    rank = tl.arange(0, triton.next_power_of_2(RANKS))
    at = pointer(tl.load(peers + RANK), sizes, tl.int32) + rank
    size = tl.load(at, mask=rank < RANKS, other=rows_per_rank)
    other = tl.max(tl.where(size != rows_per_rank, rank, -1), 0)
    if (other >= 0) & (tl.load(state + FAILED_AT, volatile=True) == 0):
        fail(peers, state, -1 - other, RANKS)


@triton.jit
def homes_of(
    own, rank, token, rows_per_rank, expert_ranks, live, num_experts,
    RANKS: tl.constexpr, TOP_K: tl.constexpr, AT: tl.constexpr,
):  # fmt: skip
    """`homes` of tokens of a rank, or of a rank each: ``(tokens, slots)``, by this window's ids.

    The tokens' rank has checked the ids by its own number of experts. Padding has ids of -1, and a
    token from P on has no home.
    """
    slot = tl.arange(0, triton.next_power_of_2(TOP_K))[None, :]
    valid = (token < rows_per_rank)[:, None] & (slot < TOP_K)
    row = (rank * rows_per_rank + token).to(tl.int64)[:, None]
    ids = tl.load(part_of(own, AT.ids, tl.int32) + row * TOP_K + slot, mask=valid, other=-1)
    inside = ids >= 0
    if expert_ranks is not None:
        inside = inside & (ids < num_experts)
    return homes(ids, inside, expert_ranks, live, RANKS)
