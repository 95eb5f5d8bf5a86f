"""Tile schedules of the persistent Hopper GEMM kernel (`gathered`): static or dynamic.

Static: program p computes the tiles p, p + num_programs, ... All tiles take the same time, padding
included, so programs stay in step and read shared data at the same time (neighbouring programs run
on a pair of SMs and share weight tiles).

Dynamic: parts of a tile that are padding are skipped, so tiles take different times, and each
program takes the next tile from a global atomic counter when it is ready. A static schedule would
give the long tiles to some programs only.

Staying in step matters as much as skipping padding, so neither schedule is faster everywhere.

A scheduling warp looks up the next tile while the current one is computed, so that the other warps
do not wait for these loads.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.core import _aggregate as aggregate

from moe_ops.kernels._gemm.tile import map_tile
from moe_ops.kernels._hopper.find import expert_of, first_row, slots_of
from moe_ops.kernels._hopper.memory import wait_for_group
from moe_ops.kernels._hopper.ring import make_barriers, optional
from moe_ops.kernels._runtime.slots import HEADER

FIELDS = gl.constexpr(5)


@aggregate
class Queue:
    """The next tile of a program in shared memory, and its full and empty barriers.

    ``sources``: the row of the first operand for each row of the tile, for a kernel that fetches.
    """

    fields: gl.shared_memory_descriptor
    sources: gl.shared_memory_descriptor | gl.constexpr
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, fields, sources, full, empty):
        self.fields, self.sources = fields, optional(sources)
        self.full, self.empty = full, empty


@gluon.jit
def make_queue(READERS: gl.constexpr, SOURCES: gl.constexpr = 0):
    """Allocate a `Queue` for READERS readers, each some warps, and for SOURCES rows of a tile."""
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    fields = gl.allocate_shared_memory(gl.int32, [FIELDS, 1], FLAT)
    sources = None
    if SOURCES:
        sources = gl.allocate_shared_memory(gl.int32, [SOURCES], FLAT)
    full, empty = make_barriers(1, 1, READERS)
    return Queue(fields, sources, full.index(0), empty.index(0))


@gluon.jit
def count_parts(v, m, C: gl.constexpr):
    """Number of a tile's parts to compute: all, or those with a real row (dynamic schedule).

    Padding rows come last in a tile, so these are the first parts.
    """
    parts = gl.to_tensor(C.BLOCK_M // C.PART_ROWS)
    if C.ON_DEMAND:
        for part in gl.static_range(1, C.BLOCK_M // C.PART_ROWS):
            slot = gl.load(v.tiles + HEADER + m * C.BLOCK_M + part * C.PART_ROWS)
            parts -= (slot >= v.num_slots).to(gl.int32)
    return parts


@gluon.jit
def sources_of(v, m, C: gl.constexpr):
    """The rows of the first operand for a tile; padding gets the tile's first, read anyway.

    One row for all padding would make all programs read the same line of the L2 cache.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    slot, real = slots_of(v, m, gl.arange(0, C.BLOCK_M, layout=LAYOUT), C)
    first = gl.load(v.tiles + HEADER + m * C.BLOCK_M)
    first = gl.where((first >= 0) & (first < v.num_slots), first, 0)
    return gl.where(real, slot, first) // C.TOP_K


@gluon.jit
def tell(queue, number, values, sources):
    """Publish a tile once all readers have read the previous one; 0 parts mean the end."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    mbarrier.wait(queue.empty, (number + 1) & 1)
    none = gl.full([1], 0, gl.int32, LAYOUT)
    for field in gl.static_range(FIELDS):
        queue.fields.index(field).store(none + values[field])
    if sources is not None:
        queue.sources.store(sources)
    wait_for_group()
    mbarrier.arrive(queue.full)


@gluon.jit
def schedule(queue, counter, v, C: gl.constexpr):
    """The scheduling warp: publish every tile of this program, then the end."""
    number = gl.to_tensor(0)
    tile = gl.program_id(0)
    while tile < v.num_tiles * C.NUM_N:
        m, n = map_tile(tile, v.num_tiles, C.NUM_N, C.GROUP_M)
        sources = None
        if queue.sources is not None:
            sources = sources_of(v, m, C)
        fields = m, n, expert_of(v, m), first_row(v, m), count_parts(v, m, C)
        tell(queue, number, fields, sources)
        number += 1
        if C.ON_DEMAND:  # the counter starts after the first tile of each program
            tile = gl.num_programs(0) + gl.atomic_add(counter, 1, sem="relaxed")
        else:
            tile += gl.num_programs(0)
    tell(queue, number, (0,) * FIELDS, None)


@gluon.jit
def read_tile(queue, number, WARPS: gl.constexpr):
    """Wait for the next tile and read it; no other is published until `tile_read` is called."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    mbarrier.wait(queue.full, number & 1)
    fields = ()
    for field in gl.static_range(FIELDS):
        fields += (gl.max(queue.fields.index(field).load(LAYOUT), 0),)
    return fields


@gluon.jit
def tile_read(queue):
    """Let the next tile be published, once all threads of this reader have read this one."""
    wait_for_group()
    mbarrier.arrive(queue.empty)


@gluon.jit
def hear(queue, number, WARPS: gl.constexpr):
    """Read the next tile: row, column, expert, first permuted row, number of parts."""
    fields = read_tile(queue, number, WARPS)
    tile_read(queue)
    return fields
