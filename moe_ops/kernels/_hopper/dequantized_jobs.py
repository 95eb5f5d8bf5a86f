"""Products of few slots with packed weights, in jobs of a warp: the ring of copies, and the sums.

A program has eight warps. A job is the products of a part of K of a slot, for strips of 16 weight
rows, each a quarter of packed chunks. The first operand of a product has the rows of eight jobs,
the second a column for each, and the diagonal counts.

Threads copy chunks to shared memory with cp.async, rounds ahead: small problems whole, and weights
before the kernel that makes the rows has ended. A round is copied at once, as the compiler puts a
barrier between two copies to one allocation.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.core import _aggregate as aggregate

from moe_ops.dispatch import hopper_decode
from moe_ops.kernels._hopper.fragments import (
    UNIT,
    chunk_groups,
    dequantized,
    load_pairs,
    words_layout,
)
from moe_ops.kernels._hopper.memory import load_rows, reinterpret, wait_for_group
from moe_ops.kernels._hopper.ring import Ring, optional
from moe_ops.kernels._hopper.weights import expert_of

WARPS = gl.constexpr(hopper_decode.JOB_WARPS)
"""Warps of a program, and jobs of a pass."""
ROWS = gl.constexpr(hopper_decode.STRIP_ROWS)
"""Weight rows of a strip."""
OF_ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [hopper_decode.JOB_WARPS, 1], [1, 0]))
"""Layout ``(job, k)`` of rows that are copied."""
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))


@aggregate
class JobInputs:
    """Both operands in memory: rows, and a packed weight with its scales and zero points."""

    rows: gl.tensor
    row_stride: gl.tensor
    words: gl.tensor
    expert_stride: gl.tensor
    scales: gl.tensor
    zeros: gl.tensor | gl.constexpr

    @gluon.constexpr_function
    def __init__(self, rows, row_stride, words, expert_stride, scales, zeros):
        self.rows, self.row_stride = rows, row_stride
        self.words, self.expert_stride = words, expert_stride
        self.scales, self.zeros = scales, optional(zeros)


@gluon.jit
def make_ring(inputs, C: gl.constexpr, S: gl.constexpr):
    """Allocate the ring: rounds of chunks, each of which all threads wait for together."""
    WORDS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [4, 3, 2, 1, 0])
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    BUFFERS: gl.constexpr = S.BUFFERS
    CHUNKS: gl.constexpr = S.STRIPS * S.DEPTH
    DTYPE: gl.constexpr = inputs.rows.dtype.element_ty
    count: gl.constexpr = CHUNKS * (C.BITS // 4)
    words = gl.allocate_shared_memory(gl.int32, [BUFFERS, count, WARPS, 8, 4, 4], WORDS)
    rows = gl.allocate_shared_memory(DTYPE, [BUFFERS, S.DEPTH * WARPS, UNIT], SWIZZLED)
    scales, zeros = None, None
    groups: gl.constexpr = CHUNKS * chunk_groups(C)
    if C.SCALED == "weights":
        OF_SCALE: gl.constexpr = inputs.scales.dtype.element_ty
        scales = gl.allocate_shared_memory(OF_SCALE, [BUFFERS, groups, WARPS, ROWS], FLAT)
    if C.ZERO_BYTES > 0:
        NUMBERS: gl.constexpr = ROWS * C.BITS // 8
        zeros = gl.allocate_shared_memory(gl.uint8, [BUFFERS, groups, WARPS, NUMBERS], FLAT)
    return Ring(rows, words, scales, zeros, None, None)


@gluon.jit
def experts_of_jobs(choices, first, COUNT: gl.constexpr, LAYOUT: gl.constexpr, S: gl.constexpr):
    """The expert of each job, -1 for none, for every pass from ``first`` on.

    COUNT: a vector as long as the jobs, or longer to have them several times.
    """
    PASSES: gl.constexpr = S.PASSES
    number = gl.arange(0, COUNT, layout=LAYOUT) % WARPS
    experts = ()
    for i in gl.static_range(PASSES):
        slot = ((first + i) * WARPS + number) // S.PARTS
        experts += (expert_of(choices, slot, slot < S.COUNT),)
    return experts


@gluon.jit
def jobs_of(experts, first, step, S: gl.constexpr):
    """The slots of jobs, their experts, their first chunks of a round, and their chunks left."""
    LAYOUT: gl.constexpr = experts[0].type.layout
    COUNT: gl.constexpr = experts[0].shape[0]
    PASSES: gl.constexpr = S.PASSES
    number = gl.arange(0, COUNT, layout=LAYOUT) % WARPS
    which, turn, expert = 0, step, experts[0]
    if PASSES > 1:
        which, turn = step // S.ROUNDS, step % S.ROUNDS
        for i in gl.static_range(1, PASSES):
            expert = gl.where(which == i, experts[i], expert)
    job = (first + which) * WARPS + number
    done = turn * S.DEPTH
    chunk = job % S.PARTS * S.STEPS + done
    left = gl.where(expert < 0, 0, gl.minimum(S.STEPS - done, S.CHUNKS - chunk))
    return job // S.PARTS, expert, chunk, left


@gluon.constexpr_function
def alone(layout, axis, rank):
    """The layout of a vector along an axis of a layout."""
    for other in reversed(range(rank)):
        if other != axis:
            layout = gl.SliceLayout(other, layout)
    return layout


@gluon.constexpr_function
def round_layout():
    """Layout of words ``(piece, *words_layout)``: a thread has its words of every piece."""
    return gl.BlockedLayout([1, 1, 1, 1, 4], [1, 1, 8, 4, 1], [1, WARPS, 1, 1, 1], [4, 3, 2, 1, 0])


@gluon.jit
def strip_of(block, i, C: gl.constexpr, S: gl.constexpr):
    """A program's i-th strip of weight rows: neighbours, or first of gate rows, then of up rows."""
    HALF: gl.constexpr = S.STRIPS // 2
    if C.APART > 0:
        strip = block * HALF + i % HALF + i // HALF * (C.APART * UNIT // ROWS)
    else:
        strip = block * S.STRIPS + i
    return strip


