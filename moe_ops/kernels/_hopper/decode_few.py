"""Gluon kernel of the expert GEMMs with packed weights for few rows on Hopper.

The weights of a tile are copied as they are packed (`scheme.packed`), decoded in registers
(`fragments`), and multiplied as the first operand of a matrix instruction; rows of tokens are the
second operand. So a weight is read once from memory and once from shared memory, and never written.

Two or four warps copy: weights and scales as TMA boxes, the rows of a tile's slots with cp.async,
as they may lie anywhere. A warp group decodes, multiplies and stores. Several CTAs fit on an SM:
while one decodes, another waits for memory. With 64 rows that is only two, so each has two
multiplying warp groups, which share its rows and have one unit of weight rows each.

Source: the structure of `stream`, with the register operand that humming and triton_kernels use.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate

from moe_ops.kernels._gemm.tile import COUNTED
from moe_ops.kernels._hopper.decode_store import store_units
from moe_ops.kernels._hopper.fragments import (
    UNIT,
    WORDS,
    decoded,
    load_scales,
    load_zeros,
    scale_rows,
)
from moe_ops.kernels._hopper.packed import load_box
from moe_ops.kernels._hopper.schedule import find_tile
from moe_ops.kernels._hopper.slots import Vectors, count_tiles, expert_of, slots_of
from moe_ops.kernels._hopper.stream import load_rows, load_slots
from moe_ops.kernels._runtime.dependent import take_turn

CHUNKS = gl.constexpr(2)
"""Chunks of 64 numbers along K in a stage."""
ALONE = gl.constexpr(16)
"""Up to so many rows each warp multiplies by itself (mma.sync), and waits for no other warp."""


@gluon.constexpr_function
def copying_warps(rows):
    """Number of copying warps: each repeats a stage's address arithmetic; fewer spill registers."""
    return 2 if rows <= ALONE else 4


@aggregate
class Ring:
    """Ring of tiles in shared memory, with its barriers: see `products.Ring`."""

    rows: gl.shared_memory_descriptor
    words: gl.shared_memory_descriptor
    scales: gl.shared_memory_descriptor
    zeros: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, rows, words, scales, zeros, full, empty):
        self.rows, self.words, self.scales, self.zeros = rows, words, scales, zeros
        self.full, self.empty = full, empty


@gluon.jit
def allocate_boxes(desc, COUNT: gl.constexpr, PLACES: gl.constexpr):
    """Shared memory for boxes of a TMA descriptor, each with PLACES boxes of room."""
    shape: gl.constexpr = [COUNT * PLACES]
    return gl.allocate_shared_memory(desc.dtype, shape + desc.block_shape, desc.layout)


@gluon.jit
def unit_of(n, unit: gl.constexpr, C: gl.constexpr):
    """A tile's units of 64 weight rows: neighbours, or one of gate rows and one of up rows.

    MIXED ones have 32 gate rows and their up rows each, and are numbered in their order.
    """
    APART: gl.constexpr = C.APART > 0 and not C.MIXED
    found = n + unit * C.APART if APART else n * C.STAGE_UNITS + unit
    return found


