"""How the Hopper kernels find tiles, from a plan or from the ids of few slots: see `_gemm.tile`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

from moe_ops.kernels._gemm.tile import planned_tiles
from moe_ops.kernels._runtime.slots import HEADER, experts_of


@gluon.constexpr_function
def _optional(value):
    """None wrapped as a constexpr, so that it can be a field of an aggregate."""
    return gl.constexpr(None) if value is None else value


@aggregate
class Vectors:
    """Scales and tile arguments of a kernel; for the tile arguments see `_gemm.tile`."""

    row_scale: gl.tensor | gl.constexpr
    weight_scale: gl.tensor | gl.constexpr
    tiles: gl.tensor
    expert_map: gl.tensor | gl.constexpr
    num_tiles: gl.tensor
    num_slots: gl.tensor
    num_ids: gl.tensor | gl.constexpr
    num_experts: gl.tensor

    @gluon.constexpr_function
    def __init__(
        self, row_scale, weight_scale, tiles, expert_map, num_tiles, num_slots, num_ids, num_experts
    ):  # fmt: skip
        self.row_scale, self.weight_scale = _optional(row_scale), _optional(weight_scale)
        self.tiles, self.expert_map = tiles, _optional(expert_map)
        self.num_tiles, self.num_slots = num_tiles, num_slots
        self.num_ids, self.num_experts = _optional(num_ids), num_experts


@gluon.jit
def count_tiles(tiles, num_slots, num_ids, num_entries, C: gl.constexpr):
    """Number of row tiles."""
    return planned_tiles(tiles, num_entries, C.BLOCK_M) if num_ids is None else num_slots


@gluon.jit
def expert_of(v, m):
    """The expert of a row tile, -1 where there is nothing to do."""
    if v.num_ids is None:
        found = gl.load(v.tiles + gl.load(v.tiles + 1) + m)
        found = gl.where(found < v.num_experts, found, -1)
    else:
        found = experts_of(gl.load(v.tiles + m), v.expert_map, v.num_ids, v.num_experts)
    return found


@gluon.jit
def first_row(v, m):
    """The first permuted (expert-sorted, not padded) row of a plan's tile."""
    first = gl.load(v.tiles + gl.load(v.tiles + 2) + m)
    return gl.minimum(gl.maximum(first, 0), v.num_slots)


@gluon.jit
def slots_of(v, m, row, C: gl.constexpr):
    """The slots of ``row`` (row indices within a tile), and which of them are real."""
    if v.num_ids is None:
        slot = gl.load(v.tiles + HEADER + m * C.BLOCK_M + row)
        real = (slot >= 0) & (slot < v.num_slots)
    else:
        slot, real = m + row, row == 0
    return slot, real
