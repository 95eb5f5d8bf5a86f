"""Find the expert and the slots of a tile, from a plan or from the ids of few slots.

The Hopper kernels call these functions. `moe_ops.kernels._gemm.tile` has what all kernels share.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

from moe_ops.kernels._gemm.tile import count_tiles, expert_of_tile
from moe_ops.kernels._hopper.ring import optional
from moe_ops.kernels._runtime.slots import HEADER


@aggregate
class PlanArguments:
    """Plan arguments of a kernel (see `_gemm.tile`), and the scales that it reads beside them."""

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
        self.row_scale, self.weight_scale = optional(row_scale), optional(weight_scale)
        self.tiles, self.expert_map = tiles, optional(expert_map)
        self.num_tiles, self.num_slots = num_tiles, num_slots
        self.num_ids, self.num_experts = optional(num_ids), num_experts


@gluon.jit
def plan_arguments(
    scales, tiles, expert_map, num_slots, num_ids, num_experts, num_entries, C: gl.constexpr
):  # fmt: skip
    """The `PlanArguments`; ``scales``: of rows and of weights, or None."""
    num_tiles = count_tiles(tiles, num_slots, num_ids, num_entries, C.BLOCK_M)
    return PlanArguments(
        scales[0], scales[1], tiles, expert_map, num_tiles, num_slots, num_ids, num_experts
    )


@gluon.jit
def expert_of(v, m):
    """The expert of a row tile, -1 where there is nothing to do."""
    return expert_of_tile(v.tiles, v.expert_map, v.num_ids, v.num_experts, m, None)


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