@gluon.jit
def copy_unit(descs, ring, box, place, full, C: gl.constexpr):
    """Copy a unit's part of a stage: words, scales and zero points."""
    w_desc, scale_desc, zero_desc = descs
    expert, unit, k = place
    if C.MIXED:
        at = [expert, unit // 2, k * CHUNKS * (C.BITS // 4), 0, unit % 2 * 256]
    else:
        at = [expert, unit, k * CHUNKS, 0, 0]
    load_box(w_desc, at, full, ring.words.index(box))
    if C.STAGE_GROUPS > 0:
        at = group_at(expert, k, unit, UNIT, C)
        load_box(scale_desc, at, full, ring.scales.index(box * C.SCALE_PLACES))
    if C.ZERO_BYTES > 0:
        at = group_at(expert, k, unit, C.ZERO_BYTES, C)
        load_box(zero_desc, at, full, ring.zeros.index(box * C.ZERO_PLACES))


@gluon.jit
def group_at(expert, k, unit, WIDTH: gl.constexpr, C: gl.constexpr):
    """Where a unit's scales or zero points of a stage are; WIDTH: entries of a group."""
    group = k * CHUNKS * UNIT // C.COLS
    return (expert, group, 0, unit * (WIDTH // 2)) if C.MIXED else (expert, group, unit * WIDTH)


@gluon.jit
def copy_tiles(a, stride_am, w_desc, scale_desc, zero_desc, ring, v, C: gl.constexpr):
    """The copying warps: copy every tile of both operands, in the order of the products."""
    WARPS: gl.constexpr = copying_warps(C.BLOCK_M)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    UNITS: gl.constexpr = C.STAGE_UNITS
    descs = w_desc, scale_desc, zero_desc
    step = gl.to_tensor(0)
    for tile in range(gl.program_id(0), v.num_tiles * C.NUM_N, gl.num_programs(0)):
        m, n = find_tile(tile, v.num_tiles, C)
        expert = expert_of(v, m)
        slot, real = load_slots(v, m, gl.SliceLayout(1, LAYOUT), C)
        col = gl.arange(0, UNIT, layout=gl.SliceLayout(0, LAYOUT))[None, :]
        row = a + (slot // C.TOP_K).to(gl.int64)[:, None] * stride_am
        for k in range(C.STEPS):
            stage = step % C.STAGES
            mbarrier.wait(ring.empty.index(stage), (step // C.STAGES + 1) & 1)
            full = ring.full.index(stage)
            mbarrier.expect(full, C.STAGE_BYTES)
            for i in gl.static_range(UNITS):
                place = expert, unit_of(n, i, C), k
                copy_unit(descs, ring, stage * UNITS + i, place, full, C)
            for chunk in gl.static_range(CHUNKS):
                first = (k * CHUNKS + chunk) * UNIT
                inside = real[:, None] & (first + col < C.K)
                load_rows(ring.rows.index(stage * CHUNKS + chunk), row + first + col, mask=inside)
            async_copy.mbarrier_arrive(full, increment_count=False)
            step += 1


@gluon.jit
def load_chunk(ring, stage, chunk: gl.constexpr, unit: gl.constexpr, C: gl.constexpr):
    """The words, the scales and the zero points of a unit's chunk, as `decoded` takes them."""
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    PARTS: gl.constexpr = C.BITS // 4
    shape: gl.constexpr = [C.STAGES * C.STAGE_UNITS * CHUNKS * PARTS, 4, 8, 4, 4]
    view = ring.words._reinterpret(gl.int32, shape, FLAT)
    box = stage * C.STAGE_UNITS + unit
    words, scale, zero = (), (), ()
    for part in gl.static_range(PARTS):
        words += (view.index((box * CHUNKS + chunk) * PARTS + part).load(WORDS),)
    if C.SCALED == "weights":
        scale = load_scales(ring.scales, box, chunk, C)
    if C.ZERO_BYTES > 0:
        zero = load_zeros(ring.zeros, box, chunk, C)
    return words, scale, zero


@gluon.jit
def add_alone(ring, stage, sums, C: gl.constexpr):
    """Add the products of a stage to ``sums``, one for each unit: each warp by itself."""
    LAYOUT: gl.constexpr = sums[0].type.layout
    DOT: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
    ROWS: gl.constexpr = sums[0].shape[1]
    DTYPE: gl.constexpr = ring.rows.dtype
    sum0, sum1 = sums[0], sums[1]
    for chunk in gl.static_range(CHUNKS):
        rows = ring.rows.index(stage * CHUNKS + chunk).slice(0, ROWS, 0).permute((1, 0))
        rows = rows.load(gl.DotOperandLayout(1, LAYOUT, 2))
        w0 = decoded(load_chunk(ring, stage, chunk, 0, C), DTYPE, DOT, C)
        sum0 = mma_v2(w0, rows, sum0)
        w1 = decoded(load_chunk(ring, stage, chunk, 1, C), DTYPE, DOT, C)
        sum1 = mma_v2(w1, rows, sum1)
    return sum0, sum1


@gluon.jit
def add_together(ring, stage, sums, FIRST: gl.constexpr, C: gl.constexpr):
    """Add the products of the units from FIRST on to ``sums``: by the whole warp group.

    While the product of one unit is under way, the weights of the other are decoded. Words are
    loaded one product ahead, so that loads and products overlap.
    """
    LAYOUT: gl.constexpr = sums[0].type.layout
    DOT: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
    ROWS: gl.constexpr = sums[0].shape[1]
    DTYPE: gl.constexpr = ring.rows.dtype
    sum0, p1 = sums[0], warpgroup_mma_init(sums[1])
    next0 = load_chunk(ring, stage, 0, FIRST, C)
    for chunk in gl.static_range(CHUNKS):
        rows = ring.rows.index(stage * CHUNKS + chunk).slice(0, ROWS, 0).permute((1, 0))
        next1 = load_chunk(ring, stage, chunk, FIRST + 1, C)
        w0 = decoded(next0, DTYPE, DOT, C)
        p0 = warpgroup_mma(w0, rows, sum0, is_async=True)
        if chunk + 1 < CHUNKS:
            next0 = load_chunk(ring, stage, chunk + 1, FIRST, C)
        sum1 = warpgroup_mma_wait(1, [p1])
        w1 = decoded(next1, DTYPE, DOT, C)
        p1 = warpgroup_mma(w1, rows, sum1, is_async=True)
        sum0 = warpgroup_mma_wait(1, [p0])
    return sum0, warpgroup_mma_wait(0, [p1])


@gluon.jit
def add_unit(ring, stage, acc, unit: gl.constexpr, C: gl.constexpr):
    """Add the products of one unit to ``acc``: by the whole warp group.

    While the product of a chunk is under way, the weights of the next one are decoded.
    """
    LAYOUT: gl.constexpr = acc.type.layout
    DOT: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
    ROWS: gl.constexpr = acc.shape[1]
    DTYPE: gl.constexpr = ring.rows.dtype
    p = warpgroup_mma_init(acc)
    coming = load_chunk(ring, stage, 0, unit, C)
    for chunk in gl.static_range(CHUNKS):
        rows = ring.rows.index(stage * CHUNKS + chunk).slice(0, ROWS, 0).permute((1, 0))
        w = decoded(coming, DTYPE, DOT, C)
        if chunk + 1 < CHUNKS:
            coming = load_chunk(ring, stage, chunk + 1, unit, C)
        p = warpgroup_mma(w, rows, p, is_async=True)
    return warpgroup_mma_wait(0, [p])


@gluon.jit
def add_stage(ring, stage, sums, GROUP: gl.constexpr, C: gl.constexpr):
    """Add the products of a stage to ``sums``, which may be scaled."""
    LAYOUT: gl.constexpr = sums[0].type.layout
    parts = sums
    if C.SCALED == "sums":
        zero = gl.full(sums[0].shape, 0, gl.float32, LAYOUT)
        parts = (zero, zero)
    if sums[0].shape[1] <= ALONE:
        parts = add_alone(ring, stage, parts, C)
    else:
        fence_async_shared()  # threads wrote the rows, WGMMA reads through the async proxy
        if C.UNITS == 1:
            parts = (add_unit(ring, stage, parts[0], GROUP, C),)
        else:
            parts = add_together(ring, stage, parts, 0, C)
    if C.SCALED == "sums":
        scale0 = scale_rows(ring.scales, stage * C.UNITS, LAYOUT, C)
        scale1 = scale_rows(ring.scales, stage * C.UNITS + 1, LAYOUT, C)
        parts = sums[0] + parts[0] * scale0[:, None], sums[1] + parts[1] * scale1[:, None]
    return parts


@gluon.jit
def release(ring, stage):
    """Let the copying warps overwrite a stage whose words threads have loaded.

    Without the fence, TMA may overwrite words before their loads are performed: a load that was
    issued can wait behind loads from memory of other CTAs (seen on an H200).
    """
    fence_async_shared()  # words were loaded by threads, TMA writes through the async proxy
    mbarrier.arrive(ring.empty.index(stage))


@gluon.jit
def add_tile(step, ring, sums, GROUP: gl.constexpr, C: gl.constexpr):
    """Main loop: add the products of all stages of a tile."""
    for _ in range(C.STEPS):
        stage = step % C.STAGES
        mbarrier.wait(ring.full.index(stage), (step // C.STAGES) & 1)
        sums = add_stage(ring, stage, sums, GROUP, C)
        release(ring, stage)
        step += 1
    return sums, step


@gluon.constexpr_function
def sums_layout(rows):
    """The layout of a unit's sums over tiles of so many rows."""
    if rows <= ALONE:
        return gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, rows, 16])


@gluon.jit
def multiply_tile(
    out, added, ring, v, tile, step, ROWS: gl.constexpr, GROUP: gl.constexpr, C: gl.constexpr
):  # fmt: skip
    """Compute and store the first ROWS rows of a tile; return the next step of the ring."""
    LAYOUT: gl.constexpr = sums_layout(ROWS)
    m, n = tile
    expert = expert_of(v, m)
    zero = gl.full((UNIT, ROWS), 0, gl.float32, LAYOUT)
    sums = (zero,) if C.UNITS == 1 else (zero, zero)
    sums, step = add_tile(step, ring, sums, GROUP, C)
    slot, real = slots_of(v, m, gl.arange(0, ROWS, layout=gl.SliceLayout(0, LAYOUT)), C)
    slot = gl.where(real & (expert >= 0), slot, -1)
    units = (unit_of(n, GROUP, C),) if C.UNITS == 1 else (unit_of(n, 0, C), unit_of(n, 1, C))
    bias, weights, row_scale = added
    scale = None
    if row_scale is not None:
        scale = gl.load(row_scale + slot // C.TOP_K, mask=slot >= 0, other=0.0)
    store_units(out, bias, weights, scale, sums, units, slot, expert, v, C)
    return step


@gluon.jit
def multiply(out, added, ring, v, GROUP: gl.constexpr, C: gl.constexpr):
    """A multiplying warp group: compute and store its units of every tile of this program.

    Padding rows come last in a tile. If they are the half of it, that half is left out.
    """
    HALF: gl.constexpr = C.BLOCK_M // 2
    step = gl.to_tensor(0)
    first = gl.program_id(0)
    if v.num_ids is None:
        more = needs_more(first, v, C)
        for index in range(first, v.num_tiles * C.NUM_N, gl.num_programs(0)):
            soon = needs_more(index + gl.num_programs(0), v, C)
            tile = find_tile(index, v.num_tiles, C)
            if more:
                step = multiply_tile(out, added, ring, v, tile, step, C.BLOCK_M, GROUP, C)
            else:
                step = multiply_tile(out, added, ring, v, tile, step, HALF, GROUP, C)
            more = soon
    else:  # a tile has one slot
        for index in range(first, v.num_tiles * C.NUM_N, gl.num_programs(0)):
            tile = find_tile(index, v.num_tiles, C)
            step = multiply_tile(out, added, ring, v, tile, step, HALF, GROUP, C)


@gluon.jit
def multiply_first(out, added, ring, v, C: gl.constexpr):
    """See `multiply`."""
    multiply(out, added, ring, v, 0, C)


@gluon.jit
def multiply_second(out, added, ring, v, C: gl.constexpr):
    """See `multiply`."""
    multiply(out, added, ring, v, 1, C)


@gluon.jit
def needs_more(index, v, C: gl.constexpr):
    """Whether more than half of a planned tile's rows are real; any answer after the last tile."""
    last = gl.maximum(v.num_tiles * C.NUM_N - 1, 0)
    m, _ = find_tile(gl.minimum(index, last), gl.maximum(v.num_tiles, 1), C)
    _, more = slots_of(v, m, C.BLOCK_M // 2, C)
    return more


@gluon.jit(do_not_specialize=COUNTED)
def hopper_decode_few_kernel(
    a, stride_am, w_desc, scale_desc, zero_desc, bias, topk_weights, row_scale, out, global_scale,
    weight_scale, tiles, expert_map, num_slots, num_ids, num_experts, num_entries, C: gl.constexpr,
):  # fmt: skip
    """``out[s] = f(row_scale[s // TOP_K] * a[s // TOP_K] @ decoded(w[e]).T + bias[e])``."""
    STAGES: gl.constexpr = C.STAGES
    COPYING: gl.constexpr = copying_warps(C.BLOCK_M)
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    shape: gl.constexpr = [STAGES * CHUNKS, C.BLOCK_M, UNIT]
    rows = gl.allocate_shared_memory(a.dtype.element_ty, shape, SWIZZLED)
    boxes: gl.constexpr = STAGES * C.STAGE_UNITS
    words = allocate_boxes(w_desc, boxes, 1)
    scales, zeros = words, words
    if C.STAGE_GROUPS > 0:
        scales = allocate_boxes(scale_desc, boxes, C.SCALE_PLACES)
    if C.ZERO_BYTES > 0:
        zeros = allocate_boxes(zero_desc, boxes, C.ZERO_PLACES)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1 + 32 * COPYING)
        mbarrier.init(empty.index(stage), count=C.GROUPS)
    fence_async_shared()
    ring = Ring(rows, words, scales, zeros, full, empty)
    take_turn()
    num_tiles = count_tiles(tiles, num_slots, num_ids, num_entries, C)
    scales = global_scale, weight_scale
    v = Vectors(scales, tiles, expert_map, num_tiles, num_slots, num_ids, num_experts)
    added = bias, topk_weights, row_scale
    if C.GROUPS == 1:
        gl.warp_specialize(
            [
                (multiply_first, (out, added, ring, v, C)),
                (copy_tiles, (a, stride_am, w_desc, scale_desc, zero_desc, ring, v, C)),
            ],
            [COPYING],  # warps of the second partition
            [24 if C.BLOCK_M <= 32 else 40],  # its registers; the first partition gets the rest
        )
    else:
        gl.warp_specialize(
            [
                (multiply_first, (out, added, ring, v, C)),
                (multiply_second, (out, added, ring, v, C)),
                (copy_tiles, (a, stride_am, w_desc, scale_desc, zero_desc, ring, v, C)),
            ],
            [4, COPYING],
            [C.GROUP_REGISTERS, 32],
        )
