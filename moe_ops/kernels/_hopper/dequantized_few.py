"""Gluon kernel for few rows on Hopper that dequantizes weights in registers.

The weights of a tile are copied as they are packed (`scheme.packed`), decoded in registers
(`fragments`), and multiplied as the first operand of a matrix instruction; rows of tokens are the
second operand. So a weight is read once from memory and once from shared memory, and never written.

Two or four warps copy: a stage's weights and scales as one TMA box each, the rows of a tile's slots
with cp.async, as they may lie anywhere. A warp group decodes, multiplies and stores. Several CTAs
fit on an SM: while one decodes, another waits for memory. With 64 rows that is only two, so each
has two multiplying warp groups, which share its rows and have one unit of weight rows each.

Source: the structure of `stream`, with the register operand that humming and triton_kernels use.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
)

from moe_ops.kernels._gemm.tile import COUNTED, map_tile
from moe_ops.kernels._hopper.dequantized_products import ALONE, multiply_tile
from moe_ops.kernels._hopper.dequantized_stage import (
    CHUNKS,
    copy_weights,
    make_ring,
)
from moe_ops.kernels._hopper.find import expert_of, plan_arguments, slots_of
from moe_ops.kernels._hopper.fragments import UNIT
from moe_ops.kernels._hopper.memory import load_rows
from moe_ops.kernels._hopper.ring import first_turn, next_turn, stage_to_fill
from moe_ops.kernels._hopper.stream import load_slots
from moe_ops.kernels._runtime.dependent import take_turn


@gluon.constexpr_function
def copying_warps(rows):
    """Number of copying warps: each repeats a stage's address arithmetic; fewer spill registers."""
    return 2 if rows <= ALONE else 4


@gluon.constexpr_function
def copying_registers(rows):
    """Registers of a copying thread."""
    return 24 if rows <= 32 else 40


@gluon.jit
def of_chunks(x, LAYOUT: gl.constexpr):
    """A vector of a tile's rows, once for each chunk of a stage."""
    ROWS: gl.constexpr = x.shape[0]
    both = gl.join(x, x).permute((1, 0)).reshape((CHUNKS * ROWS,))
    return gl.convert_layout(both, LAYOUT, assert_trivial=True)


