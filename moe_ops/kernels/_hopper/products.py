"""The products of Hopper's kernel of many rows: tiles in a ring in shared memory, and their sums.

A multiplying warp group has the sums of 64 rows of a tile, or of half of their columns, in one part
or two. 8-bit products are added to sums outside of the units, one part after the other: only one
product needs registers then, and while one warp group adds, another one multiplies.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate

BOX_ROWS = gl.constexpr(64)
"""Rows of a tile that are copied at a time, and that a warp group multiplies."""


@aggregate
class Ring:
    """Tiles in shared memory, and who may touch them: ``full`` to multiply, ``empty`` to copy.

    Of ``rows`` a stage has a box, or several.
    """

    rows: gl.shared_memory_descriptor
    weights: gl.shared_memory_descriptor
    scales: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, rows, weights, scales, full, empty):
        self.rows, self.weights, self.scales = rows, weights, scales
        self.full, self.empty = full, empty


@gluon.jit
def zeros(like):
    """Sums of nothing."""
    return gl.full(like.shape, 0, gl.float32, like.type.layout)


@gluon.jit
def product(
    ring, stage, acc, ADD: gl.constexpr, GROUP: gl.constexpr, PART: gl.constexpr, C: gl.constexpr
):
    """Begin a part of the product of this warp group's share of a tile; ADD it to ``acc``.

    Else it takes the registers of ``acc``, whose readers therefore come first. (Zeros in its place
    let ptxas begin a product before the last one was read, and spill.)
    """
    COLS: gl.constexpr = acc.shape[1]
    FIRST: gl.constexpr = COLS * (GROUP if C.BY_COLUMNS else PART)
    rows = ring.rows.index(stage * (C.BLOCK_M // BOX_ROWS) + (0 if C.BY_COLUMNS else GROUP))
    weights = ring.weights.index(stage).reshape((C.BLOCK_N, C.BLOCK_K)).slice(FIRST, COLS, 0)
    return warpgroup_mma(rows, weights.permute((1, 0)), acc, use_acc=ADD, is_async=True)


@gluon.jit
def wait_for(UNDER_WAY: gl.constexpr, sums, C: gl.constexpr):
    """All products but the last few."""
    if C.PARTS == 2:
        return warpgroup_mma_wait(UNDER_WAY, [sums[0], sums[1]])
    else:
        return (warpgroup_mma_wait(UNDER_WAY, [sums[0]]),)


@gluon.jit
def pass_by(step, ring, C: gl.constexpr):
    """Nothing to multiply in any step of a tile."""
    for _ in range(C.STEPS):
        stage = step % C.STAGES
        mbarrier.wait(ring.full.index(stage), (step // C.STAGES) & 1)
        mbarrier.arrive(ring.empty.index(stage))
        step += 1
    return step


@gluon.jit
def add_products(step, ring, sums, GROUP: gl.constexpr, C: gl.constexpr):
    """16-bit operands: the products of one step are under way while those of the next are begun."""
    PARTS: gl.constexpr = C.PARTS
    for k in range(C.STEPS):
        stage = step % C.STAGES
        mbarrier.wait(ring.full.index(stage), (step // C.STAGES) & 1)
        begun = ()
        for part in gl.static_range(PARTS):
            begun += (product(ring, stage, sums[part], True, GROUP, part, C),)
        sums = wait_for(PARTS, begun, C)
        if k > 0:
            mbarrier.arrive(ring.empty.index((step - 1) % C.STAGES))
        step += 1
    sums = wait_for(0, sums, C)
    mbarrier.arrive(ring.empty.index((step - 1) % C.STAGES))
    return sums, step


@gluon.jit
def add_wide(step, ring, sums, GROUP: gl.constexpr, C: gl.constexpr):
    """8-bit operands, scaled later.

    The units add in fewer bits than float32 has: each product starts from zero.
    """
    PARTS: gl.constexpr = C.PARTS
    p = zeros(sums[0])
    for _ in range(C.STEPS):
        stage = step % C.STAGES
        mbarrier.wait(ring.full.index(stage), (step // C.STAGES) & 1)
        added = ()
        for part in gl.static_range(PARTS):
            p = warpgroup_mma_wait(0, [product(ring, stage, p, False, GROUP, part, C)])
            if part == PARTS - 1:
                mbarrier.arrive(ring.empty.index(stage))
            added += (sums[part] + p,)
        sums = added
        step += 1
    return sums, step


@gluon.jit
def load_scales(scales, k, C: gl.constexpr):
    """Of each part of the weight, in step k or the last one: of its gate rows, of its up rows."""
    PARTS: gl.constexpr = C.PARTS
    at = gl.minimum(k, C.STEPS - 1)
    found = ()
    for part in gl.static_range(PARTS):
        found += ((gl.load(scales[part][0] + at), gl.load(scales[part][1] + at)),)
    return found


@gluon.jit
def keep(scales, C: gl.constexpr):
    """The same as sums: names stay variables of a loop (Triton 3.6 loses plain copies)."""
    PARTS: gl.constexpr = C.PARTS
    kept = ()
    for part in gl.static_range(PARTS):
        kept += ((scales[part][0] + 0.0, scales[part][1] + 0.0),)
    return kept


@gluon.jit
def scaled(p, x, scale, C: gl.constexpr):
    """A product times the scales ``x`` of its rows and those of its part of the weight."""
    factor = (x * scale[0])[:, None]
    if C.GATED:
        column = gl.arange(0, p.shape[1], layout=gl.SliceLayout(0, p.type.layout))
        of_gate = (column // 8 % 2 == 0)[None, :]
        factor = gl.where(of_gate, factor, (x * scale[1])[:, None])
    return p * factor


@gluon.jit
def add_scaled(step, ring, scales, sums, GROUP: gl.constexpr, C: gl.constexpr):
    """8-bit operands of which each product has scales.

    Those of rows lie in the ring. The weight's rows share one in each part (gate rows one, up rows
    one), which is loaded two steps ahead.
    """
    PARTS: gl.constexpr = C.PARTS
    ROW: gl.constexpr = gl.SliceLayout(1, sums[0].type.layout)
    FIRST: gl.constexpr = 0 if C.BY_COLUMNS else GROUP * BOX_ROWS
    now, soon = load_scales(scales, 0, C), load_scales(scales, 1, C)
    p = zeros(sums[0])
    for k in range(C.STEPS):
        stage = step % C.STAGES
        mbarrier.wait(ring.full.index(stage), (step // C.STAGES) & 1)
        later = load_scales(scales, k + 2, C)
        added = ()
        for part in gl.static_range(PARTS):
            begun = product(ring, stage, p, False, GROUP, part, C)
            if part == 0:
                of_rows = ring.scales.index(stage).reshape((C.BLOCK_M,))
                x = of_rows.slice(FIRST, BOX_ROWS, 0).load(ROW)
            p = warpgroup_mma_wait(0, [begun])
            if part == PARTS - 1:
                mbarrier.arrive(ring.empty.index(stage))
            added += (sums[part] + scaled(p, x, now[part], C),)
        sums = added
        now, soon = keep(soon, C), keep(later, C)
        step += 1
    return sums, step
