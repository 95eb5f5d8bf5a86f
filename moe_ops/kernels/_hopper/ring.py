"""Ring of tiles in shared memory, between the warps that copy tiles and those that multiply them.

A stage of the ring holds a tile of each operand. Its ``full`` barrier signals that the tiles may be
multiplied, its ``empty`` barrier that they may be overwritten. A *turn* is a stage and a phase,
which changes each time around the ring. A kernel counts turns (`next_turn`), or divides the number
of its step (`turn_of`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.core import _aggregate as aggregate


@gluon.constexpr_function
def optional(value):
    """None wrapped as a constexpr, so that it can be a field of an aggregate."""
    return gl.constexpr(None) if value is None else value


@aggregate
class Ring:
    """Ring of tiles, with its barriers. A kernel leaves out what it does not copy or wait for."""

    rows: gl.shared_memory_descriptor | gl.constexpr
    weights: gl.shared_memory_descriptor
    scales: gl.shared_memory_descriptor | gl.constexpr
    zeros: gl.shared_memory_descriptor | gl.constexpr
    full: gl.shared_memory_descriptor | gl.constexpr
    empty: gl.shared_memory_descriptor | gl.constexpr

    @gluon.constexpr_function
    def __init__(self, rows, weights, scales, zeros, full, empty):
        self.rows, self.weights = optional(rows), weights
        self.scales, self.zeros = optional(scales), optional(zeros)
        self.full, self.empty = optional(full), optional(empty)


@gluon.jit
def make_barriers(STAGES: gl.constexpr, FILLING: gl.constexpr, READING: gl.constexpr):
    """Allocate the full and the empty barriers of STAGES stages.

    A stage is full after FILLING arrivals, and empty after READING arrivals.
    """
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=FILLING)
        mbarrier.init(empty.index(stage), count=READING)
    return full, empty


@gluon.jit
def turn_of(step, C: gl.constexpr):
    """The turn of a step: its stage and phase."""
    return step % C.STAGES, (step // C.STAGES) & 1


@gluon.jit
def first_turn():
    """The first turn: its stage and phase."""
    return gl.to_tensor(0), gl.to_tensor(0)


@gluon.jit
def next_turn(turn, C: gl.constexpr):
    """The turn after ``turn``. Without a division, after which a wait would have to wait."""
    stage, phase = turn
    last = stage == C.STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def stage_to_fill(ring, turn):
    """Wait until a stage may be filled; return the stage and its full barrier."""
    mbarrier.wait(ring.empty.index(turn[0]), turn[1] ^ 1)
    return turn[0], ring.full.index(turn[0])


@gluon.jit
def stage_to_read(ring, turn):
    """Wait until a stage may be read; return the stage."""
    mbarrier.wait(ring.full.index(turn[0]), turn[1])
    return turn[0]
