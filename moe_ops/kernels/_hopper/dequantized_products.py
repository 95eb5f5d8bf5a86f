"""Products of the kernels that dequantize weights in registers: the main loop, and a whole tile.

A warp group has one or two sums, one for each of its units of 64 weight rows. The columns of a sum
are rows of the tile, in pieces whose widths are powers of two (see `widths`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from moe_ops.kernels._hopper.dequantized_stage import (
    CHUNKS,
    load_chunk,
    load_scales,
    load_words,
    unit_of,
)
from moe_ops.kernels._hopper.dequantized_store import real_slots, store_units
from moe_ops.kernels._hopper.fp8_fragments import fp8_chunk, group_scales
from moe_ops.kernels._hopper.fragments import UNIT, dequantized, scale_rows
from moe_ops.kernels._hopper.ring import next_turn, stage_to_read
from moe_ops.kernels._runtime.slots import HEADER

ALONE = gl.constexpr(16)
"""The largest row tile whose products each warp computes by itself (mma.sync). Half of a larger
tile has 16 rows, too, which take less time by WGMMA."""


@gluon.constexpr_function
def widths(ROWS):
    """Widths of the pieces of a sum over ROWS rows of a tile: one or two powers of two."""
    first = 2 ** (ROWS.bit_length() - 1)
    return (first,) if first == ROWS else (first, ROWS - first)


@gluon.constexpr_function
def group_layout(columns, C):
    """Layout of a sum whose products a warp group computes together (WGMMA)."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 32 // C.ROW_ITEM])


@gluon.jit
def add_chunk(
    ring, stage, chunk: gl.constexpr, w, sums, ROWS: gl.constexpr, C: gl.constexpr,
    ADD: gl.constexpr = True,
):  # fmt: skip
    """Start to add the products of a chunk's weights to each piece of a unit's sums.

    Without ADD the products overwrite the pieces, see `products.product`.
    """
    WIDTHS: gl.constexpr = widths(ROWS)
    PIECES: gl.constexpr = len(WIDTHS)
    more = ()
    for i in gl.static_range(PIECES):
        rows = ring.rows.index(stage).slice(chunk * C.BLOCK_M + i * WIDTHS[0], WIDTHS[i], 0)
        more += (warpgroup_mma(w, rows.permute((1, 0)), sums[i], use_acc=ADD, is_async=True),)
    return more


@gluon.jit
def under_way(sums):
    """Mark a unit's sums as results of asynchronous products."""
    PIECES: gl.constexpr = len(sums)
    more = ()
    for i in gl.static_range(PIECES):
        more += (warpgroup_mma_init(sums[i]),)
    return more


@gluon.jit
def waited(LATER: gl.constexpr, products):
    """Wait until at most LATER products are in flight; return a unit's sums."""
    sums = warpgroup_mma_wait(LATER, products)
    return sums if len(products) > 1 else (sums,)


@gluon.jit
def add_together(
    ring, stage, sums, FIRST: gl.constexpr, FENCED: gl.constexpr, ROWS: gl.constexpr,
    C: gl.constexpr,
):  # fmt: skip
    """Add the products of the units from FIRST on to ``sums``: by the whole warp group.

    While the product of one unit is under way, the weights of the other are decoded. Words are
    loaded one product ahead, so that loads and products overlap.

    ``sums``: of both units, each in the pieces of the first ROWS rows (see `widths`).

    FENCED: threads wrote the rows, and WGMMA reads them through the async proxy, which takes a
    fence. It waits for loads from shared memory, so it follows the first ones that are waited for.
    """
    DOT: gl.constexpr = gl.DotOperandLayout(0, sums[0][0].type.layout, 2)
    PIECES: gl.constexpr = len(sums[0])
    DTYPE: gl.constexpr = ring.rows.dtype
    sum0, p1 = sums[0], under_way(sums[1])
    next0 = load_chunk(ring, stage, 0, FIRST, C)
    for chunk in gl.static_range(CHUNKS):
        next1 = load_chunk(ring, stage, chunk, FIRST + 1, C)
        w0 = dequantized(next0, DTYPE, DOT, C)
        if FENCED and chunk == 0:
            fence_async_shared()
        p0 = add_chunk(ring, stage, chunk, w0, sum0, ROWS, C)
        if chunk + 1 < CHUNKS:
            next0 = load_chunk(ring, stage, chunk + 1, FIRST, C)
        sum1 = waited(PIECES, p1)
        w1 = dequantized(next1, DTYPE, DOT, C)
        p1 = add_chunk(ring, stage, chunk, w1, sum1, ROWS, C)
        sum0 = waited(PIECES, p0)
    return sum0, waited(0, p1)


