"""The warps of the Hopper GEMM for many rows (`gathered`) that fetch rows where they lie.

No pass gathers the rows first: these warps copy the rows of a tile's slots with cp.async into the
stage whose weights come by TMA. A stage is full once both have arrived. They share a warp group,
and so the registers of a thread, with the warps that copy weights and look up tiles.

Source: the producers of SonicMoE's and FlashInfer's GEMMs for Hopper.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from moe_ops.kernels._hopper.memory import load_rows, reinterpret
from moe_ops.kernels._hopper.ring import first_turn, next_turn, stage_to_fill
from moe_ops.kernels._hopper.schedule import read_tile, tile_read

WARPS = gl.constexpr(2)
"""Fetching warps."""


@gluon.jit
def fetch_rows(a, pieces_am, ring, queue, v, C: gl.constexpr):
    """The fetching warps: copy the rows of every tile, and their scales of each step along K.

    ``pieces_am``: the stride of rows in pieces of 16 bytes, so that copies are known to be aligned.
    What is copied to one allocation for a stage is copied at once, as the compiler puts a barrier
    between two copies. Copies have no mask for padding rows, which would take a register a row.
    """
    PIECE: gl.constexpr = 16 // C.ITEMSIZE
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, PIECE], [4, 8], [WARPS, 1], [1, 0])
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 8 * C.ITEMSIZE, rank=2)
    stages = reinterpret(ring.rows, a.dtype.element_ty, [C.STAGES, C.BLOCK_M, C.BLOCK_K], SWIZZLED)
    ALONE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    col = gl.arange(0, C.BLOCK_K, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    turn, number = first_turn(), gl.to_tensor(0)
    boxes = read_tile(queue, number, WARPS)[4]
    while boxes > 0:
        source = queue.sources.load(gl.SliceLayout(1, LAYOUT))
        offset = source[:, None] * (pieces_am * PIECE) + col
        if C.SCALE_COLS is not None:
            scale = v.row_scale + queue.sources.load(ALONE) * C.STEPS
        tile_read(queue)
        for k in range(C.STEPS):
            stage, full = stage_to_fill(ring, turn)
            row = a + k * C.BLOCK_K + offset
            if C.K % C.BLOCK_K == 0:
                load_rows(stages.index(stage), row)
            else:
                load_rows(stages.index(stage), row, mask=k * C.BLOCK_K + col < C.K)
            if C.SCALE_COLS is not None:
                load_rows(ring.scales.index(stage).reshape((C.BLOCK_M,)), scale)
                scale += 1
            async_copy.mbarrier_arrive(full, increment_count=False)
            turn = next_turn(turn, C)
        number += 1
        boxes = read_tile(queue, number, WARPS)[4]
    tile_read(queue)
