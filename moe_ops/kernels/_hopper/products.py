"""The main loops of the persistent Hopper GEMM (`gathered`): ring of tiles, products, accumulators.

A multiplying warp group accumulates 64 rows of a tile, or half of the columns of 64 rows, in one
part or two. fp8 products, and those with scales per step of K, are added to float32 accumulators
outside of the tensor cores, one part after the other: only one product needs registers then, and
while one warp group adds, another one multiplies. Other products are accumulated by the tensor
cores: of 16-bit operands in float32, of int8 in int32.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from moe_ops.kernels._hopper.ring import stage_to_read, turn_of

BOX_ROWS = gl.constexpr(64)
"""Rows of a TMA box of the first operand, and rows that a warp group multiplies."""


@gluon.jit
def zeros(like, C: gl.constexpr):
    """What a step's product is added to: zeros of the shape and layout of ``like``."""
    return gl.full(like.shape, 0, gl.int32 if C.INTEGER else gl.float32, like.type.layout)


@gluon.jit
def stage_to_multiply(step, ring, C: gl.constexpr):
    """Wait until a stage may be multiplied; return the stage."""
    stage = stage_to_read(ring, turn_of(step, C))
    if C.FETCHES:
        fence_async_shared()  # rows were written by threads, WGMMA reads through the async proxy
    return stage


@gluon.jit
def product(
    ring, stage, acc, ADD: gl.constexpr, GROUP: gl.constexpr, PART: gl.constexpr, C: gl.constexpr
):
    """Start the product of one part of this warp group's share of a tile; ADD it to ``acc``.

    Without ADD the product overwrites the registers of ``acc``, and so is ordered after all reads
    of ``acc``. (Passing zeros instead lets ptxas start a product before the previous one is read,
    and spill registers.)
    """
    COLS: gl.constexpr = acc.shape[1]
    FIRST: gl.constexpr = COLS * (GROUP if C.BY_COLUMNS else PART)
    rows = ring.rows.index(stage * (C.BLOCK_M // BOX_ROWS) + (0 if C.BY_COLUMNS else GROUP))
    weights = ring.weights.index(stage)
    if C.TRANSPOSED:
        weights = weights.reshape((C.BLOCK_K, C.BLOCK_N)).slice(FIRST, COLS, 1)
    else:
        weights = weights.reshape((C.BLOCK_N, C.BLOCK_K)).slice(FIRST, COLS, 0).permute((1, 0))
    return warpgroup_mma(rows, weights, acc, use_acc=ADD, is_async=True)


@gluon.jit
def wait_for(UNDER_WAY: gl.constexpr, sums, C: gl.constexpr):
    """Wait until at most UNDER_WAY products are in flight; returns the sums."""
    if C.PARTS == 2:
        return warpgroup_mma_wait(UNDER_WAY, [sums[0], sums[1]])
    else:
        return (warpgroup_mma_wait(UNDER_WAY, [sums[0]]),)


@gluon.jit
def pass_by(step, ring, C: gl.constexpr):
    """Release every stage of a tile in which this warp group has no rows to multiply."""
    for _ in range(C.STEPS):
        stage = stage_to_read(ring, turn_of(step, C))
        mbarrier.arrive(ring.empty.index(stage))
        step += 1
    return step


@gluon.jit
def add_products(step, ring, sums, GROUP: gl.constexpr, C: gl.constexpr):
    """Main loop for 16-bit and int8 operands: products overlap the start of the next step's."""
    PARTS: gl.constexpr = C.PARTS
    for k in range(C.STEPS):
        stage = stage_to_multiply(step, ring, C)
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
    """Main loop for fp8 operands whose scales span K and are applied later.

    Hopper's fp8 tensor cores accumulate in fewer bits than float32 has, so each product starts from
    zero and is added in float32.
    """
    PARTS: gl.constexpr = C.PARTS
    p = zeros(sums[0], C)
    for _ in range(C.STEPS):
        stage = stage_to_multiply(step, ring, C)
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
    """The scales of step k (or the last step) of each weight part: of its gate and up rows."""
    PARTS: gl.constexpr = C.PARTS
    at = gl.minimum(k, C.STEPS - 1)
    loaded = ()
    for part in gl.static_range(PARTS):
        loaded += ((gl.load(scales[part][0] + at), gl.load(scales[part][1] + at)),)
    return loaded


@gluon.jit
def keep(scales, C: gl.constexpr):
    """Copy scales by adding 0.0: Triton 3.6 loses plain copies of loop-carried variables."""
    PARTS: gl.constexpr = C.PARTS
    kept = ()
    for part in gl.static_range(PARTS):
        kept += ((scales[part][0] + 0.0, scales[part][1] + 0.0),)
    return kept


@gluon.jit
def scaled(p, x, scale, C: gl.constexpr):
    """A product times the row scales ``x`` and the scales of its part of the weight."""
    factor = (x * scale[0])[:, None]
    if C.GATED:
        column = gl.arange(0, p.shape[1], layout=gl.SliceLayout(0, p.type.layout))
        of_gate = (column // 8 % 2 == 0)[None, :]
        factor = gl.where(of_gate, factor, (x * scale[1])[:, None])
    return p.to(gl.float32) * factor


@gluon.jit
def add_scaled(step, ring, scales, sums, GROUP: gl.constexpr, C: gl.constexpr):
    """Main loop for 8-bit operands with scales per step of K.

    Row scales lie in the ring. They are loaded before the products that the stage's release waits
    for, and no other CTA fits on the SM that could delay these loads, so no fence follows them (it
    took 0.9 % of the time; compare `dequantized_stage.release`). Gate rows of a weight part share
    one scale and so do its up rows; these scales are loaded two steps ahead.
    """
    PARTS: gl.constexpr = C.PARTS
    ROW: gl.constexpr = gl.SliceLayout(1, sums[0].type.layout)
    FIRST: gl.constexpr = 0 if C.BY_COLUMNS else GROUP * BOX_ROWS
    now, soon = load_scales(scales, 0, C), load_scales(scales, 1, C)
    p = zeros(sums[0], C)
    for k in range(C.STEPS):
        stage = stage_to_multiply(step, ring, C)
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