@gluon.jit
def add_alone(ring, stage, sums, C: gl.constexpr):
    """Add the products of a stage to ``sums``: each warp by itself."""
    LAYOUT: gl.constexpr = sums[0][0].type.layout
    DOT: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
    ROWS: gl.constexpr = sums[0][0].shape[1]
    UNITS: gl.constexpr = C.UNITS
    for chunk in gl.static_range(CHUNKS):
        rows = ring.rows.index(stage).slice(chunk * C.BLOCK_M, ROWS, 0).permute((1, 0))
        rows = rows.load(gl.DotOperandLayout(1, LAYOUT, 2))
        more = ()
        for i in gl.static_range(UNITS):
            w = dequantized(load_chunk(ring, stage, chunk, i, C), ring.rows.dtype, DOT, C)
            more += ((mma_v2(w, rows, sums[i][0]),),)
        sums = more
    return sums


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
        rows = ring.rows.index(stage).slice(chunk * C.BLOCK_M, ROWS, 0).permute((1, 0))
        w = dequantized(coming, DTYPE, DOT, C)
        if chunk == 0:
            fence_async_shared()  # see `add_together`
        if chunk + 1 < CHUNKS:
            coming = load_chunk(ring, stage, chunk + 1, unit, C)
        p = warpgroup_mma(w, rows, p, is_async=True)
    return warpgroup_mma_wait(0, [p])


@gluon.jit
def add_scaled(ring, stage, sums, C: gl.constexpr):
    """Add the products of a stage, times the scales of its weight rows: each warp by itself."""
    LAYOUT: gl.constexpr = sums[0][0].type.layout
    UNITS: gl.constexpr = C.UNITS
    zero = gl.full(sums[0][0].shape, 0, gl.float32, LAYOUT)
    parts = add_alone(ring, stage, ((zero,),) * UNITS, C)
    more = ()
    for i in gl.static_range(UNITS):
        scale = scale_rows(load_scales(ring, stage, 0, i, C), ring.scales.dtype, LAYOUT)
        more += ((sums[i][0] + parts[i][0] * scale[:, None],),)
    return more


@gluon.jit
def plus_scaled(acc, p, scale):
    """``acc`` and a product, whose rows are multiplied by ``scale``."""
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, p.type.layout)
    return acc + p * gl.convert_layout(scale, OF_ROWS, assert_trivial=True)[:, None]


@gluon.jit
def add_groups(ring, stage, sums, FIRST: gl.constexpr, ROWS: gl.constexpr, C: gl.constexpr):
    """Add the fp8 products of a stage, times the scales of its weight rows: by the warp group.

    Hopper's fp8 tensor cores accumulate in fewer bits than float32 has: they add up a stage, and
    the sums lie outside. While a product is under way, the weights of the next one are decoded.

    ``sums``: of the units from FIRST on, and the registers of the products, in pieces.
    """
    LAYOUT: gl.constexpr = sums[0][0].type.layout
    DOT: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 4)
    UNITS: gl.constexpr = C.UNITS
    PIECES: gl.constexpr = len(sums[0])
    p, added = sums[UNITS], ()
    coming = load_words(ring, stage, 0, FIRST, C)[0]
    for i in gl.static_range(UNITS):
        scale = group_scales(load_scales(ring, stage, 0, FIRST + i, C)[0])
        for chunk in gl.static_range(CHUNKS):
            w = fp8_chunk(coming, DOT)
            p = add_chunk(ring, stage, chunk, w, p, ROWS, C, chunk > 0)
            if chunk + 1 < CHUNKS:
                coming = load_words(ring, stage, chunk + 1, FIRST + i, C)[0]
            elif i + 1 < UNITS:
                coming = load_words(ring, stage, 0, FIRST + i + 1, C)[0]
        if i + 1 == UNITS:
            fence_async_shared()  # or the last scales might be read after the release
        p = waited(0, p)
        more = ()
        for j in gl.static_range(PIECES):
            more += (plus_scaled(sums[i][j], p[j], scale),)
        added += (more,)
    return added + (p,)


