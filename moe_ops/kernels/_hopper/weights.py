"""Weights of the M = 1 decode kernels: their ring in shared memory, and the main loops.

Weights are the first operand of WGMMA, 64 rows at a time. A stage of the ring holds two pieces of a
tile, 128 bytes of K each. Two warps copy one piece each: one warp alone cannot issue TMA copies as
fast as memory delivers them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate

from moe_ops.dispatch import hopper as hopper_tiles
from moe_ops.kernels._hopper.memory import load_rows
from moe_ops.kernels._hopper.ring import Ring, make_barriers, optional, stage_to_read, turn_of
from moe_ops.kernels._hopper.vectors import PIECES, of_chunk
from moe_ops.kernels._runtime.slots import experts_of

ROWS = gl.constexpr(hopper_tiles.TOKEN_ROWS)
PIECE_BYTES = gl.constexpr(hopper_tiles.TOKEN_ROWS * hopper_tiles.ROW_BYTES)
OF_WARP = gl.constexpr(gl.BlockedLayout([2], [32], [1], [0]))
"""Layout of the rows of a tile in a copying warp."""


@aggregate
class Choices:
    """The routing of the token: ids, weights and expert map."""

    ids: gl.tensor
    weights: gl.tensor | gl.constexpr
    expert_map: gl.tensor | gl.constexpr
    num_ids: gl.tensor
    num_experts: gl.tensor

    @gluon.constexpr_function
    def __init__(self, ids, weights, expert_map, num_ids, num_experts):
        self.ids, self.weights, self.expert_map = ids, optional(weights), optional(expert_map)
        self.num_ids, self.num_experts = num_ids, num_experts


@gluon.jit
def expert_of(choices, slot, inside):
    """The local expert of each slot, -1 where there is none."""
    ids = gl.load(choices.ids + slot, mask=inside, other=-1)
    return experts_of(ids, choices.expert_map, choices.num_ids, choices.num_experts)


@gluon.jit
def make_ring(desc, G: gl.constexpr):
    """Allocate a ring of G.STAGES stages."""
    STAGES: gl.constexpr = G.STAGES
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 8 * G.ITEMSIZE, rank=2)
    shape: gl.constexpr = [STAGES * PIECES, ROWS, G.BLOCK_K]
    pieces = gl.allocate_shared_memory(desc.dtype, shape, SWIZZLED)
    SCALED: gl.constexpr = G.SCALE_COLS is not None
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    count: gl.constexpr = [STAGES * PIECES if SCALED else 1, ROWS]
    scales = gl.allocate_shared_memory(gl.float32, count, FLAT)
    # Arrivals: one for the TMA copies of each copying warp, one per thread if it copies scales.
    barriers = make_barriers(STAGES, PIECES * (1 + 32 if SCALED else 1), 1)
    fence_async_shared()
    return Ring(None, pieces, scales, None, *barriers)


@gluon.jit
def scales_at(w_scale, expert, row, G: gl.constexpr):
    """Pointers to the first scales of weight rows; an empty tuple if pieces have no scales.

    Rows past the end of the weight are clamped to its last row.
    """
    pointers = ()
    if G.SCALE_COLS is not None:
        GROUPS: gl.constexpr = G.groups
        BANDS: gl.constexpr = G.bands
        band = gl.minimum(row, G.WEIGHT_ROWS - 1) // G.SCALE_ROWS
        pointers = w_scale + (expert.to(gl.int64) * BANDS + band) * GROUPS
    return pointers


@gluon.jit
def copy_scales(scale_at, ring, stage, full, piece, PIECE: gl.constexpr, G: gl.constexpr):
    """Copy the scales of a piece, if pieces have scales; ``scale_at`` is from `scales_at`."""
    if G.SCALE_COLS is not None:
        LAST: gl.constexpr = G.groups - 1
        to = ring.scales.index(stage * PIECES + PIECE)
        load_rows(to, scale_at + gl.minimum(piece, LAST))
        async_copy.mbarrier_arrive(full, increment_count=False)


@gluon.jit
def product(ring, stage, vectors, q, PIECE: gl.constexpr, acc):
    """Start the product of a piece of the weights with a piece of the vectors."""
    columns = vectors.data.index(q * PIECES + PIECE).permute((1, 0))
    return warpgroup_mma(ring.weights.index(stage * PIECES + PIECE), columns, acc, is_async=True)


@gluon.jit
def no_product(L: gl.constexpr, G: gl.constexpr):
    """What the product of a piece is added to."""
    return gl.full([ROWS, G.COLUMNS], 0, gl.int32 if G.INTEGER else gl.float32, L)


@gluon.jit
def add_products(step, ring, vectors, L: gl.constexpr, G: gl.constexpr):
    """Main loop for 16-bit operands: a stage's products overlap the start of the next stage's."""
    zero = no_product(L, G)
    total = zero
    for c in range(G.CHUNKS):
        acc = zero
        for q in range(G.STEPS):
            stage = stage_to_read(ring, turn_of(step, G))
            acc = product(ring, stage, vectors, q, 0, acc)
            acc = product(ring, stage, vectors, q, 1, acc)
            acc = warpgroup_mma_wait(2, [acc])
            if q > 0:
                mbarrier.arrive(ring.empty.index((step - 1) % G.STAGES))
            step += 1
        acc = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(ring.empty.index((step - 1) % G.STAGES))
        total += gl.where(of_chunk(c, L, G), acc, 0.0)
    return total, step


@gluon.jit
def add_wide(step, ring, vectors, L: gl.constexpr, G: gl.constexpr):
    """Main loop for 8-bit operands whose scales span K; applies the scales of the vectors.

    Hopper's fp8 tensor cores accumulate in fewer bits than float32 has, so each product starts from
    zero and is added in float32. Sums of int8 products are exact in int32, as a vector that fits in
    shared memory is short enough.
    """
    zero = no_product(L, G)
    total = zero
    for c in range(G.CHUNKS):
        chosen = of_chunk(c, L, G)
        for q in range(G.STEPS):
            stage = stage_to_read(ring, turn_of(step, G))
            left = product(ring, stage, vectors, q, 0, zero)
            right = product(ring, stage, vectors, q, 1, zero)
            left, right = warpgroup_mma_wait(0, [left, right])
            mbarrier.arrive(ring.empty.index(stage))
            total += gl.where(chosen, left, zero)
            total += gl.where(chosen, right, zero)
            step += 1
    return total.to(gl.float32) * vectors.scales.index(0).load(gl.SliceLayout(0, L))[None, :], step


@gluon.jit
def add_scaled(step, ring, vectors, L: gl.constexpr, G: gl.constexpr):
    """Main loop for 8-bit operands with scales per piece, all of which lie in shared memory."""
    zero = no_product(L, G)
    total = zero.to(gl.float32)
    for c in range(G.CHUNKS):
        chosen = of_chunk(c, L, G)
        for q in range(G.STEPS):
            stage = stage_to_read(ring, turn_of(step, G))
            left = product(ring, stage, vectors, q, 0, zero)
            right = product(ring, stage, vectors, q, 1, zero)
            x0 = vectors.scales.index(q * PIECES).load(gl.SliceLayout(0, L))
            x1 = vectors.scales.index(q * PIECES + 1).load(gl.SliceLayout(0, L))
            w0 = ring.scales.index(stage * PIECES).load(gl.SliceLayout(1, L))
            w1 = ring.scales.index(stage * PIECES + 1).load(gl.SliceLayout(1, L))
            left, right = warpgroup_mma_wait(0, [left, right])
            mbarrier.arrive(ring.empty.index(stage))
            left, right = left.to(gl.float32), right.to(gl.float32)
            total += gl.where(chosen, left * (x0[None, :] * w0[:, None]), 0.0)
            total += gl.where(chosen, right * (x1[None, :] * w1[:, None]), 0.0)
            step += 1
    return total, step


@gluon.jit
def multiply_tile(step, ring, vectors, L: gl.constexpr, G: gl.constexpr):
    """The sums (ROWS, COLUMNS) of a tile, before `scale_and_shift`.

    A column sums the products with its own chunk only.
    """
    if G.SCALE_COLS is not None:
        total, step = add_scaled(step, ring, vectors, L, G)
    elif G.ITEMSIZE == 1:
        total, step = add_wide(step, ring, vectors, L, G)
    else:
        total, step = add_products(step, ring, vectors, L, G)
    return total, step


@gluon.jit
def row_vectors(w_scale, bias, expert, row, inside, G: gl.constexpr):
    """Load the weight scales that span K and the bias of a tile's rows; () for an absent one.

    Called before the products, so that the loads overlap them.
    """
    factor, shift = (), ()
    if G.ITEMSIZE == 1 and G.SCALE_COLS is None:
        BANDS: gl.constexpr = G.bands
        factor = gl.load(w_scale + expert * BANDS + row // G.SCALE_ROWS, mask=inside, other=0.0)
    if bias is not None:
        shift = gl.load(bias + expert * G.WEIGHT_ROWS + row, mask=inside, other=0.0)
    return factor, shift


@gluon.jit
def scale_and_shift(acc, rows, bias, G: gl.constexpr):
    """Apply the scales and the bias that `row_vectors` loaded."""
    if G.ITEMSIZE == 1 and G.SCALE_COLS is None:
        acc *= rows[0]
    if bias is not None:
        acc += rows[1].to(gl.float32)
    return acc