@gluon.jit
def copy_tiles(a, stride_am, descs, ring, v, C: gl.constexpr):
    """The copying warps: copy every tile of both operands, in the order of the products.

    Everything that is copied to one allocation for a stage is copied at once, as the compiler puts
    a barrier between two copies.
    """
    WARPS: gl.constexpr = copying_warps(C.BLOCK_M)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    ODD: gl.constexpr = C.K % (CHUNKS * UNIT) != 0
    chunk = gl.arange(0, CHUNKS * C.BLOCK_M, layout=OF_ROWS)[:, None] // C.BLOCK_M
    col = gl.arange(0, UNIT, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    turn = first_turn()
    for tile in range(gl.program_id(0), v.num_tiles * C.NUM_N, gl.num_programs(0)):
        m, n = map_tile(tile, v.num_tiles, C.NUM_N, C.GROUP_M)
        expert = expert_of(v, m)
        slot, real = load_slots(v, m, OF_ROWS, C)
        slot, real = of_chunks(slot, OF_ROWS), of_chunks(real.to(gl.int32), OF_ROWS) > 0
        row = a + (slot // C.TOP_K).to(gl.int64)[:, None] * stride_am + col
        for k in range(C.STEPS):
            stage, full = stage_to_fill(ring, turn)
            mbarrier.expect(full, C.STAGE_BYTES)
            copy_weights(descs, ring, stage, (expert, n, k), full, C)
            inside = real[:, None] & (col < UNIT)
            if ODD:
                inside = inside & (k * CHUNKS + chunk < C.K // UNIT)
            at = row + (k * CHUNKS + chunk) * UNIT
            load_rows(ring.rows.index(stage), at, mask=inside)
            async_copy.mbarrier_arrive(full, increment_count=False)
            turn = next_turn(turn, C)


@gluon.jit
def multiply_at(
    out, added, ring, v, tile, turn, ROWS: gl.constexpr, GROUP: gl.constexpr, C: gl.constexpr
):  # fmt: skip
    """`multiply_tile` of a tile's row and column."""
    m, n = tile
    return multiply_tile(out, added, ring, v, (m, n, expert_of(v, m)), turn, ROWS, GROUP, C)


@gluon.jit
def multiply(out, added, ring, v, GROUP: gl.constexpr, C: gl.constexpr):
    """A multiplying warp group: compute and store its units of every tile of this program.

    Padding rows come last in a tile. If they are the half of it, that half is left out.
    """
    HALF: gl.constexpr = C.BLOCK_M // 2
    turn = first_turn()
    first = gl.program_id(0)
    if v.num_ids is None:
        more = needs_more(first, v, C)
        for index in range(first, v.num_tiles * C.NUM_N, gl.num_programs(0)):
            soon = needs_more(index + gl.num_programs(0), v, C)
            tile = map_tile(index, v.num_tiles, C.NUM_N, C.GROUP_M)
            if more:
                turn = multiply_at(out, added, ring, v, tile, turn, C.BLOCK_M, GROUP, C)
            else:
                turn = multiply_at(out, added, ring, v, tile, turn, HALF, GROUP, C)
            more = soon
    else:  # a tile has one slot
        for index in range(first, v.num_tiles * C.NUM_N, gl.num_programs(0)):
            tile = map_tile(index, v.num_tiles, C.NUM_N, C.GROUP_M)
            turn = multiply_at(out, added, ring, v, tile, turn, HALF, GROUP, C)


@gluon.jit
def needs_more(index, v, C: gl.constexpr):
    """Whether more than half of a planned tile's rows are real; any answer after the last tile."""
    last = gl.maximum(v.num_tiles * C.NUM_N - 1, 0)
    index = gl.minimum(index, last)
    m, _ = map_tile(index, gl.maximum(v.num_tiles, 1), C.NUM_N, C.GROUP_M)
    _, more = slots_of(v, m, C.BLOCK_M // 2, C)
    return more


@gluon.jit(do_not_specialize=COUNTED)
def hopper_decode_few_kernel(
    a, stride_am, w_desc, scale_desc, zero_desc, bias, topk_weights, row_scale, out, global_scale,
    weight_scale, tiles, expert_map, num_slots, num_ids, num_experts, num_entries, C: gl.constexpr,
):  # fmt: skip
    """``out[s] = f(row_scale[s // TOP_K] * a[s // TOP_K] @ dequantized(w[e]).T + bias[e])``."""
    COPYING: gl.constexpr = copying_warps(C.BLOCK_M)
    descs = w_desc, scale_desc, zero_desc
    ring = make_ring(a.dtype.element_ty, descs, 1 + 32 * COPYING, C)
    take_turn()
    scales = global_scale, weight_scale
    v = plan_arguments(
        scales, tiles, expert_map, num_slots, num_ids, num_experts, num_entries, C
    )  # fmt: skip
    added = bias, topk_weights, row_scale
    REGISTERS: gl.constexpr = copying_registers(C.BLOCK_M)
    if C.GROUPS == 1:
        gl.warp_specialize(
            [
                (multiply, (out, added, ring, v, 0, C)),
                (copy_tiles, (a, stride_am, descs, ring, v, C)),
            ],
            [COPYING],  # warps of the second partition
            [REGISTERS],  # of its threads; the first partition gets the rest
        )
    else:
        gl.warp_specialize(
            [
                (multiply, (out, added, ring, v, 0, C)),
                (multiply, (out, added, ring, v, 1, C)),
                (copy_tiles, (a, stride_am, descs, ring, v, C)),
            ],
            [4, COPYING],
            [C.GROUP_REGISTERS, REGISTERS],
        )
