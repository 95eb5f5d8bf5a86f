"""How Hopper's own kernels find their tiles, with a plan or without: see `gemm_tile`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

from moe_ops.kernels.slots import experts_of


@gluon.constexpr_function
def _optional(pointer):
    """None as a field of an aggregate."""
    return gl.constexpr(None) if pointer is None else pointer


@aggregate
class Vectors:
    """What the result is made of beside the products; tiles as `gemm_tile` has them."""

    row_scale: gl.tensor
    weight_scale: gl.tensor
    plan: gl.tensor | gl.constexpr
    topk_ids: gl.tensor | gl.constexpr
    expert_map: gl.tensor | gl.constexpr
    num_tiles: gl.tensor
    num_slots: gl.tensor
    experts_at: gl.tensor
    num_ids: gl.tensor
    num_experts: gl.tensor

    @gluon.constexpr_function
    def __init__(self, scales, plan, topk_ids, expert_map, num_tiles, numbers):
        self.row_scale, self.weight_scale = scales
        self.plan, self.topk_ids, self.expert_map = map(_optional, (plan, topk_ids, expert_map))
        self.num_tiles = num_tiles
        self.num_slots, self.experts_at, self.num_ids, self.num_experts = numbers


@gluon.jit
def count_tiles(plan, num_slots, C: gl.constexpr):
    """How many tiles of rows there are."""
    if plan is None:
        num_tiles = num_slots
    else:
        num_tiles = gl.load(plan) // C.BLOCK_M
    return num_tiles


@gluon.jit
def expert_of(v, m):
    """The expert of a tile, -1 where there is nothing to do."""
    if v.plan is None:
        found = experts_of(gl.load(v.topk_ids + m), v.expert_map, v.num_ids, v.num_experts)
    else:
        found = gl.load(v.plan + v.experts_at + m)
    return found
