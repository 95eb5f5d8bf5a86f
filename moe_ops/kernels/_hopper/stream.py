"""Gluon kernel of the expert GEMMs for few rows on Hopper: the swap-AB decode kernel.

With few rows all time goes into reading weights. So weights are the first operand of WGMMA (M is a
multiple of 64) and rows of tokens the second (N is at least 8): little work is spent on padding,
accumulators are small, and two CTAs fit on an SM, whose rings keep enough bytes in flight. One warp
group copies: weights as TMA boxes, the rows of a tile's slots with cp.async, as they may lie
anywhere. The other warp group multiplies and stores.

Source: swapped operands as in FlashInfer's and SGLang's low-latency kernels.
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

from moe_ops.kernels._gemm.tile import COUNTED, map_tile
from moe_ops.kernels._hopper.epilogue import RUN, finish_sums, load_scales
from moe_ops.kernels._hopper.find import expert_of, plan_arguments, slots_of
from moe_ops.kernels._hopper.gathered import find_scales
from moe_ops.kernels._hopper.memory import load_box, load_rows
from moe_ops.kernels._hopper.products import zeros
from moe_ops.kernels._hopper.ring import (
    Ring,
    make_barriers,
    stage_to_fill,
    stage_to_read,
    turn_of,
)
from moe_ops.kernels._runtime.dependent import take_turn

COPYING = gl.constexpr(128)
"""Threads of the copying warp group."""


@gluon.jit
def load_slots(v, m, LAYOUT: gl.constexpr, C: gl.constexpr):
    """The slots of a tile (0 for padding), and which of them are real."""
    slot, real = slots_of(v, m, gl.arange(0, C.BLOCK_M, layout=LAYOUT), C)
    return gl.where(real, slot, 0), real


@gluon.jit
def copy_tiles(a, stride_am, w_desc, ring, v, C: gl.constexpr):
    """The copying warp group: copy every tile of both operands, in the order of the products."""
    BYTES: gl.constexpr = C.BLOCK_K * C.ITEMSIZE * C.BLOCK_N
    WIDE: gl.constexpr = 16 // C.ITEMSIZE
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, WIDE], [4, 8], [4, 1], [1, 0])
    step = gl.to_tensor(0)
    for tile in range(gl.program_id(0), v.num_tiles * C.NUM_N, gl.num_programs(0)):
        m, n = map_tile(tile, v.num_tiles, C.NUM_N, C.GROUP_M)
        expert = expert_of(v, m)
        slot, real = load_slots(v, m, gl.SliceLayout(1, LAYOUT), C)
        col = gl.arange(0, C.BLOCK_K, layout=gl.SliceLayout(0, LAYOUT))[None, :]
        row = a + (slot // C.TOP_K).to(gl.int64)[:, None] * stride_am
        for k in range(C.STEPS):
            stage, full = stage_to_fill(ring, turn_of(step, C))
            mbarrier.expect(full, BYTES)
            if C.GATED:
                at = [expert, n * (C.OUT_N // 8), 0, 0, k * C.BLOCK_K]
            else:
                at = [expert, n * C.OUT_N, k * C.BLOCK_K]
            load_box(w_desc, at, full, ring.weights.index(stage))
            inside = real[:, None] & (k * C.BLOCK_K + col < C.K)
            load_rows(ring.rows.index(stage), row + k * C.BLOCK_K + col, mask=inside)
            async_copy.mbarrier_arrive(full, increment_count=False)
            step += 1


@gluon.jit
def gate_or_up(LAYOUT: gl.constexpr, C: gl.constexpr):
    """Which rows of a weight tile are gate rows, and the output column of each row."""
    r = gl.arange(0, C.BLOCK_N, layout=gl.SliceLayout(1, LAYOUT))
    if C.GATED:
        of_gate, n = r // RUN % 2 == 0, r // (2 * RUN) * RUN + r % RUN
    else:
        of_gate, n = r >= 0, r
    return of_gate, n


@gluon.jit
def next_product(step, ring, acc, C: gl.constexpr):
    """Wait for the next stage and start ``acc`` plus its product."""
    stage = stage_to_read(ring, turn_of(step, C))
    fence_async_shared()  # rows were written by threads, WGMMA reads through the async proxy
    weights = ring.weights.index(stage).reshape((C.BLOCK_N, C.BLOCK_K))
    rows = ring.rows.index(stage).permute((1, 0))
    return warpgroup_mma(weights, rows, acc, is_async=True), stage


@gluon.jit
def add_scaled(step, ring, scales, x_at, real, acc, LAYOUT: gl.constexpr, C: gl.constexpr):
    """Main loop for operands with scales per step of K, which are loaded two steps ahead.

    A step has one scale of the gate rows, one of the up rows, and one of each slot's row.
    """
    w_at, up_at = scales
    of_gate, _ = gate_or_up(LAYOUT, C)
    NEXT: gl.constexpr = min(1, C.STEPS - 1)
    g0, g1 = gl.load(w_at), gl.load(w_at + NEXT)
    u0, u1 = gl.load(up_at), gl.load(up_at + NEXT)
    x0, x1 = gl.load(x_at, mask=real, other=0.0), gl.load(x_at + NEXT, mask=real, other=0.0)
    for k in range(C.STEPS):
        p, stage = next_product(step, ring, zeros(acc, C), C)
        ahead = gl.minimum(k + 2, C.STEPS - 1)
        g2, u2 = gl.load(w_at + ahead), gl.load(up_at + ahead)
        x2 = gl.load(x_at + ahead, mask=real, other=0.0)
        p = warpgroup_mma_wait(0, [p]).to(gl.float32)
        mbarrier.arrive(ring.empty.index(stage))
        if C.GATED:
            acc += p * gl.where(of_gate[:, None], (x0 * g0)[None, :], (x0 * u0)[None, :])
        else:
            acc += p * (x0 * g0)[None, :]
        # Plus 0.0, because Triton 3.6 loses plain copies of loop-carried variables.
        g0, u0, x0, g1, u1, x1 = g1 + 0.0, u1 + 0.0, x1 + 0.0, g2 + 0.0, u2 + 0.0, x2 + 0.0
        step += 1
    return acc, step


@gluon.jit
def add_products(step, ring, acc, C: gl.constexpr):
    """Main loop for scales that span K: int8 products are added by the tensor cores, fp8 after."""
    for _ in range(C.STEPS):
        p, stage = next_product(step, ring, acc if C.SUMS_INTEGERS else zeros(acc, C), C)
        p = warpgroup_mma_wait(0, [p])
        mbarrier.arrive(ring.empty.index(stage))
        acc = p if C.SUMS_INTEGERS else acc + p
        step += 1
    return acc, step


@gluon.jit
def multiply(out, bias, ring, v, C: gl.constexpr):
    """The multiplying warp group: compute and store every tile of this program."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, C.BLOCK_M, 32 // C.ITEMSIZE]
    )
    of_gate, column = gate_or_up(LAYOUT, C)
    step = gl.to_tensor(0)
    for tile in range(gl.program_id(0), v.num_tiles * C.NUM_N, gl.num_programs(0)):
        m, n = map_tile(tile, v.num_tiles, C.NUM_N, C.GROUP_M)
        chosen = expert_of(v, m).to(gl.int64)
        expert = gl.maximum(chosen, 0)
        slot, real = load_slots(v, m, gl.SliceLayout(0, LAYOUT), C)
        source = slot // C.TOP_K
        acc = gl.full(
            (C.BLOCK_N, C.BLOCK_M), 0, gl.int32 if C.SUMS_INTEGERS else gl.float32, LAYOUT
        )
        if C.SCALE_COLS is not None:
            scales = find_scales(expert, n * C.OUT_N, v, C)
            x_at = v.row_scale + source * C.STEPS
            acc, step = add_scaled(step, ring, scales[0], x_at, real, acc, LAYOUT, C)
        else:
            acc, step = add_products(step, ring, acc, C)
        col = n * C.OUT_N + column
        rows = gl.where(of_gate, col * C.STEP, col * C.STEP + C.UP), col < C.N
        w_scale, x_scale = None, None
        if C.ITEMSIZE == 1 and C.SCALE_COLS is None:
            w_scale = load_scales(expert, rows, v, C)
            x_scale = gl.load(v.row_scale + source * C.ROW_SCALE_STRIDE, mask=real, other=0.0)
        acc = finish_sums(acc, x_scale, w_scale, None, bias, expert, rows, 0, C)
        store_columns(out, acc, v, m, n, chosen, C)


