"""Gluon kernel of the gradients of expert weights on Hopper: persistent and warp-specialised.

The contraction runs over the slots of one expert, which lie side by side in the plan, in steps of
64 rows. One warp group gathers the rows of both operands into a ring in shared memory with
cp.async, as they may lie anywhere; padding becomes zeros and is not read. Two warp groups multiply,
each 64 rows of a tile of the gradient. Both operands lie in shared memory as their rows do, across
the contraction: tensor cores take 16-bit operands transposed.

Each tile has one owner, which adds its rows in the order of the plan, so results have equal bits
in every run. An expert without rows gets zeros, or stays as it is where sums are added to what is
there. Tiles of an expert follow one another, so that programs which run at the same time read the
same rows from the L2 cache.

Source: rows gathered along the contraction by cp.async as in quack's kernels for SonicMoE.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from moe_ops.kernels._gemm.tile import map_tile
from moe_ops.kernels._hopper.memory import load_rows
from moe_ops.kernels._hopper.products import BOX_ROWS
from moe_ops.kernels._hopper.ring import Ring, make_barriers, stage_to_fill, stage_to_read, turn_of
from moe_ops.kernels._hopper.stream import COPYING
from moe_ops.kernels._runtime.cache_keys import KeyedConstants
from moe_ops.kernels._runtime.dependent import take_turn
from moe_ops.kernels._runtime.launch import Launch
from moe_ops.kernels._runtime.slots import HEADER

STEP_ROWS = gl.constexpr(64)
"""Rows of a step of the contraction."""


@dataclass(frozen=True)
class WeightGradientConstants(KeyedConstants):
    """Constants of the kernel."""

    N: int
    """Rows of an expert's gradient: columns of ``dy``."""
    K: int
    """Columns of an expert's gradient, and of ``x``."""
    DY_TOP_K: int
    """Slots per row of ``dy``."""
    X_TOP_K: int
    """Slots per row of ``x``."""
    BLOCK_N: int
    BLOCK_K: int
    GROUP_N: int
    """Rows of tiles in a band: see `map_tile`."""
    STAGES: int
    ADDS: bool
    """Whether sums are added to the gradients."""

    @cached_property
    def launch(self) -> Launch:
        """The launch of the kernel, without PDL as `gathered` has none."""
        return Launch(hopper_wgrad_kernel, C=self, num_warps=4, launch_pdl=False)


@gluon.jit
def gradient_tile(tile, C: gl.constexpr):
    """The expert of a tile, and its row and column in the expert's gradient."""
    ROWS: gl.constexpr = (C.N + C.BLOCK_N - 1) // C.BLOCK_N
    COLUMNS: gl.constexpr = (C.K + C.BLOCK_K - 1) // C.BLOCK_K
    tile = gl.to_tensor(tile)
    n, k = map_tile(tile % (ROWS * COLUMNS), ROWS, COLUMNS, C.GROUP_N)
    return tile // (ROWS * COLUMNS), n * C.BLOCK_N, k * C.BLOCK_K


@gluon.jit
def count_of(num_experts, C: gl.constexpr):
    """The number of tiles of all gradients."""
    ROWS: gl.constexpr = (C.N + C.BLOCK_N - 1) // C.BLOCK_N
    COLUMNS: gl.constexpr = (C.K + C.BLOCK_K - 1) // C.BLOCK_K
    return num_experts * (ROWS * COLUMNS)


@gluon.jit
def steps_of(spans, tile, num_experts, C: gl.constexpr):
    """The steps of a tile, or of the last expert past the last tile."""
    expert, _, _ = gradient_tile(tile, C)
    return gl.load(spans + 2 * gl.minimum(expert, num_experts - 1) + 1)


@gluon.jit
def copy_box(
    memory, at, real, WIDTH: gl.constexpr, BLOCK: gl.constexpr, LAYOUT: gl.constexpr
):  # fmt: skip
    """Copy columns of 64 rows to shared memory: zeros for padding and past the last column.

    ``at``: pointers to the rows' first column, and its number.
    """
    row, first = at
    col = gl.arange(0, memory.shape[1], layout=gl.SliceLayout(0, LAYOUT))[None, :]
    inside = real[:, None] & (col < BLOCK)
    if WIDTH % BLOCK != 0:
        inside = inside & (first + col < WIDTH)
    load_rows(memory, row[:, None] + col, mask=inside)