@gluon.jit
def copy_words(inputs, ring, jobs, buffer, block, C: gl.constexpr, S: gl.constexpr):
    """Copy the words of a round: of each strip, of each chunk, all pieces."""
    L: gl.constexpr = round_layout()
    OF_PIECE: gl.constexpr = alone(L, 0, 5)
    PIECES: gl.constexpr = C.BITS // 4
    COUNT: gl.constexpr = S.STRIPS * S.DEPTH * PIECES
    _, expert, chunk, left = jobs
    piece = gl.arange(0, COUNT, layout=OF_PIECE)
    strip = strip_of(block, piece // (S.DEPTH * PIECES), C, S)
    i = piece // PIECES % S.DEPTH
    of_strip = strip // 4 * (S.CHUNKS * PIECES * 512) + strip % 4 * 128
    of_piece = of_strip + piece % (S.DEPTH * PIECES) * 512
    pair = gl.arange(0, 8, layout=alone(L, 2, 5))[None, None, :, None, None]
    column = gl.arange(0, 4, layout=alone(L, 3, 5))[None, None, None, :, None]
    tile = gl.arange(0, 4, layout=alone(L, 4, 5))[None, None, None, None, :]
    inside = pair * 16 + column * 4 + tile
    at = gl.maximum(expert, 0).to(gl.int64) * inputs.expert_stride + chunk * (PIECES * 512)
    source = inputs.words + at[None, :, None, None, None] + of_piece[:, None, None, None, None]
    mask = i[:, None, None, None, None] < left[None, :, None, None, None]
    load_rows(ring.weights.index(buffer), source + inside, mask=mask)


@gluon.constexpr_function
def groups_layout(NUMBERS, BYTES):
    """Layout ``(group, warp, number)`` in which threads copy up to 16 bytes."""
    wide = min(16 // BYTES, NUMBERS)
    lanes = NUMBERS // wide
    return gl.BlockedLayout([1, 1, wide], [4 // lanes, 8, lanes], [WARPS, 1, 1], [2, 1, 0])


@gluon.jit
def copy_groups(
    x, memory, jobs, buffer, block, BYTES: gl.constexpr, C: gl.constexpr, S: gl.constexpr
):  # fmt: skip
    """Copy the scales or the zero points ``(E, G, ..)`` of a round; BYTES: of a number."""
    NUMBERS: gl.constexpr = memory.shape[3]
    L: gl.constexpr = groups_layout(NUMBERS, BYTES)
    GROUPS: gl.constexpr = chunk_groups(C)
    OF_STRIP: gl.constexpr = S.DEPTH * GROUPS
    WIDTH: gl.constexpr = C.WEIGHT_ROWS * NUMBERS // ROWS
    _, expert, chunk, left = jobs
    piece = gl.arange(0, S.STRIPS * OF_STRIP, layout=alone(L, 0, 3))
    strip = strip_of(block, piece // OF_STRIP, C, S)
    i = piece % OF_STRIP // GROUPS
    number = gl.arange(0, NUMBERS, layout=alone(L, 2, 3))[None, None, :]
    group = (chunk[None, :] + i[:, None]) * UNIT // C.COLS + (piece % GROUPS)[:, None]
    at = (gl.maximum(expert, 0).to(gl.int64) * (S.GROUPS * WIDTH))[None, :] + group * WIDTH
    source = x + at[:, :, None] + (strip * NUMBERS)[:, None, None]
    mask = (i[:, None] < left[None, :])[:, :, None]
    load_rows(memory.index(buffer), source + number, mask=mask)


@gluon.jit
def copy_columns(inputs, ring, experts, first, step, C: gl.constexpr, S: gl.constexpr):
    """Copy the rows of a round: a column of each chunk's second operand for each job."""
    slot, expert, chunk, left = jobs_of(experts[3], first, step, S)
    i = gl.arange(0, S.DEPTH * WARPS, layout=alone(OF_ROWS, 0, 2)) // WARPS
    k = gl.arange(0, UNIT, layout=alone(OF_ROWS, 1, 2))[None, :]
    at = (chunk + i)[:, None] * UNIT + k
    row = inputs.rows + (slot // C.TOP_K).to(gl.int64)[:, None] * inputs.row_stride
    mask = (i < left)[:, None] & (at < C.K)
    load_rows(ring.rows.index(step % S.BUFFERS), row + at, mask=mask)


@gluon.jit
def find_experts(choices, first, C: gl.constexpr, S: gl.constexpr):
    """The experts of jobs in each layout in which something is copied."""
    OF_WORDS: gl.constexpr = alone(round_layout(), 1, 5)
    OF_SCALES: gl.constexpr = alone(groups_layout(ROWS, C.SCALE_BITS // 8), 1, 3)
    OF_ZEROS: gl.constexpr = alone(groups_layout(ROWS * C.BITS // 8, 1), 1, 3)
    words = experts_of_jobs(choices, first, WARPS, OF_WORDS, S)
    rows = experts_of_jobs(choices, first, S.DEPTH * WARPS, alone(OF_ROWS, 0, 2), S)
    scales, zeros = (), ()
    if C.SCALED == "weights":
        scales = experts_of_jobs(choices, first, WARPS, OF_SCALES, S)
    if C.ZERO_BYTES > 0:
        zeros = experts_of_jobs(choices, first, WARPS, OF_ZEROS, S)
    return words, scales, zeros, rows


@gluon.jit
def copy_weights(inputs, ring, experts, first, step, block, C: gl.constexpr, S: gl.constexpr):
    """Copy the weights of a round, with their scales and zero points."""
    words, scales, zeros, _ = experts
    buffer = step % S.BUFFERS
    copy_words(inputs, ring, jobs_of(words, first, step, S), buffer, block, C, S)
    if C.SCALED == "weights":
        jobs = jobs_of(scales, first, step, S)
        copy_groups(inputs.scales, ring.scales, jobs, buffer, block, C.SCALE_BITS // 8, C, S)
    if C.ZERO_BYTES > 0:
        jobs = jobs_of(zeros, first, step, S)
        copy_groups(inputs.zeros, ring.zeros, jobs, buffer, block, 1, C, S)


@gluon.jit
def copy_round(inputs, ring, experts, first, step, block, C: gl.constexpr, S: gl.constexpr):
    """Start to copy both operands of a round."""
    copy_columns(inputs, ring, experts, first, step, C, S)
    copy_weights(inputs, ring, experts, first, step, block, C, S)


@gluon.jit
def begin(inputs, ring, experts, first, block, C: gl.constexpr, S: gl.constexpr):
    """Start to copy the first rounds."""
    for step in range(S.FIRST):
        copy_round(inputs, ring, experts, first, step, block, C, S)
        async_copy.commit_group()


@gluon.jit
def begin_weights(inputs, ring, experts, first, block, C: gl.constexpr, S: gl.constexpr):
    """Start to copy the weights of the first rounds."""
    for step in range(S.FIRST):
        copy_weights(inputs, ring, experts, first, step, block, C, S)


@gluon.jit
def begin_columns(inputs, ring, experts, first, C: gl.constexpr, S: gl.constexpr):
    """Copy the columns of the first rounds, and wait for everything."""
    for step in range(S.FIRST):
        copy_columns(inputs, ring, experts, first, step, C, S)
    async_copy.commit_group()
    async_copy.wait_group(0)


@gluon.jit
def load_chunk(ring, strip, i: gl.constexpr, C: gl.constexpr, S: gl.constexpr):
    """Chunk i of a strip of the ring, as `decoded` takes it."""
    DEPTH: gl.constexpr = S.DEPTH
    GROUPS: gl.constexpr = chunk_groups(C)
    PIECES: gl.constexpr = C.BITS // 4
    at = strip * DEPTH + i
    words, scale, zero = (), (), ()
    WORDS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    ALL: gl.constexpr = [S.BUFFERS * S.STRIPS * DEPTH * PIECES, WARPS, 8, 4, 4]
    stored = reinterpret(ring.weights, gl.int32, ALL, WORDS)
    for piece in gl.static_range(PIECES):
        words += (stored.index(at * PIECES + piece).load(words_layout(WARPS)),)
    COUNT: gl.constexpr = S.BUFFERS * S.STRIPS * DEPTH * GROUPS
    if C.SCALED == "weights":
        for j in gl.static_range(GROUPS):
            scale += (load_pairs(ring.scales, at * GROUPS + j, COUNT, 2 * C.SCALE_BITS, WARPS),)
    if C.ZERO_BYTES > 0:
        for j in gl.static_range(GROUPS):
            zero += (load_pairs(ring.zeros, at * GROUPS + j, COUNT, 2 * C.BITS, WARPS),)
    return words, scale, zero


@gluon.jit
def add_round(ring, buffer, sums, C: gl.constexpr, S: gl.constexpr):
    """Add a round's products to the sums of each strip."""
    LAYOUT: gl.constexpr = sums[0].type.layout
    DOT: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
    DEPTH: gl.constexpr = S.DEPTH
    STRIPS: gl.constexpr = S.STRIPS
    for i in gl.static_range(DEPTH):
        rows = ring.rows.index(buffer).slice(i * WARPS, WARPS, 0).permute((1, 0))
        rows = rows.load(gl.DotOperandLayout(1, LAYOUT, 2))
        more = ()
        for s in gl.static_range(STRIPS):
            w = dequantized(load_chunk(ring, buffer * STRIPS + s, i, C, S), ring.rows.dtype, DOT, C)
            more += (mma_v2(w, rows, sums[s]),)
        sums = more
    return sums


@gluon.jit
def diagonal(acc):
    """The sums of each job's rows with its own column, in the order of the weight's rows."""
    L: gl.constexpr = acc.type.layout
    row = gl.arange(0, WARPS * ROWS, layout=gl.SliceLayout(1, L))[:, None] // ROWS
    column = gl.arange(0, WARPS, layout=gl.SliceLayout(0, L))[None, :]
    sums = gl.sum(gl.where(row == column, acc, 0.0), 1)
    return sums.reshape((WARPS, 2, 8)).permute((0, 2, 1)).reshape((WARPS * ROWS,))


@gluon.jit
def add_jobs(inputs, ring, sums, experts, first, block, C: gl.constexpr, S: gl.constexpr):
    """Store the sums of the rows of each job: ``(PASSES * STRIPS, WARPS * ROWS)`` float32.

    The first rounds are there or under way. A round is copied when the last reader of what it
    overwrites has passed the barrier.
    """
    L: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    STRIPS: gl.constexpr = S.STRIPS
    TOTAL: gl.constexpr = S.PASSES * S.ROUNDS
    zero = gl.full((WARPS * ROWS, WARPS), 0, gl.float32, L)
    for number in range(S.PASSES):
        acc = (zero,) * STRIPS
        for i in range(S.ROUNDS):
            step = number * S.ROUNDS + i
            async_copy.wait_group(S.FIRST - 1)
            wait_for_group()
            if S.FIRST < TOTAL and step + S.FIRST < TOTAL:
                copy_round(inputs, ring, experts, first, step + S.FIRST, block, C, S)
            async_copy.commit_group()
            acc = add_round(ring, step % S.BUFFERS, acc, C, S)
        for s in gl.static_range(STRIPS):
            sums.index(number * STRIPS + s).store(diagonal(acc[s]))
    wait_for_group()


@gluon.jit
def add_parts(sums, first, PARTS: gl.constexpr, LAYOUT: gl.constexpr):
    """The sum of a strip's rows over neighbouring jobs, whose sums lie in shared memory."""
    acc = sums.index(first).load(LAYOUT)
    for part in gl.static_range(1, PARTS):
        acc += sums.index(first + part).load(LAYOUT)
    return acc