@gluon.jit
def store_columns(out, value, v, m, n, chosen, C: gl.constexpr):
    """Store an accumulator, whose columns are slots: each thread 16 bytes of a slot's row."""
    WIDE: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    slot, real = load_slots(v, m, gl.SliceLayout(0, WIDE), C)
    col = n * C.OUT_N + gl.arange(0, C.OUT_N, layout=gl.SliceLayout(1, WIDE))
    at = out + slot.to(gl.int64)[None, :] * C.N + col[:, None]
    mask = (real & (chosen >= 0))[None, :] & (col < C.N)[:, None]
    gl.store(at, gl.convert_layout(value.to(out.dtype.element_ty), WIDE), mask=mask)


@gluon.jit(do_not_specialize=COUNTED)
def hopper_stream_kernel(
    a, stride_am, w_desc, bias, out, row_scale, weight_scale,
    tiles, expert_map, num_slots, num_ids, num_experts, num_entries, C: gl.constexpr,
):  # fmt: skip
    """``out[s] = f(a[s // TOP_K] @ w[e].T + bias[e])``."""
    STAGES: gl.constexpr = C.STAGES
    BITS: gl.constexpr = 8 * C.ITEMSIZE
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, BITS, rank=2)
    shape: gl.constexpr = [STAGES, C.BLOCK_M, C.BLOCK_K]
    rows = gl.allocate_shared_memory(a.dtype.element_ty, shape, SWIZZLED)
    weights = gl.allocate_shared_memory(w_desc.dtype, [STAGES] + w_desc.block_shape, w_desc.layout)
    barriers = make_barriers(STAGES, 1 + COPYING, 1)
    fence_async_shared()
    ring = Ring(rows, weights, None, None, *barriers)
    take_turn()
    scales = row_scale, weight_scale
    v = plan_arguments(
        scales, tiles, expert_map, num_slots, num_ids, num_experts, num_entries, C
    )  # fmt: skip
    gl.warp_specialize(
        [(multiply, (out, bias, ring, v, C)), (copy_tiles, (a, stride_am, w_desc, ring, v, C))],
        [4],
        [40],
    )