@gluon.jit
def add_stage(
    ring, stage, sums, ROWS: gl.constexpr, GROUP: gl.constexpr, C: gl.constexpr
):  # fmt: skip
    """Add the products of a stage to ``sums``, in the way that suits the tile."""
    if C.FP8:
        sums = add_groups(ring, stage, sums, GROUP * C.UNITS, ROWS, C)
    elif C.SCALED == "sums":
        sums = add_scaled(ring, stage, sums, C)
    elif C.BLOCK_M <= ALONE:
        sums = add_alone(ring, stage, sums, C)
    elif C.UNITS == 1:
        sums = ((add_unit(ring, stage, sums[0][0], GROUP, C),),)
    else:
        sums = add_together(ring, stage, sums, GROUP * C.UNITS, not C.GATHERED, ROWS, C)
    return sums


@gluon.jit
def release(ring, stage, FENCED: gl.constexpr):
    """Let the copying warps overwrite a stage: each thread arrives, and waits for no other.

    FENCED: words may still be on their way to registers. Without the fence TMA may overwrite them:
    a load that was issued can wait behind loads from memory of other CTAs (seen on an H200). After
    a product of registers that was waited for, its words have been read.
    """
    if FENCED:
        fence_async_shared()  # words were loaded by threads, TMA writes through the async proxy
    async_copy.mbarrier_arrive(ring.empty.index(stage), increment_count=False)


@gluon.jit
def add_tile(turn, ring, sums, ROWS: gl.constexpr, GROUP: gl.constexpr, C: gl.constexpr):
    """Main loop: add the products of all stages of a tile."""
    for _ in range(C.STEPS):
        stage = stage_to_read(ring, turn)
        sums = add_stage(ring, stage, sums, ROWS, GROUP, C)
        release(ring, stage, C.BLOCK_M <= ALONE)
        turn = next_turn(turn, C)
    return sums, turn


@gluon.constexpr_function
def sums_layout(rows, C):
    """Layout of a unit's sum over ``rows`` rows of a tile."""
    if C.BLOCK_M <= ALONE:
        return gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    return group_layout(rows, C)


@gluon.jit
def no_sums(ROWS: gl.constexpr, C: gl.constexpr):
    """Zeros for a unit's sums over the first ROWS rows of a tile, in pieces: see `widths`."""
    WIDTHS: gl.constexpr = widths(ROWS)
    PIECES: gl.constexpr = len(WIDTHS)
    sums = ()
    for i in gl.static_range(PIECES):
        sums += (gl.full((UNIT, WIDTHS[i]), 0, gl.float32, sums_layout(WIDTHS[i], C)),)
    return sums


@gluon.jit
def multiply_tile(
    out, added, ring, v, tile, turn, ROWS: gl.constexpr, GROUP: gl.constexpr, C: gl.constexpr
):  # fmt: skip
    """Compute and store a warp group's share of the first ROWS rows of a tile.

    ``added``: bias, routing weights and row scales. Returns the ring's next turn.
    """
    WIDTHS: gl.constexpr = widths(ROWS)
    PIECES: gl.constexpr = len(WIDTHS)
    UNITS: gl.constexpr = C.UNITS
    m, n, expert = tile
    zero = no_sums(ROWS, C)
    sums = (zero,) * (UNITS + 1 if C.FP8 else UNITS)
    sums, turn = add_tile(turn, ring, sums, ROWS, GROUP, C)
    bias, weights, row_scale = added
    for i in gl.static_range(PIECES):
        units, of_units = (), ()
        for j in gl.static_range(UNITS):
            units += (unit_of(n, GROUP * UNITS + j, C),)
            of_units += (sums[j][i],)
        column = gl.arange(0, WIDTHS[i], layout=gl.SliceLayout(0, of_units[0].type.layout))
        row = m * C.BLOCK_M + i * WIDTHS[0] + column
        if C.GATHERED:
            slot = gl.load(v.tiles + HEADER + row)
        elif v.num_ids is None:  # in one piece: adding in this order takes fewer instructions
            slot = gl.load(v.tiles + HEADER + m * C.BLOCK_M + column)
        else:
            slot = gl.where(column == 0, m, v.num_slots)
        slots = real_slots(slot, expert, v)
        scale = None
        if row_scale is not None:
            if C.GATHERED:
                scale = gl.load(row_scale + row, mask=slots[0] < slots[1], other=0.0)
            else:
                scale = gl.load(row_scale + gl.minimum(slots[0], v.num_slots - 1) // C.TOP_K)
        store_units(out, bias, weights, scale, of_units, units, slots, expert, v, C)
    return turn
