"""Gluon kernel of GEMM 2 with the weighted sum over slots, for one token and packed weights.

A program computes 16 columns of all slots, and so all terms of their sums. A warp multiplies 16
weight rows of one expert, a quarter of a packed chunk. So the first operand of a product has the
rows of eight jobs, the second a column for each, and the diagonal counts. A job is a slot or, with
few slots, a part of K of a slot. Words go from memory to registers, some chunks ahead; the rows of
the slots lie in shared memory. Right after GEMM 1 (`early`) the kernel asks for its first words
before it waits for GEMM 1's rows.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from moe_ops.dispatch import hopper_decode
from moe_ops.kernels._hopper.fragments import (
    UNIT,
    chunk_groups,
    decoded,
    pairs_layout,
    words_layout,
)
from moe_ops.kernels._hopper.schedule import wait_for_group
from moe_ops.kernels._hopper.stream import load_rows
from moe_ops.kernels._hopper.weights import Choices, expert_of
from moe_ops.kernels._runtime.dependent import take_turn

WARPS = gl.constexpr(hopper_decode.SUM_WARPS)
"""Warps of a program, and jobs of a pass."""
ROWS = gl.constexpr(hopper_decode.SUM_ROWS)
"""Weight rows of a warp."""


@gluon.jit
def jobs_of(choices, PASS: gl.constexpr, LAYOUT: gl.constexpr, S: gl.constexpr):
    """See `choose_jobs`."""
    return choose_jobs(choices, PASS, gl.arange(0, WARPS, layout=LAYOUT), S)


@gluon.jit
def choose_jobs(choices, PASS: gl.constexpr, number, S: gl.constexpr):
    """The slot, the expert (-1: none) and the first chunk of these jobs of a pass."""
    job = PASS * WARPS + number
    slot = job // S.PARTS
    return slot, expert_of(choices, slot, slot < S.COUNT), job % S.PARTS * S.STEPS


@gluon.jit
def find_words(words, stride, unit, choices, PASS: gl.constexpr, C: gl.constexpr, S: gl.constexpr):
    """Pointers to each thread's words in its job's first chunk, and the chunks that are left."""
    L: gl.constexpr = words_layout(WARPS)
    OF_JOB: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, L)))
    OF_PAIR: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, L)))
    OF_COLUMN: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, L)))
    OF_TILE: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, L)))
    PIECES: gl.constexpr = C.BITS // 4
    _, expert, first = jobs_of(choices, PASS, OF_JOB, S)
    chunk = unit // 4 * S.CHUNKS + first
    at = gl.maximum(expert, 0).to(gl.int64) * stride + chunk * (PIECES * 512) + unit % 4 * 128
    pair = gl.arange(0, 8, layout=OF_PAIR)[None, :, None, None]
    column = gl.arange(0, 4, layout=OF_COLUMN)[None, None, :, None]
    tile = gl.arange(0, 4, layout=OF_TILE)[None, None, None, :]
    inside = pair * 16 + column * 4 + tile
    left = gl.where(expert < 0, 0, S.CHUNKS - first)
    return words + at[:, None, None, None] + inside, left[:, None, None, None]


@gluon.jit
def find_rows(x, unit, choices, PASS: gl.constexpr, C: gl.constexpr, S: gl.constexpr):
    """Pointers into ``(E, G, N)`` to each job's rows, its first chunk and the chunks left."""
    L: gl.constexpr = pairs_layout(WARPS)
    OF_JOB: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, L))
    _, expert, first = jobs_of(choices, PASS, OF_JOB, S)
    left = gl.where(expert < 0, 0, S.CHUNKS - first)[:, None, None]
    pair = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :, None]
    odd = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
    at = gl.maximum(expert, 0).to(gl.int64) * (S.GROUPS * C.N) + unit * ROWS
    return x + at[:, None, None] + (pair * 2 + odd), first[:, None, None], left


