"""Triton kernels of the permutation stage."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from moe_ops.dispatch.tiles import cdiv
from moe_ops.fake_impls.permute import gather_rows as empty_rows
from moe_ops.fake_impls.permute import moe_permutation as empty_permutation
from moe_ops.fake_impls.permute import moe_unpermute as empty_tokens
from moe_ops.fake_impls.permute import order_columns as empty_ordered
from moe_ops.kernels._runtime.dependent import take_turn
from moe_ops.kernels._runtime.launch import Launch
from moe_ops.kernels._runtime.slots import dense, local_experts, map_size, next_power_of_2
from moe_ops.kernels._sort.counting_sort import Blocks, count_blocks, count_slots, sort_in_block


@triton.jit(do_not_specialize=["num_slots", "first_expert"])
def _permutation_kernel(
    topk_ids, expert_map, table, num_slots, first_expert, num_experts, num_buckets,
    offset, inv_permuted_idx, permuted_idx,
    BUCKETS: tl.constexpr, BLOCK: tl.constexpr, FEW: tl.constexpr,
    ACROSS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One program places the slots of one block; skipped slots go behind all others."""
    take_turn()
    buckets, count, before, own = count_slots(
        topk_ids, expert_map, table, num_slots, first_expert, num_experts, num_buckets,
        BUCKETS, BLOCK, FEW, ACROSS, ROWS,
    )  # fmt: skip
    end, block = tl.cumsum(count, 0), tl.program_id(0)
    slot, bucket, row = sort_in_block(buckets, end - count + before, own, num_buckets, BLOCK)
    # Ahead of a skipped slot: earlier blocks, this one's slots up to it, later blocks' placed ones.
    placed_later = tl.sum(count - before - own)
    last_rows = block * BLOCK + tl.arange(0, BLOCK) + placed_later
    row = tl.where(bucket < num_buckets, row, last_rows)
    tl.store(permuted_idx + row, slot, mask=slot < num_slots)
    tl.store(inv_permuted_idx + slot, row, mask=slot < num_slots)
    if block == 0:
        expert = tl.arange(0, BUCKETS)
        tl.store(offset, tl.zeros((), dtype=tl.int64))
        tl.store(offset + 1 + expert, end.to(tl.int64), mask=expert < num_buckets)


@lru_cache(maxsize=1024)
def _permutation_launch(sizes: Blocks) -> Launch:
    return Launch(_permutation_kernel, **sizes.constants())


@lru_cache(maxsize=1024)
def _row_launch(stage: str, top_k: int, width: int) -> tuple[Launch, int]:
    """The kernel of a key of `_ROW_KERNELS`, and the number of programs per row."""
    kernel, widest = _ROW_KERNELS[stage]
    block = min(widest, next_power_of_2(width))
    return Launch(kernel, TOP_K=top_k, BLOCK=block), cdiv(width, block)


def moe_permutation(
    topk_ids: Tensor, expert_map: Tensor | None, num_local_experts: int
) -> tuple[Tensor, Tensor, Tensor]:
    """One launch for few slots; for many one that counts and one that places."""
    result = empty_permutation(topk_ids, expert_map, num_local_experts)
    sizes, grid, slots = count_blocks(topk_ids, expert_map, num_local_experts)
    _permutation_launch(sizes)(grid, *slots, *result)
    return result


