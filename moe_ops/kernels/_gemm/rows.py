"""Plans and expert maps that name rows of a weight instead of experts: see `ExpertWeight.rows`.

Kernels need not know of rows. Whatever a tile or a slot reads of its expert lies in the expert's
row, so the expert's number is replaced by that of the row, and by -1 where there is none: kernels
store nothing for such tiles and slots.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_ops.dispatch.tiles import cdiv
from moe_ops.kernels._runtime.dependent import take_turn
from moe_ops.kernels._runtime.launch import Launch

BLOCK = 1024
"""Entries of one program."""


@triton.jit(do_not_specialize=["count", "num_experts"])
def _to_rows_kernel(source, rows, out, count, num_experts, PLAN: tl.constexpr, BLOCK: tl.constexpr):
    """Copy a block of entries with rows in place of experts; a PLAN has experts for its tiles."""
    take_turn()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(source + at, mask=at < count, other=-1)
    is_expert = at < count
    if PLAN:
        is_expert = (at >= tl.load(source + 1)) & (at < tl.load(source + 2))
    valid = is_expert & (value >= 0) & (value < num_experts)
    row = tl.load(rows + tl.where(valid, value, 0), mask=valid, other=-1)
    tl.store(out + at, tl.where(is_expert, row, value).to(tl.int32), mask=at < count)


@lru_cache(maxsize=2)
def _to_rows_launch(is_plan: bool) -> Launch:
    return Launch(_to_rows_kernel, PLAN=is_plan, BLOCK=BLOCK, num_warps=4)


def plan_in_rows(plan: Tensor, rows: Tensor) -> Tensor:
    """The plan with rows in place of experts."""
    return _to_rows(plan, rows, is_plan=True)


def map_in_rows(expert_map: Tensor | None, rows: Tensor) -> Tensor:
    """The row of each expert id, -1 where there is none: an expert map."""
    return rows if expert_map is None else _to_rows(expert_map, rows, is_plan=False)


def _to_rows(source: Tensor, rows: Tensor, *, is_plan: bool) -> Tensor:
    source = source.contiguous()
    out, count = torch.empty_like(source, dtype=torch.int32), source.shape[0]
    grid = (cdiv(count, BLOCK),)
    _to_rows_launch(is_plan)(grid, source, rows, out, count, rows.shape[0])
    return out
