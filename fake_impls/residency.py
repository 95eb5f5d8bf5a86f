"""Outputs of the operators for experts in host memory."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops import sizes
from moe_ops.residency.slots import COLUMNS
from moe_ops.residency.state import StateLayout
from moe_ops.tensors import AnyTiles


def make_resident(
    topk_ids: Tensor,
    expert_map: Tensor | None,
    state: Tensor,
    num_experts: int,
    num_slots: int,
) -> None:
    """Check ``state``, in which the decision is written."""
    sizes.slots(topk_ids, expert_map)
    _check_state(state, num_experts, num_slots)


def copy_experts(
    table: Tensor, state: Tensor, num_experts: int, num_slots: int, wave: int, last: bool
) -> None:
    """Check ``table`` and ``state``."""
    sizes.shaped("table", table, None, COLUMNS)
    sizes.between("wave", wave, 0, 2**31 - 1)
    _check_state(state, num_experts, num_slots)


def _check_state(state: Tensor, num_experts: int, num_slots: int) -> None:
    sizes.between("num_slots", num_slots, 1, num_experts)
    sizes.shaped("state", state, StateLayout(num_experts, num_slots).length)
    if state.dtype != torch.int64:
        raise TypeError(f"state must be int64, got {state.dtype}")


def host_product(
    a: Tensor,
    a_scale: Tensor | None,
    table: Tensor,
    state: Tensor,
    topk_weights: Tensor | None,
    tiles: AnyTiles,
    top_k: int,
    num_rows: int,
    out_dtype: torch.dtype,
    activation: str = "",
    expert_order: bool = False,
    batch_invariant: bool = False,
) -> Tensor:
    """``(slots, N)``, or ``(slots, I)`` with a gated activation: see `expert_product`."""
    width = sizes.activated("w", num_rows, activation)
    return a.new_empty((a.shape[0] * top_k, width), dtype=out_dtype)


def host_product_sum(
    a: Tensor,
    a_scale: Tensor | None,
    table: Tensor,
    state: Tensor,
    topk_weights: Tensor | None,
    tiles: AnyTiles,
    num_rows: int,
    out_dtype: torch.dtype,
    expert_order: bool = False,
    batch_invariant: bool = False,
) -> Tensor:
    """``(T, N)``."""
    _, topk_ids, expert_map = tiles
    if topk_ids is None:
        raise ValueError("tiles[1] must be topk_ids, got None")
    tokens, _ = sizes.slots(topk_ids, expert_map)
    return a.new_empty((tokens, num_rows), dtype=out_dtype)
