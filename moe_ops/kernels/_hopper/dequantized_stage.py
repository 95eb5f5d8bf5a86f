"""Stages of the kernels that dequantize weights in registers: allocation, copies and loads.

A stage has the words of a tile's units of 64 weight rows for `CHUNKS` chunks along K, their scales
and zero points, and rows of tokens. TMA copies everything of the weight, each kind as one box.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
)

from moe_ops.kernels._hopper.fragments import (
    PAIRS,
    UNIT,
    WORDS,
    chunk_groups,
    load_pairs,
    pair_type,
)
from moe_ops.kernels._hopper.memory import load_box, reinterpret
from moe_ops.kernels._hopper.ring import Ring, make_barriers

CHUNKS = gl.constexpr(2)
"""Chunks of 64 numbers along K in a stage."""
GROUP_THREADS = gl.constexpr(128)
"""Threads of a multiplying warp group, each of which releases a stage."""


@gluon.jit
def allocate_boxes(desc, COUNT: gl.constexpr, PLACES: gl.constexpr):
    """Shared memory for boxes of a TMA descriptor, each with PLACES boxes of room."""
    shape: gl.constexpr = [COUNT * PLACES]
    return gl.allocate_shared_memory(desc.dtype, shape + desc.block_shape, desc.layout)


@gluon.jit
def make_ring(DTYPE: gl.constexpr, descs, FILLING: gl.constexpr, C: gl.constexpr):
    """Allocate the ring, whose stages are full after FILLING arrivals.

    ``descs``: the TMA descriptors of words, scales and zero points; DTYPE: of the rows.
    """
    w_desc, scale_desc, zero_desc = descs
    STAGES: gl.constexpr = C.STAGES
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(UNIT * C.ROW_ITEM, 8 * C.ROW_ITEM, rank=2)
    shape: gl.constexpr = [STAGES, CHUNKS * C.BLOCK_M, UNIT]
    rows = gl.allocate_shared_memory(DTYPE, shape, SWIZZLED)
    words = allocate_boxes(w_desc, STAGES, 1)
    scales, zeros = None, None
    if C.STAGE_GROUPS > 0:
        scales = allocate_boxes(scale_desc, STAGES, C.SCALE_PLACES)
    if C.ZERO_BYTES > 0:
        zeros = allocate_boxes(zero_desc, STAGES, C.ZERO_PLACES)
    barriers = make_barriers(STAGES, FILLING, C.GROUPS * GROUP_THREADS)
    fence_async_shared()
    return Ring(rows, words, scales, zeros, *barriers)


@gluon.jit
def unit_of(n, unit: gl.constexpr, C: gl.constexpr):
    """Number of a tile's unit of 64 weight rows; a warp group has one or two consecutive units.

    Units are neighbours in the weight, or a warp group has a unit of gate rows and the unit of
    their up rows. A MIXED unit has 32 gate rows and their up rows.
    """
    if C.APART > 0 and not C.MIXED:
        number = n * C.GROUPS + unit // C.UNITS + unit % C.UNITS * C.APART
    else:
        number = n * C.STAGE_UNITS + unit
    return number


@gluon.jit
def copy_weights(descs, ring, stage, place, full, C: gl.constexpr):
    """Copy a stage's words, scales and zero points, each as one box: see `decode_gemm`."""
    w_desc, scale_desc, zero_desc = descs
    expert, n, k = place
    OF_HALF: gl.constexpr = C.STAGE_UNITS // C.HALVES
    unit, group = n * OF_HALF, k * CHUNKS * UNIT // C.COLS if C.COLS > 0 else 0
    at = [expert, 0, unit, k * CHUNKS * (C.BITS // 2), 0]
    load_box(w_desc, at, full, ring.weights.index(stage))
    if C.STAGE_GROUPS > 0:
        at = [expert, group, 0, unit * UNIT]
        load_box(scale_desc, at, full, ring.scales.index(stage * C.SCALE_PLACES))
    if C.ZERO_BYTES > 0:
        at = [expert, group, 0, unit * C.ZERO_BYTES]
        load_box(zero_desc, at, full, ring.zeros.index(stage * C.ZERO_PLACES))


@gluon.jit
def load_groups(
    memory, stage, chunk: gl.constexpr, unit: gl.constexpr,
    PLACES: gl.constexpr, BITS: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Scales or zero points of a unit's chunk, for each of its groups.

    PLACES: boxes of room for a stage. BITS: of what two rows have.
    """
    GROUPS: gl.constexpr = chunk_groups(C)
    COUNT: gl.constexpr = C.STAGES * PLACES * C.STAGE_GROUPS
    first = stage * (PLACES * C.STAGE_GROUPS) + chunk * (C.STAGE_GROUPS // 2)
    groups = ()
    for group in gl.static_range(GROUPS):
        if C.MIXED:
            groups += (load_mixed(memory, first + group, unit, COUNT, BITS),)
        else:
            at = (first + group) * C.STAGE_UNITS + place_of(unit, C)
            groups += (load_pairs(memory, at, COUNT * C.STAGE_UNITS, BITS, 4),)
    return groups


@gluon.jit
def load_words(ring, stage, chunk: gl.constexpr, unit: gl.constexpr, C: gl.constexpr):
    """The words of a unit's chunk: one part with 4 bits, two with 8."""
    PARTS: gl.constexpr = C.BITS // 4
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    ALL: gl.constexpr = [C.STAGES * C.STAGE_UNITS * CHUNKS * PARTS, 4, 8, 4, 4]
    words = ()
    for part in gl.static_range(PARTS):
        if C.MIXED:
            words += (load_mixed_words(ring.weights, stage, chunk * PARTS + part, unit, C),)
        else:
            first = (stage * C.STAGE_UNITS + place_of(unit, C)) * CHUNKS + chunk
            view = reinterpret(ring.weights, gl.int32, ALL, FLAT)
            words += (view.index(first * PARTS + part).load(WORDS),)
    return words


@gluon.jit
def load_mixed_words(words, stage, part: gl.constexpr, unit: gl.constexpr, C: gl.constexpr):
    """A part of the words of 32 gate rows and their up rows, whose halves are apart."""
    PARTS: gl.constexpr = CHUNKS * C.BITS // 4
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [5, 4, 3, 2, 1, 0])
    LAYOUT: gl.constexpr = gl.BlockedLayout(
        [1, 1, 1, 1, 1, 4], [1, 1, 1, 1, 8, 4], [2, 1, 1, 2, 1, 1], [5, 4, 3, 2, 1, 0]
    )
    view = reinterpret(words, gl.int32, [C.STAGES, 2, PARTS, 2, 2, 8, 16], FLAT).index(stage)
    both = view.slice(part, 1, 1).slice(unit, 1, 2).load(LAYOUT)
    return gl.convert_layout(both.reshape((4, 8, 4, 4)), WORDS, assert_trivial=True)


@gluon.jit
def load_mixed(memory, group, unit: gl.constexpr, COUNT: gl.constexpr, BITS: gl.constexpr):
    """What each two of such rows have in a group, as `load_pairs` loads it."""
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    LANES: gl.constexpr = [[0, 0, 0], [0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 0, 4]]
    WARPS: gl.constexpr = [[0, 0, 8], [1, 0, 0]]
    LAYOUT: gl.constexpr = gl.DistributedLinearLayout([], LANES, WARPS, [], [2, 1, 16])
    view = reinterpret(memory, pair_type(BITS), [COUNT, 2, 2, 16], FLAT).index(group)
    both = view.slice(unit, 1, 1).load(LAYOUT)
    return gl.convert_layout(both.reshape((4, 8)), gl.SliceLayout(2, PAIRS), assert_trivial=True)


@gluon.constexpr_function
def place_of(unit, C):
    """The place of a unit in a stage's box: gate units come before up units."""
    return unit % C.UNITS * C.GROUPS + unit // C.UNITS if C.APART > 0 else unit


@gluon.jit
def load_scales(ring, stage, chunk: gl.constexpr, unit: gl.constexpr, C: gl.constexpr):
    """The scales of a unit's chunk, for each of its groups."""
    BITS: gl.constexpr = 2 * C.SCALE_BITS
    return load_groups(ring.scales, stage, chunk, unit, C.SCALE_PLACES, BITS, C)


@gluon.jit
def load_chunk(ring, stage, chunk: gl.constexpr, unit: gl.constexpr, C: gl.constexpr):
    """The words, the scales and the zero points of a unit's chunk, as `decoded` takes them."""
    scale, zero = (), ()
    if C.SCALED == "weights":
        scale = load_scales(ring, stage, chunk, unit, C)
    if C.ZERO_BYTES > 0:
        zero = load_groups(ring.zeros, stage, chunk, unit, C.ZERO_PLACES, 2 * C.BITS, C)
    return load_words(ring, stage, chunk, unit, C), scale, zero
