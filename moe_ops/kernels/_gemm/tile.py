"""Steps that the expert GEMM kernels share: find a tile, load operands, multiply.

Kernels take the plan arguments ``tiles, expert_map, num_slots, num_ids, num_experts, num_entries``
from `tile_arguments`. ``tiles`` is a plan of ``num_entries``; or, if ``num_ids`` is not None, the
expert ids of few slots, with one slot per tile, in the first row of the tile. Kernels stay inside
their tensors whatever a plan holds.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from moe_ops.dispatch.tile_plan import plan_to_read
from moe_ops.kernels._runtime.slots import HEADER, experts_of
from moe_ops.tensors import AnyTiles

COUNTED = ["num_slots", "num_ids", "num_experts", "num_entries"]
"""Integer arguments that kernels are not specialized for (``do_not_specialize``)."""


def tile_arguments(tiles: AnyTiles, num_slots: int, num_experts: int) -> tuple[Any, ...]:
    """The plan arguments of a kernel: ``tiles, expert_map, num_slots, num_ids, ...``."""
    plan = plan_to_read(tiles, num_slots, num_experts)
    if plan is not None:
        return plan, None, num_slots, None, num_experts, plan.shape[0]
    _, topk_ids, expert_map = tiles
    if expert_map is None:
        return topk_ids.contiguous(), None, num_slots, num_experts, num_experts, 0
    num_ids = expert_map.shape[0]
    return topk_ids.contiguous(), expert_map.contiguous(), num_slots, num_ids, num_experts, 0


@triton.jit
def map_tile(pid, num_pid_m, num_pid_n, GROUP_M: tl.constexpr):
    """The row and column of tile ``pid``.

    Tiles are ordered in bands of GROUP_M row tiles, column by column within a band, so that the
    weights of a column stay in the L2 cache.
    """
    band = pid // (GROUP_M * num_pid_n)
    first = band * GROUP_M
    height = tl.minimum(num_pid_m - first, GROUP_M)
    inside = pid % (GROUP_M * num_pid_n)
    return first + inside % height, inside // height


@triton.jit
def planned_tiles(tiles, num_entries, BLOCK_M: tl.constexpr):
    """Number of row tiles of a plan; 0 if its header contradicts its length."""
    used, experts_at, firsts_at = tl.load(tiles), tl.load(tiles + 1), tl.load(tiles + 2)
    count = used // BLOCK_M
    ordered = (used >= 0) & (experts_at >= HEADER) & (firsts_at >= experts_at)
    inside = (used <= experts_at - HEADER) & (firsts_at <= num_entries - count)
    return tl.where(ordered & inside, count, 0)


@triton.jit
def count_tiles(tiles, num_slots, num_ids, num_entries, BLOCK_M: tl.constexpr):
    """Number of row tiles: the tiles of a plan, or one tile per slot."""
    return planned_tiles(tiles, num_entries, BLOCK_M) if num_ids is None else num_slots


@triton.jit
def expert_of_tile(tiles, expert_map, num_ids, num_experts, m, used):
    """The expert of row tile m, -1 if there is none or the tile is not ``used`` (None: it is)."""
    at = tiles + m if num_ids is not None else tiles + tl.load(tiles + 1) + m
    expert = tl.load(at) if used is None else tl.load(at, mask=used, other=-1)
    if num_ids is None:
        expert = tl.where(expert < num_experts, expert, -1)
    else:
        expert = experts_of(expert, expert_map, num_ids, num_experts)
    return expert


@triton.jit
def find_tile(
    tiles, expert_map, num_slots, num_ids, num_experts, num_entries,
    N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """This program's row tile and column tile, and its expert, -1 if there is nothing to do."""
    num_pid_m = count_tiles(tiles, num_slots, num_ids, num_entries, BLOCK_M)
    num_pid_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    used = tl.program_id(0) < num_pid_m * num_pid_n
    pid = tl.where(used, tl.program_id(0), 0)
    pid_m, pid_n = map_tile(pid, tl.maximum(num_pid_m, 1), num_pid_n, GROUP_M)
    expert = expert_of_tile(tiles, expert_map, num_ids, num_experts, pid_m, used)
    return pid_m, pid_n, expert.to(tl.int64)


@triton.jit
def load_slots(tiles, pid_m, num_slots, num_ids, BLOCK_M: tl.constexpr):
    """The slots of a tile (0 for padding, a safe address), and which of them are real."""
    row = tl.arange(0, BLOCK_M)
    if num_ids is None:
        slot = tl.load(tiles + HEADER + pid_m * BLOCK_M + row)
        real = slot.to(tl.uint32) < num_slots.to(tl.uint32)  # also excludes negative slots
    else:
        slot, real = pid_m + row, row == 0
    return tl.where(real, slot, 0).to(tl.int64), real


@triton.jit
def rows_between(
    tiles, pid_m, row, num_slots, num_ids, EXPERT_ORDER: tl.constexpr, BLOCK_M: tl.constexpr
):
    """The rows of a tile: its permuted rows (any valid row for padding) if EXPERT_ORDER, else row.

    Permuted rows are sorted by expert, without padding.
    """
    if EXPERT_ORDER and num_ids is None:  # with one slot per tile rows are not permuted
        last = num_slots - 1
        first = tl.minimum(tl.maximum(tl.load(tiles + tl.load(tiles + 2) + pid_m), 0), last)
        row = tl.minimum(first + tl.arange(0, BLOCK_M), last).to(tl.int64)
    return row


@triton.jit
def load_tile(
    pointers, k, rows_inside, K: tl.constexpr, BLOCK_K: tl.constexpr, K_AXIS: tl.constexpr
):
    """A tile of an operand, zero past K and outside of rows_inside (None: all rows are inside)."""
    if K % BLOCK_K == 0:
        if rows_inside is None:
            tile = tl.load(pointers)
        else:
            tile = tl.load(pointers, mask=tl.expand_dims(rows_inside, K_AXIS), other=0.0)
    else:
        mask = tl.expand_dims(k < K, 1 - K_AXIS)
        if rows_inside is not None:
            mask = mask & tl.expand_dims(rows_inside, K_AXIS)
        tile = tl.load(pointers, mask=mask, other=0.0)
    return tile


@triton.jit
def add_dot(acc, x, y):
    """``acc + x @ y``.

    In float32 the product starts from zero and is added: sums of partial sums lose less precision
    than one long sum.
    """
    if x.dtype == tl.float32:
        product = tl.dot(x, y, input_precision="ieee")
        # An fma, because Triton would fuse a plain addition into the dot.
        acc = tl.fma(product, tl.full(product.shape, 1.0, tl.float32), acc)
    else:
        acc = tl.dot(x, y, acc)
    return acc


@triton.jit
def columns_of(pid_n, N: tl.constexpr, BLOCK_N: tl.constexpr):
    """The output columns of a tile, and which of them are inside."""
    n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    return n, n < N
