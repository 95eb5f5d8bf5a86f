"""Gluon kernel of the expert GEMMs for many rows on Hopper that fetches rows where they lie.

As `gathered`, but no pass gathers the rows first: a fourth group of warps copies the rows of a
tile's slots with cp.async into the stage whose weights come by TMA. A stage is full once both have
arrived.

Source: the producer of SonicMoE's and FlashInfer's GEMMs for Hopper.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from moe_ops.kernels._gemm.tile import COUNTED
from moe_ops.kernels._hopper.find import plan_arguments
from moe_ops.kernels._hopper.gathered import copy_tiles, multiply
from moe_ops.kernels._hopper.memory import load_rows, reinterpret
from moe_ops.kernels._hopper.products import BOX_ROWS
from moe_ops.kernels._hopper.ring import Ring, first_turn, make_barriers, next_turn, stage_to_fill
from moe_ops.kernels._hopper.schedule import make_queue, read_tile, release, schedule
from moe_ops.kernels._runtime.dependent import take_turn

WARPS = gl.constexpr(2)
"""Fetching warps."""


@gluon.jit
def fetch_rows(a, stride_am, stages, ring, queue, v, C: gl.constexpr):
    """The fetching warps: copy the rows of every tile, and their scales of each step along K.

    What is copied to one allocation for a stage is copied at once, as the compiler puts a barrier
    between two copies. Copies have no mask for padding rows, which would take a register a row.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 16 // C.ITEMSIZE], [4, 8], [WARPS, 1], [1, 0])
    ALONE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    col = gl.arange(0, C.BLOCK_K, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    turn, number = first_turn(), gl.to_tensor(0)
    boxes = read_tile(queue, number, WARPS)[4]
    while boxes > 0:
        source = queue.sources.load(gl.SliceLayout(1, LAYOUT))
        offset = source[:, None] * stride_am + col
        if C.SCALE_COLS is not None:
            scale = v.row_scale + queue.sources.load(ALONE) * C.STEPS
        release(queue)
        for k in range(C.STEPS):
            stage, full = stage_to_fill(ring, turn)
            row = a + k * C.BLOCK_K + offset
            if C.K % C.BLOCK_K == 0:
                load_rows(stages.index(stage), row)
            else:
                load_rows(stages.index(stage), row, mask=k * C.BLOCK_K + col < C.K)
            if C.SCALE_COLS is not None:
                load_rows(ring.scales.index(stage), scale)
                scale += 1
            async_copy.mbarrier_arrive(full, increment_count=False)
            turn = next_turn(turn, C)
        number += 1
        boxes = read_tile(queue, number, WARPS)[4]
    release(queue)


@gluon.jit(do_not_specialize=COUNTED)
def hopper_fetch_kernel(
    out, product, a, stride_am, w_desc, bias, row_scale, weight_scale, counter,
    tiles, expert_map, num_slots, num_ids, num_experts, num_entries, C: gl.constexpr,
):  # fmt: skip
    """``out[s] = f(a[s // TOP_K] @ w[e].T + bias[e])``; padding rows are not written.

    ``product``: the result before f, in slot order, or None.
    """
    STAGES: gl.constexpr = C.STAGES
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 8 * C.ITEMSIZE, rank=2)
    boxes: gl.constexpr = [STAGES * (C.BLOCK_M // BOX_ROWS), BOX_ROWS, C.BLOCK_K]
    rows = gl.allocate_shared_memory(a.dtype.element_ty, boxes, SWIZZLED)
    stages = reinterpret(rows, rows.dtype, [STAGES, C.BLOCK_M, C.BLOCK_K], SWIZZLED)
    weights = gl.allocate_shared_memory(w_desc.dtype, [STAGES] + w_desc.block_shape, w_desc.layout)
    scales = None
    if C.SCALE_COLS is not None:
        FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        scales = gl.allocate_shared_memory(gl.float32, [STAGES, C.BLOCK_M], FLAT)
    barriers = make_barriers(STAGES, 1 + 32 * WARPS, 2)
    queue = make_queue(4, C.BLOCK_M)
    fence_async_shared()
    ring = Ring(rows, weights, scales, None, *barriers)
    take_turn(LONG=True)
    to = out, product
    NONE: gl.constexpr = None
    v = plan_arguments(
        (row_scale, weight_scale), tiles, expert_map, num_slots, num_ids, num_experts, num_entries,
        C,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (multiply, (to, bias, ring, queue, v, 0, C)),
            (multiply, (to, bias, ring, queue, v, 1, C)),
            (fetch_rows, (a, stride_am, stages, ring, queue, v, C)),
            (copy_tiles, (NONE, w_desc, NONE, ring, queue, C)),
            (schedule, (queue, counter, v, C)),
        ],
        [4, WARPS, 1, 1],  # warps of each partition but the first
        [224, 56, 56, 56],  # registers per thread of these; the first partition gets the rest
    )
