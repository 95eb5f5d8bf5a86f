"""Triton kernels of the batched format: each slot's row placed with its expert, in slot order.

A counting sort finds the slot of each row; another launch copies, activates or quantizes rows. Rows
past an expert's count are zeros.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_ops.dispatch.tiles import cdiv
from moe_ops.fake_impls.batched import batched_activation as empty_activated
from moe_ops.fake_impls.batched import batched_activation_quantize as empty_activated_quantized
from moe_ops.fake_impls.batched import batched_dispatch as empty_dispatched
from moe_ops.fake_impls.batched import batched_quantize as empty_quantized
from moe_ops.fake_impls.batched import batched_rows as empty_places
from moe_ops.fake_impls.batched import check_room
from moe_ops.kernels._quantize.rows import RowSource, load_values, readable, row_constants
from moe_ops.kernels._runtime.dependent import take_turn
from moe_ops.kernels._runtime.launch import Launch
from moe_ops.kernels._runtime.slots import next_power_of_2
from moe_ops.kernels._sort.counting_sort import Blocks, count_blocks, count_slots, sort_in_block
from moe_ops.kernels.quantize import quantize_rows, shape_of_values, warps


@triton.jit(do_not_specialize=["num_slots", "first_expert", "max_rows"])
def _places_kernel(
    topk_ids, expert_map, table, num_slots, first_expert, num_experts, num_buckets,
    slots, rows, counts, num_dropped, max_rows,
    BUCKETS: tl.constexpr, BLOCK: tl.constexpr, FEW: tl.constexpr,
    ACROSS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One program places the slots of one block: up to ``max_rows`` with each expert.

    Outputs that are None are not written; ``rows`` is -1 for a slot without a place.
    """
    take_turn()
    buckets, count, before, own = count_slots(
        topk_ids, expert_map, table, num_slots, first_expert, num_experts, num_buckets,
        BUCKETS, BLOCK, FEW, ACROSS, ROWS,
    )  # fmt: skip
    slot, bucket, rank = sort_in_block(buckets, before, own, num_buckets, BLOCK)
    placed = (bucket < num_buckets) & (rank < max_rows)
    row = tl.where(placed, bucket * max_rows + rank, -1)
    if slots is not None:
        tl.store(slots + row, slot, mask=placed)
    if rows is not None:
        tl.store(rows + slot, row, mask=slot < num_slots)
    if counts is not None and tl.program_id(0) == 0:
        expert = tl.arange(0, BUCKETS)
        tl.store(counts + expert, tl.minimum(count, max_rows), mask=expert < num_buckets)
        tl.store(num_dropped, tl.sum(tl.maximum(count - max_rows, 0)))


@lru_cache(maxsize=1024)
def _places_launch(sizes: Blocks) -> Launch:
    return Launch(_places_kernel, **sizes.constants())


def _find_places(
    topk_ids: Tensor, first_expert: int, num_experts: int, max_rows: int, *out: Tensor | None
) -> None:
    sizes, grid, arguments = count_blocks(topk_ids, None, num_experts, first_expert)
    _places_launch(sizes)(grid, *arguments, *out, max_rows)


def batched_rows(
    topk_ids: Tensor, first_expert: int, num_local_experts: int, max_num_tokens: int
) -> Tensor:
    """One launch for few slots; for many one that counts and one that places."""
    rows = empty_places(topk_ids, first_expert, num_local_experts, max_num_tokens)
    _find_places(topk_ids, first_expert, num_local_experts, max_num_tokens, None, rows, None, None)
    return rows