@triton.jit(do_not_specialize=["num_experts", "num_slots"])
def _gather_rows_kernel(
    x, permuted_idx, offset, out, num_experts, num_slots, stride_x, WIDTH, TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program copies a piece of one row, or writes zeros where there is no slot to copy."""
    take_turn()
    row = tl.program_id(0)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(permuted_idx + row).to(tl.int64)
    used = (row < tl.load(offset + num_experts)) & (slot >= 0) & (slot < num_slots)
    readable = tl.where(used, WIDTH, 0)
    value = tl.load(x + slot // TOP_K * stride_x + col, mask=col < readable, other=0.0)
    tl.store(out + row.to(tl.int64) * WIDTH + col, value, mask=col < WIDTH)


def gather_rows(
    x: Tensor, permuted_idx: Tensor, expert_first_token_offset: Tensor, top_k: int
) -> Tensor:
    """Launch one program per piece of a row."""
    out = empty_rows(x, permuted_idx, expert_first_token_offset, top_k)
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, width = out.shape
    if out.numel():
        kernel, pieces = _row_launch("gather_rows", top_k, width)
        kernel(
            (rows, pieces),
            x,
            permuted_idx.contiguous(),
            dense(expert_first_token_offset),
            out,
            expert_first_token_offset.shape[0] - 1,
            x.shape[0] * top_k,
            x.stride(0),
            width,
        )
    return out


@triton.jit(do_not_specialize=["num_experts", "num_local_experts"])
def _order_columns_kernel(
    x, order, topk_ids, expert_map, out, num_experts, num_local_experts, stride_x, WIDTH,
    TOP_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program gathers a piece of one slot's row, or writes zeros if the slot is skipped."""
    take_turn()
    slot = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    expert = local_experts(topk_ids, expert_map, slot, slot >= 0, num_experts, num_local_experts)
    readable = tl.where(expert >= 0, WIDTH, 0)
    source = tl.load(order + expert.to(tl.int64) * WIDTH + col, mask=col < readable, other=-1)
    at = x + (slot // TOP_K) * stride_x + source
    value = tl.load(at, mask=(source >= 0) & (source < WIDTH), other=0.0)
    tl.store(out + slot * WIDTH + col, value, mask=col < WIDTH)


def order_columns(x: Tensor, order: Tensor, topk_ids: Tensor, expert_map: Tensor | None) -> Tensor:
    """Launch one program per piece of a slot's row."""
    out = empty_ordered(x, order, topk_ids, expert_map)
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, width = out.shape
    if out.numel():
        kernel, pieces = _row_launch("order_columns", topk_ids.shape[1], width)
        kernel(
            (rows, pieces),
            x,
            order.contiguous(),
            topk_ids.contiguous(),
            dense(expert_map),
            out,
            map_size(expert_map, order.shape[0]),
            order.shape[0],
            x.stride(0),
            width,
        )
    return out


@triton.jit(do_not_specialize=["num_rows", "num_experts"])
def _unpermute_kernel(
    rows, topk_weights, inv_permuted_idx, offset, out, num_rows, num_experts, WIDTH,
    TOP_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program sums a piece of one token's rows."""
    take_turn()
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    used = num_rows
    if offset is not None:
        used = tl.minimum(tl.maximum(tl.load(offset + num_experts), 0), num_rows).to(tl.int32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for j in tl.static_range(TOP_K):
        row = tl.load(inv_permuted_idx + token * TOP_K + j)
        readable = tl.where((row >= 0) & (row < used), WIDTH, 0)
        at = rows + row.to(tl.int64) * WIDTH + col
        value = tl.load(at, mask=col < readable, other=0.0).to(tl.float32)
        if topk_weights is not None:
            weight = tl.load(topk_weights + token * TOP_K + j).to(tl.float32)
            value *= tl.where(readable > 0, weight, 0.0)
        total += value
    tl.store(out + token * WIDTH + col, total.to(out.dtype.element_ty), mask=col < WIDTH)


def moe_unpermute(
    permuted_hidden_states: Tensor,
    topk_weights: Tensor | None,
    inv_permuted_idx: Tensor,
    expert_first_token_offset: Tensor | None,
) -> Tensor:
    """Launch one program per piece of a token's row."""
    out = empty_tokens(
        permuted_hidden_states, topk_weights, inv_permuted_idx, expert_first_token_offset
    )
    tokens, width = out.shape
    if out.numel():
        offset = dense(expert_first_token_offset)
        top_k = inv_permuted_idx.shape[1]
        kernel, pieces = _row_launch("moe_unpermute", top_k, width)
        kernel(
            (tokens, pieces),
            permuted_hidden_states.contiguous(),
            dense(topk_weights),
            inv_permuted_idx.contiguous(),
            offset,
            out,
            permuted_hidden_states.shape[0],
            0 if offset is None else offset.shape[0] - 1,
            width,
        )
    return out


_ROW_KERNELS: dict[str, tuple[Any, int]] = {
    "gather_rows": (_gather_rows_kernel, 2048),
    "order_columns": (_order_columns_kernel, 1024),
    "moe_unpermute": (_unpermute_kernel, 1024),
}
"""Kernels that copy rows, with the most columns that one program takes."""
