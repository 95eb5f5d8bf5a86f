"""The parts of a tile plan, and the rule by which a GEMM reads one."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops.dispatch.tiles import PLAN_HEADER, TileRule, is_direct, plan_sizes, row_tile
from moe_ops.tensors import AnyTiles, TilePlan


def unpack_plan(plan: Tensor, num_slots: int, num_experts: int, rule: TileRule) -> TilePlan:
    """Views of the parts of a plan in one tensor: see `PlanSizes`."""
    sizes = plan_sizes(num_slots, num_experts, rule)
    slots, experts = plan[PLAN_HEADER : sizes.experts_at], plan[sizes.experts_at : sizes.firsts_at]
    return TilePlan(slots, experts, plan[:1])


def first_rows(plan: Tensor, num_slots: int, num_experts: int, rule: TileRule) -> Tensor:
    """View of each tile's first permuted row: see `PlanSizes`."""
    return plan[plan_sizes(num_slots, num_experts, rule).firsts_at :]


def split_tiles(
    plan: Tensor, num_slots: int, num_experts: int, rule: TileRule, block_m: int
) -> Tensor:
    """The plan with its tiles divided into tiles of ``block_m`` rows.

    Tiles past the last row of an expert belong to that expert and are all padding.
    """
    tile = row_tile(rule, num_slots, num_experts)
    _, experts, _ = unpack_plan(plan, num_slots, num_experts, rule)
    firsts, parts = first_rows(plan, num_slots, num_experts, rule), tile // block_m
    offsets = torch.arange(0, tile, block_m, dtype=plan.dtype, device=plan.device)
    split = plan[: len(plan) - len(experts) - len(firsts)].clone()
    split[2] += (parts - 1) * len(experts)  # offset of the first rows
    firsts = (firsts[:, None] + offsets).flatten()
    return torch.cat((split, experts.repeat_interleave(parts), firsts))


def plan_to_read(tiles: AnyTiles, num_slots: int, num_experts: int) -> Tensor | None:
    """The plan of a GEMM, contiguous; None if slots are so few that each is a tile of its own.

    Raises:
        ValueError: no plan, and either no ids or too many slots to do without a plan.
    """
    plan, topk_ids, _ = tiles
    if topk_ids is not None and is_direct(num_slots, num_experts):
        return None
    if plan is None:
        raise ValueError(
            f"plan must be a tensor for {num_slots} slots of {num_experts} experts, got None"
        )
    return plan.contiguous()