@triton.jit(do_not_specialize=["num_experts", "num_local_experts"])
def _copy_kernel(
    x, slots, topk_weights, topk_ids, expert_map, counts, num_experts, num_local_experts,
    stride_expert, stride_row, WIDTH, out, TOP_K: tl.constexpr, SLOTS: tl.constexpr,
    UP: tl.constexpr, FUNCTION: tl.constexpr, LIMIT: tl.constexpr,
    ALPHA: tl.constexpr, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program writes a piece of one row in the dtype of ``x``."""
    take_turn()
    rank, piece, expert = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = expert.to(tl.int64) * tl.num_programs(0) + rank
    col = piece * BLOCK + tl.arange(0, BLOCK)
    width = readable(
        topk_ids, expert_map, counts, num_experts, num_local_experts, WIDTH, expert, rank, SLOTS
    )
    value = load_values(
        x, slots, topk_weights, stride_expert, stride_row, WIDTH, expert, rank, row, col, width,
        TOP_K, UP, FUNCTION, LIMIT, ALPHA, BETA, LINEAR_BETA,
    )  # fmt: skip
    tl.store(out + row * WIDTH + col, value.to(out.dtype.element_ty), mask=col < WIDTH)


@lru_cache(maxsize=1024)
def _copy_launch(source: tuple, width: int) -> tuple[Launch, int]:
    """The kernel, and the number of programs per row."""
    block = min(1024, next_power_of_2(width))
    kernel = Launch(_copy_kernel, **row_constants(*source), BLOCK=block, num_warps=warps(block))
    return kernel, cdiv(width, block)


def _copy_rows(rows: RowSource, out: Tensor) -> None:
    experts, count, width = rows.shape
    if out.numel():
        kernel, pieces = _copy_launch(rows.constants(), width)
        kernel((count, pieces, experts), *rows.arguments(), out)


def batched_dispatch(
    x: Tensor,
    scale: Tensor | None,
    topk_weights: Tensor | None,
    topk_ids: Tensor,
    first_expert: int,
    num_local_experts: int,
    max_num_tokens: int,
    quant: str,
    drops: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Find the places, then copy or quantize."""
    check_room(x, max_num_tokens, drops)
    result = empty_dispatched(
        x, scale, topk_weights, topk_ids, first_expert, num_local_experts, max_num_tokens, quant
    )
    out, row_scale, counts, num_dropped = result
    slots = topk_ids.new_empty(num_local_experts * max_num_tokens, dtype=torch.int32)
    _find_places(
        topk_ids, first_expert, num_local_experts, max_num_tokens, slots, None, counts, num_dropped
    )
    rows = RowSource(
        x,
        shape_of_values(out, quant),
        slots=slots,
        topk_weights=topk_weights,
        top_k=topk_ids.shape[1],
        counts=counts,
    )
    if quant:
        quantize_rows(rows, scale, quant, (out, row_scale))
    else:
        _copy_rows(rows, out)
    return result


def batched_activation(x: Tensor, expert_num_tokens: Tensor, activation: str) -> Tensor:
    """Launch one program per piece of a row."""
    out = empty_activated(x, expert_num_tokens, activation)
    _copy_rows(RowSource(x, out.shape, activation, counts=expert_num_tokens), out)
    return out


def batched_quantize(
    x: Tensor, scale: Tensor | None, expert_num_tokens: Tensor, quant: str
) -> tuple[Tensor, Tensor]:
    """One launch; two if an expert's rows share a scale that comes from the data."""
    out = empty_quantized(x, scale, expert_num_tokens, quant)
    rows = RowSource(x, shape_of_values(out[0], quant), counts=expert_num_tokens)
    quantize_rows(rows, scale, quant, out)
    return out


def batched_activation_quantize(
    x: Tensor, scale: Tensor | None, expert_num_tokens: Tensor, activation: str, quant: str
) -> tuple[Tensor, Tensor]:
    """One launch; two if an expert's rows share a scale that comes from the data."""
    out = empty_activated_quantized(x, scale, expert_num_tokens, activation, quant)
    rows = RowSource(x, shape_of_values(out[0], quant), activation, counts=expert_num_tokens)
    quantize_rows(rows, scale, quant, out)
    return out