@gluon.jit
def copy_tiles(dy, x, boxes, ring, v, C: gl.constexpr):
    """The copying warp group: copy the rows of every tile, in the order of the products.

    Slots are loaded a step ahead. What is copied to one allocation is copied at once, as the
    compiler puts a barrier between two copies.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    GROUPS: gl.constexpr = C.BLOCK_N // BOX_ROWS
    spans, tiles, num_slots, num_experts = v
    row = gl.arange(0, STEP_ROWS, layout=gl.SliceLayout(1, LAYOUT))
    turn = gl.to_tensor(0)
    for tile in range(gl.program_id(0), count_of(num_experts, C), gl.num_programs(0)):
        expert, n, k = gradient_tile(tile, C)
        begin, steps = gl.load(spans + 2 * expert), gl.load(spans + 2 * expert + 1)
        slots = tiles + HEADER + begin + row
        slot = gl.load(slots, mask=steps > 0, other=-1)
        for step in range(steps):
            soon = gl.load(slots + gl.minimum(step + 1, steps - 1) * STEP_ROWS)
            real = (slot >= 0) & (slot < num_slots)
            safe = gl.where(real, slot, 0).to(gl.uint32)
            d = dy + (safe // C.DY_TOP_K).to(gl.int64) * C.N + n
            r = x + (safe // C.X_TOP_K).to(gl.int64) * C.K + k
            stage, full = stage_to_fill(ring, turn_of(turn, C))
            for box in gl.static_range(GROUPS):
                at = d + box * BOX_ROWS, n + box * BOX_ROWS
                copy_box(boxes[box].index(stage), at, real, C.N, C.BLOCK_N, LAYOUT)
            copy_box(ring.weights.index(stage), (r, k), real, C.K, C.BLOCK_K, LAYOUT)
            async_copy.mbarrier_arrive(full, increment_count=False)
            turn += 1
            slot = soon + 0


@gluon.jit
def store_sums(out, acc, row, first, C: gl.constexpr):
    """Store sums to row ``row`` and column ``first`` on: lanes exchange them for 16 bytes each."""
    WIDE: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0], [0, 32], [0, 64], [0, 128]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [BOX_ROWS, C.BLOCK_K],
    )
    n = row + gl.arange(0, BOX_ROWS, layout=gl.SliceLayout(1, WIDE))
    k = first + gl.arange(0, C.BLOCK_K, layout=gl.SliceLayout(0, WIDE))
    at = out + n[:, None] * C.K + k[None, :]
    value = gl.convert_layout(acc.to(out.dtype.element_ty), WIDE)
    gl.store(at, value, mask=(n < C.N)[:, None] & (k < C.K)[None, :])


@gluon.jit
def add_to(out, acc, row, first, filled, C: gl.constexpr):
    """Add sums to what is there, if the expert has rows: four lanes read 32 bytes side by side.

    Halves of the columns follow one another down to 64 columns, which leaves registers for what is
    there.
    """
    WIDTH: gl.constexpr = acc.shape[1]
    if WIDTH > 64:
        halves = acc.reshape((BOX_ROWS, 2, WIDTH // 2)).permute((0, 2, 1)).split()
        for half in gl.static_range(2):
            add_to(out, halves[half], row, first + half * (WIDTH // 2), filled, C)
    else:
        LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
        n = row + gl.arange(0, BOX_ROWS, layout=gl.SliceLayout(1, LAYOUT))
        k = first + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT))
        at = out + n[:, None] * C.K + k[None, :]
        mask = (n < C.N)[:, None] & (k < C.K)[None, :] & filled
        sums = gl.convert_layout(acc, LAYOUT, assert_trivial=True)
        gl.store(at, sums + gl.load(at, mask=mask), mask=mask)


@gluon.jit
def multiply(out, box, ring, v, GROUP: gl.constexpr, C: gl.constexpr):
    """A multiplying warp group: compute and store 64 rows of every tile of this program."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BLOCK_K, 16])
    spans, _, _, num_experts = v
    step, first = gl.to_tensor(0), gl.program_id(0)
    steps = steps_of(spans, first, num_experts, C)
    for tile in range(first, count_of(num_experts, C), gl.num_programs(0)):
        soon = steps_of(spans, tile + gl.num_programs(0), num_experts, C)
        expert, n, k = gradient_tile(tile, C)
        acc = gl.full((BOX_ROWS, C.BLOCK_K), 0, gl.float32, LAYOUT)
        for at in range(steps):
            stage = stage_to_read(ring, turn_of(step, C))
            fence_async_shared()  # rows were written by threads, WGMMA reads via the async proxy
            rows = box.index(stage).permute((1, 0))
            acc = warpgroup_mma(rows, ring.weights.index(stage), acc, is_async=True)
            acc = warpgroup_mma_wait(1, [acc])
            if at > 0:
                mbarrier.arrive(ring.empty.index((step - 1) % C.STAGES))
            step += 1
        acc = warpgroup_mma_wait(0, [acc])
        if steps > 0:
            mbarrier.arrive(ring.empty.index((step - 1) % C.STAGES))
        gradient, row = out + expert.to(gl.int64) * (C.N * C.K), n + GROUP * BOX_ROWS
        if C.ADDS:
            add_to(gradient, acc, row, k, steps > 0, C)
        else:
            store_sums(gradient, acc, row, k, C)
        steps = soon + 0


@gluon.jit(do_not_specialize=["num_slots", "num_experts"])
def hopper_wgrad_kernel(dy, x, out, spans, tiles, num_slots, num_experts, C: gl.constexpr):
    """``out[e, n, k] = sum_s dy[s // DY_TOP_K, n] * x[s // X_TOP_K, k]`` over e's slots s.

    ``spans``: the first row of each expert in the plan, and its steps.
    """
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    GROUPS: gl.constexpr = C.BLOCK_N // BOX_ROWS
    dtype: gl.constexpr = dy.dtype.element_ty
    boxes = ()
    for _ in gl.static_range(GROUPS):
        boxes += (gl.allocate_shared_memory(dtype, [C.STAGES, STEP_ROWS, BOX_ROWS], SWIZZLED),)
    rows = gl.allocate_shared_memory(dtype, [C.STAGES, STEP_ROWS, C.BLOCK_K], SWIZZLED)
    barriers = make_barriers(C.STAGES, COPYING, GROUPS)
    fence_async_shared()
    ring = Ring(None, rows, None, None, *barriers)
    take_turn(LONG=True)
    v = spans, tiles, num_slots, num_experts
    gl.warp_specialize(
        [
            (multiply, (out, boxes[0], ring, v, 0, C)),
            (multiply, (out, boxes[1], ring, v, 1, C)),
            (copy_tiles, (dy, x, boxes, ring, v, C)),
        ],
        [4, 4],  # warps of each partition but the first
        [216, 72],  # registers per thread of these; the first partition gets the rest
    )
