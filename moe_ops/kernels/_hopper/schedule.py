"""Which program of Hopper's kernel of many rows computes which tile, in one of two ways.

Dealt out in turn, all tiles take the same time, padding included: programs stay in step, and what
they share they read together (neighbours share a pair of processors, and tiles of one weight).
On demand, 64 rows of padding are skipped, tiles take unlike times, and each program takes the next
one of a common count when it can: dealt out, some would get the long ones. In step or not matters
as much as the padding, so that neither way is the faster one everywhere.

A warp of its own looks a tile up while the one before is computed: nobody waits for memory.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.core import _aggregate as aggregate

from moe_ops.kernels._hopper.products import BOX_ROWS
from moe_ops.kernels._hopper.slots import expert_of, first_row
from moe_ops.kernels._runtime.slots import HEADER

FIELDS = gl.constexpr(5)
wait_for_group = getattr(gl, "barrier", None) or gl.thread_barrier
"""Its name from Triton 3.7 on, and before."""


@aggregate
class Queue:
    """The next tile of a program in shared memory, and who may touch it."""

    fields: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, fields, full, empty):
        self.fields, self.full, self.empty = fields, full, empty


@gluon.jit
def make_queue(READERS: gl.constexpr):
    """For so many readers: warp groups, or a warp."""
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    fields = gl.allocate_shared_memory(gl.int32, [FIELDS, 1], FLAT)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    mbarrier.init(empty, count=READERS)
    return Queue(fields, full, empty)


@gluon.jit
def find_tile(tile, num_tiles, C: gl.constexpr):
    """Bands of GROUP_M row tiles, down each band first: its weights stay in the L2 cache."""
    band = tile // (C.GROUP_M * C.NUM_N)
    first = band * C.GROUP_M
    height = gl.minimum(num_tiles - first, C.GROUP_M)
    inside = tile % (C.GROUP_M * C.NUM_N)
    return first + inside % height, inside // height


@gluon.jit
def count_boxes(v, m, C: gl.constexpr):
    """How many boxes of a tile have a row that is stored, or all: those of padding come last."""
    boxes = gl.to_tensor(C.BLOCK_M // BOX_ROWS)
    if C.ON_DEMAND:
        for box in gl.static_range(1, C.BLOCK_M // BOX_ROWS):
            slot = gl.load(v.tiles + HEADER + m * C.BLOCK_M + box * BOX_ROWS)
            boxes -= (slot >= v.num_slots).to(gl.int32)
    return boxes


@gluon.jit
def tell(queue, number, m, n, expert, first, boxes):
    """Put a tile where all read it, when they have read the one before; of no boxes: the end."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    mbarrier.wait(queue.empty, (number + 1) & 1)
    none = gl.full([1], 0, gl.int32, LAYOUT)
    queue.fields.index(0).store(none + m)
    queue.fields.index(1).store(none + n)
    queue.fields.index(2).store(none + expert)
    queue.fields.index(3).store(none + first)
    queue.fields.index(4).store(none + boxes)
    wait_for_group()
    mbarrier.arrive(queue.full)


@gluon.jit
def schedule(queue, counter, v, C: gl.constexpr):
    """The scheduling warp: every tile of this program, then the end."""
    number = gl.to_tensor(0)
    tile = gl.program_id(0)
    while tile < v.num_tiles * C.NUM_N:
        m, n = find_tile(tile, v.num_tiles, C)
        tell(queue, number, m, n, expert_of(v, m), first_row(v, m), count_boxes(v, m, C))
        number += 1
        if C.ON_DEMAND:  # the count begins after the first tile of each program
            tile = gl.num_programs(0) + gl.atomic_add(counter, 1, sem="relaxed")
        else:
            tile += gl.num_programs(0)
    tell(queue, number, 0, 0, 0, 0, 0)


@gluon.jit
def hear(queue, number, WARPS: gl.constexpr):
    """A tile: its row and column, its expert, its first row in expert order, its boxes."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    mbarrier.wait(queue.full, number & 1)
    m = gl.max(queue.fields.index(0).load(LAYOUT), 0)
    n = gl.max(queue.fields.index(1).load(LAYOUT), 0)
    expert = gl.max(queue.fields.index(2).load(LAYOUT), 0)
    first = gl.max(queue.fields.index(3).load(LAYOUT), 0)
    boxes = gl.max(queue.fields.index(4).load(LAYOUT), 0)
    wait_for_group()  # all have read it
    mbarrier.arrive(queue.empty)
    return m, n, expert, first, boxes
