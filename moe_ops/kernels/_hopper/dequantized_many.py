"""Gluon kernel for many rows on Hopper that dequantizes weights in registers.

As in `gathered`, one warp copies tiles of both operands into a ring, and a warp schedules. As in
`dequantized_few`, weights are the first operand of WGMMA and are dequantized in registers. Two warp
groups multiply, each its own units of weight rows with all rows of a tile: a weight is dequantized
once for up to 128 rows. A warp group has two sums: while the product of one is in flight, the group
dequantizes the weights of the other. While one warp group waits, the products of the other one keep
the tensor cores busy. With fp8 products there is one product at a time, whose sums are added to the
warp group's outside of the tensor cores: see `dequantized_products.add_groups`.

ptxas keeps the registers that a product reads until the product is waited for, as long as that
happens in the same basic block; otherwise it would wait for every product at once (C7513). So all
products of a stage are waited for before the next stage's barrier.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from moe_ops.kernels._gemm.tile import COUNTED
from moe_ops.kernels._hopper.dequantized_products import multiply_tile
from moe_ops.kernels._hopper.dequantized_stage import (
    CHUNKS,
    copy_weights,
    make_ring,
)
from moe_ops.kernels._hopper.find import plan_arguments
from moe_ops.kernels._hopper.fragments import UNIT
from moe_ops.kernels._hopper.memory import load_box
from moe_ops.kernels._hopper.products import BOX_ROWS
from moe_ops.kernels._hopper.ring import first_turn, next_turn, stage_to_fill
from moe_ops.kernels._hopper.schedule import hear, make_queue, schedule
from moe_ops.kernels._runtime.dependent import take_turn

GROUPS = gl.constexpr(2)
"""Multiplying warp groups."""


@gluon.jit
def copy_tiles(a_desc, descs, ring, queue, C: gl.constexpr):
    """The copying warp: copy every tile of both operands, in the order of the products."""
    BOXES: gl.constexpr = C.BLOCK_M // BOX_ROWS
    OF_BOX: gl.constexpr = BOX_ROWS // C.PART_ROWS
    BOX_BYTES: gl.constexpr = CHUNKS * BOX_ROWS * UNIT * C.ROW_ITEM
    number = gl.to_tensor(0)
    turn = first_turn()
    m, n, expert, _, parts = hear(queue, number, 1)
    while parts > 0:
        for k in range(C.STEPS):
            stage, full = stage_to_fill(ring, turn)
            for count in gl.static_range(1, BOXES + 1):
                # A number of boxes beside that of parts would be spilled.
                mbarrier.expect(
                    full,
                    C.STAGE_BYTES + count * BOX_BYTES,
                    pred=(parts > (count - 1) * OF_BOX) & (parts <= count * OF_BOX),
                )
            for chunk in gl.static_range(CHUNKS):
                for box in gl.static_range(BOXES):
                    at = [m * C.BLOCK_M + box * BOX_ROWS, (k * CHUNKS + chunk) * UNIT]
                    to = ring.rows.index(stage).slice(
                        chunk * C.BLOCK_M + box * BOX_ROWS, BOX_ROWS, 0
                    )
                    load_box(a_desc, at, full, to, pred=parts > box * OF_BOX)
            copy_weights(descs, ring, stage, (expert, n, k), full, C)
            turn = next_turn(turn, C)
        number += 1
        m, n, expert, _, parts = hear(queue, number, 1)


@gluon.jit
def multiply(out, added, ring, queue, v, GROUP: gl.constexpr, C: gl.constexpr):
    """A multiplying warp group: compute its share of every tile of this program.

    Padding rows come last in a tile, and quarters of it that are padding are left out.
    """
    PARTS: gl.constexpr = C.BLOCK_M // C.PART_ROWS
    turn, number = first_turn(), gl.to_tensor(0)
    m, n, expert, _, parts = hear(queue, number, 4)
    while parts > 0:
        tile = m, n, expert
        for count in gl.static_range(1, PARTS + 1):
            if parts == count:
                turn = multiply_tile(out, added, ring, v, tile, turn, count * C.PART_ROWS, GROUP, C)
        number += 1
        m, n, expert, _, parts = hear(queue, number, 4)


@gluon.jit(do_not_specialize=COUNTED)
def hopper_decode_many_kernel(
    out, a_desc, w_desc, scale_desc, zero_desc, bias, topk_weights, row_scale, global_scale,
    weight_scale, counter, tiles, expert_map, num_slots, num_ids, num_experts, num_entries,
    C: gl.constexpr,
):  # fmt: skip
    """``out[s] = f(row_scale[row of s] * a[row of s] @ dequantized(w[e]).T + bias[e])``.

    Padding rows are not written.
    """
    descs = w_desc, scale_desc, zero_desc
    ring = make_ring(a_desc.dtype, descs, 1, C)
    queue = make_queue(GROUPS + 1)
    fence_async_shared()
    take_turn(LONG=True)
    scales = global_scale, weight_scale
    v = plan_arguments(
        scales, tiles, expert_map, num_slots, num_ids, num_experts, num_entries, C
    )  # fmt: skip
    added = bias, topk_weights, row_scale
    gl.warp_specialize(
        [
            (multiply, (out, added, ring, queue, v, 0, C)),
            (multiply, (out, added, ring, queue, v, 1, C)),
            (copy_tiles, (a_desc, descs, ring, queue, C)),
            (schedule, (queue, counter, v, C)),
        ],
        [4, 1, 1],
        [240, 24, 24],  # the first partition gets the rest: 240
    )
