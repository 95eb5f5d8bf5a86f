"""Outputs of the alignment operators."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops import sizes
from moe_ops.checks import MAX_EXPERTS
from moe_ops.dispatch.row_tiles import expert_rule, tile_rule
from moe_ops.dispatch.tiles import MAX_PLAN_ENTRIES as MOST_ROWS
from moe_ops.dispatch.tiles import TileRule, one_row_tile, symbolic_plan_sizes


def moe_align_block_size(
    topk_ids: Tensor,
    expert_map: Tensor | None,
    block_size: int,
    num_experts: int,
    pad_sorted_ids: bool,
    ignore_invalid_experts: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The three int32 vectors of a plan with tiles of ``block_size`` rows."""
    tokens, k = sizes.slots(topk_ids, expert_map)
    sizes.num_experts("num_experts", num_experts)
    sizes.block_size(block_size)
    if expert_map is not None and not ignore_invalid_experts:
        sizes.shaped("expert_map", expert_map, num_experts)
    num_slots = tokens * k
    pad_to = block_size if pad_sorted_ids else 1
    rows, tiles, *_ = symbolic_plan_sizes(num_slots, num_experts, one_row_tile(block_size), pad_to)
    sorted_token_ids = topk_ids.new_empty(rows, dtype=torch.int32)
    return sorted_token_ids, sorted_token_ids.new_empty(tiles), sorted_token_ids.new_empty(1)


def plan_slots(
    topk_ids: Tensor,
    expert_map: Tensor | None,
    num_experts: int,
    scheme: str,
    dtype: torch.dtype,
    batch_invariant: bool = False,
) -> Tensor:
    """A plan for the slots of a routing."""
    tokens, k = sizes.slots(topk_ids, expert_map)
    rule = tile_rule(scheme, dtype, topk_ids.device, batch_invariant=batch_invariant)
    return _empty_plan(topk_ids, tokens * k, num_experts, rule)


def count_expert_num_tokens(
    topk_ids: Tensor, expert_map: Tensor | None, num_local_experts: int
) -> Tensor:
    """``(El,)`` int32."""
    sizes.slots(topk_ids, expert_map)
    sizes.num_experts("num_local_experts", num_local_experts)
    return topk_ids.new_empty(num_local_experts, dtype=torch.int32)


def adapter_ids(
    topk_ids: Tensor,
    expert_map: Tensor | None,
    lora_ids: Tensor | None,
    num_experts: int,
    num_adapters: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Two times ``(T, k)`` and ``(T, 1)``, int32."""
    tokens, k = sizes.slots(topk_ids, expert_map)
    sizes.num_experts("num_experts", num_experts)
    sizes.in_range("num_adapters", num_adapters, 0, MAX_EXPERTS)
    if lora_ids is not None:
        sizes.shaped("lora_ids", lora_ids, tokens)
    pairs = topk_ids.new_empty(tokens, k, dtype=torch.int32)
    return pairs, torch.empty_like(pairs), pairs.new_empty(tokens, 1)


def plan_batched(
    expert_num_tokens: Tensor, max_num_tokens: int, scheme: str, batch_invariant: bool = False
) -> Tensor:
    """A plan for ``El * max_num_tokens`` rows."""
    sizes.axes("expert_num_tokens", expert_num_tokens, 1)
    sizes.in_range("max_num_tokens", max_num_tokens, 0, MOST_ROWS)
    num_experts = expert_num_tokens.shape[0]
    rule = expert_rule(scheme, expert_num_tokens.device, batch_invariant)
    return _empty_plan(expert_num_tokens, num_experts * max_num_tokens, num_experts, rule)


def plan_permuted(
    expert_first_token_offset: Tensor, num_rows: int, scheme: str, batch_invariant: bool = False
) -> Tensor:
    """A plan for ``num_rows`` rows."""
    sizes.axes("expert_first_token_offset", expert_first_token_offset, 1)
    num_experts = expert_first_token_offset.shape[0] - 1
    sizes.in_range("num_rows", num_rows, 0, MOST_ROWS)
    rule = expert_rule(scheme, expert_first_token_offset.device, batch_invariant)
    return _empty_plan(expert_first_token_offset, num_rows, num_experts, rule)


def _empty_plan(like: Tensor, num_slots: int, num_experts: int, rule: TileRule) -> Tensor:
    sizes.num_experts("the number of experts", num_experts)
    entries = symbolic_plan_sizes(num_slots, num_experts, rule).entries
    return like.new_empty(entries, dtype=torch.int32)