@gluon.jit
def find_zeros(x, unit, choices, PASS: gl.constexpr, C: gl.constexpr, S: gl.constexpr):
    """The same for 4-bit zero points ``(E, G, N / 2)``."""
    L: gl.constexpr = gl.SliceLayout(2, pairs_layout(WARPS))
    _, expert, first = jobs_of(choices, PASS, gl.SliceLayout(1, L), S)
    left = gl.where(expert < 0, 0, S.CHUNKS - first)[:, None]
    pair = gl.arange(0, 8, layout=gl.SliceLayout(0, L))[None, :]
    at = gl.maximum(expert, 0).to(gl.int64) * (S.GROUPS * C.N // 2) + unit * (ROWS // 2)
    return x + at[:, None] + pair, first[:, None], left


@gluon.jit
def load_groups(found, i, WIDTH: gl.constexpr, C: gl.constexpr):
    """What `find_rows` found, for each group of chunk i of the jobs; WIDTH: of a group."""
    GROUPS: gl.constexpr = chunk_groups(C)
    at, first, left = found
    group = (first + i) * UNIT // C.COLS
    stored = ()
    for j in gl.static_range(GROUPS):
        stored += (gl.load(at + (group + j) * WIDTH, mask=i < left, other=0),)
    return stored


@gluon.jit
def load_chunk(sources, i, C: gl.constexpr):
    """The words of chunk i of the jobs, their scales and their zero points."""
    PIECES: gl.constexpr = C.BITS // 4
    found, scales, zeros = sources
    at, left = found
    words = ()
    for piece in gl.static_range(PIECES):
        place = at + i * (PIECES * 512) + piece * 512
        words += (gl.load(place, mask=i < left, other=0),)
    scale, zero = (), ()
    if C.SCALED == "weights":
        scale = load_groups(scales, i, C.N, C)
    if C.ZERO_BYTES > 0:
        zero = load_groups(zeros, i, C.N // 2 if C.BITS == 4 else C.N, C)
    return words, scale, zero


@gluon.jit
def load_chunks(sources, first, COUNT: gl.constexpr, C: gl.constexpr):
    """COUNT chunks of the jobs from ``first`` on."""
    found = ()
    for i in gl.static_range(COUNT):
        found += (load_chunk(sources, first + i, C),)
    return found


@gluon.jit
def begin(stored, unit, choices, PASS: gl.constexpr, C: gl.constexpr, S: gl.constexpr):
    """Where the words, scales and zero points of a pass are, and the first of them."""
    words, stride, scale, zeros = stored
    scales, zero_points = (), ()
    if C.SCALED == "weights":
        scales = find_rows(scale, unit, choices, PASS, C, S)
    if C.ZERO_BYTES > 0:
        if C.BITS == 4:
            zero_points = find_zeros(zeros, unit, choices, PASS, C, S)
        else:
            zero_points = find_rows(zeros, unit, choices, PASS, C, S)
    sources = find_words(words, stride, unit, choices, PASS, C, S), scales, zero_points
    return sources, load_chunks(sources, 0, S.AHEAD, C)


@gluon.jit
def copy_vectors(h, stride, vectors, choices, PASS: gl.constexpr, C: gl.constexpr, S: gl.constexpr):
    """Copy the part of K of each job of a pass: a column of each chunk's second operand.

    The chunks of a round are copied together. Zeros follow, which the chunks that are loaded past a
    job's end are multiplied with.
    """
    AHEAD: gl.constexpr = S.AHEAD
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    row = gl.arange(0, AHEAD * WARPS, layout=gl.SliceLayout(1, L))
    slot, expert, first = choose_jobs(choices, PASS, row % WARPS, S)
    k = gl.arange(0, UNIT, layout=gl.SliceLayout(0, L))[None, :]
    source = h + slot.to(gl.int64)[:, None] * stride
    for step in range(S.ROUNDS):
        chunk = step * AHEAD + row // WARPS
        at = (first + chunk)[:, None] * UNIT + k
        mask = (expert >= 0)[:, None] & (at < C.K) & (chunk < S.STEPS)[:, None]
        load_rows(vectors.index(step), source + at, mask=mask)
    async_copy.commit_group()
    async_copy.wait_group(0)
    wait_for_group()


@gluon.jit
def add_jobs(vectors, sources, ready, C: gl.constexpr, S: gl.constexpr):
    """The sum of each weight row of each job: ``(WARPS * ROWS,)`` float32."""
    L: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    DOT: gl.constexpr = gl.DotOperandLayout(0, L, 2)
    AHEAD: gl.constexpr = S.AHEAD
    acc = gl.full((WARPS * ROWS, WARPS), 0, gl.float32, L)
    for step in range(S.ROUNDS):
        coming = load_chunks(sources, (step + 1) * AHEAD, AHEAD, C)
        for i in gl.static_range(AHEAD):
            rows = vectors.index(step).slice(i * WARPS, WARPS, 0).permute((1, 0))
            rows = rows.load(gl.DotOperandLayout(1, L, 2))
            acc = mma_v2(decoded(ready[i], vectors.dtype, DOT, C), rows, acc)
        ready = coming
    row = gl.arange(0, WARPS * ROWS, layout=gl.SliceLayout(1, L))[:, None] // ROWS
    column = gl.arange(0, WARPS, layout=gl.SliceLayout(0, L))[None, :]
    sums = gl.sum(gl.where(row == column, acc, 0.0), 1)
    return sums.reshape((WARPS, 2, 8)).permute((0, 2, 1)).reshape((WARPS * ROWS,))


@gluon.jit
def slot_result(sums, slot: gl.constexpr, given, choices, column, OUT: gl.constexpr, C, S):
    """A slot's weighted result, rounded before it is weighted; 0 if its expert is not here."""
    scale, factors, bias, row_scale = given
    PARTS: gl.constexpr = S.PARTS
    expert = expert_of(choices, slot, True)
    at = gl.maximum(expert, 0).to(gl.int64) * C.N + column
    acc = sums.index(slot * PARTS).load(column.type.layout)
    for part in gl.static_range(1, PARTS):
        acc += sums.index(slot * PARTS + part).load(column.type.layout)
    if C.RESTORE != 1.0:
        acc *= C.RESTORE
    if row_scale is not None:
        acc *= gl.load(row_scale + slot)
    if C.SCALED == "rows":
        acc *= gl.load(scale + at // C.SCALE_ROWS).to(gl.float32)
    if C.GLOBAL_ROWS > 0:
        acc *= gl.load(factors + at // C.GLOBAL_ROWS)
    if bias is not None:
        acc += gl.load(bias + at).to(gl.float32)
    acc = acc.to(OUT).to(gl.float32)
    if S.WEIGHTED:
        acc *= gl.load(choices.weights + slot).to(gl.float32)
    return gl.where(expert >= 0, acc, 0.0)


@gluon.jit(do_not_specialize=["num_ids", "num_experts"])
def hopper_decode_sum_kernel(
    h, stride_hm, words, stride_we, scale, zeros, bias, topk_weights, row_scale, out, factors,
    topk_ids, expert_map, num_ids, num_experts, C: gl.constexpr, S: gl.constexpr,
):  # fmt: skip
    """``out = sum_j weights[j] * round(row_scale[j] * h[j] @ decoded(w[e]).T + bias[e])``.

    ``e = ids[j]``.
    """
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    COLUMNS: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    DTYPE: gl.constexpr = h.dtype.element_ty
    OUT: gl.constexpr = out.dtype.element_ty
    COUNT: gl.constexpr = S.COUNT
    PASSES: gl.constexpr = S.PASSES
    vectors = gl.allocate_shared_memory(DTYPE, [S.ROUNDS, S.AHEAD * WARPS, UNIT], SWIZZLED)
    sums = gl.allocate_shared_memory(gl.float32, [PASSES, WARPS * ROWS], FLAT)
    choices = Choices(topk_ids, topk_weights, expert_map, num_ids, num_experts)
    unit, stored = gl.program_id(0), (words, stride_we, scale, zeros)
    if S.EARLY:
        begun = begin(stored, unit, choices, 0, C, S)
    take_turn()
    for number in gl.static_range(PASSES):
        if number > 0 or not S.EARLY:
            begun = begin(stored, unit, choices, number, C, S)
        sources, ready = begun
        copy_vectors(h, stride_hm, vectors, choices, number, C, S)
        sums.index(number).store(add_jobs(vectors, sources, ready, C, S))
        wait_for_group()  # before the vectors are overwritten, and before sums are read
    by_job = sums._reinterpret(gl.float32, [PASSES * WARPS, ROWS], FLAT)
    column = unit * ROWS + gl.arange(0, ROWS, layout=COLUMNS)
    given = scale, factors, bias, row_scale
    total = gl.full((ROWS,), 0, gl.float32, COLUMNS)
    for slot in gl.static_range(COUNT):
        total += slot_result(by_job, slot, given, choices, column, OUT, C, S)
    gl.store(out + column, total.to(OUT))
