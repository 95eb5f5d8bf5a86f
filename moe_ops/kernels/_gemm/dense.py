"""Portable expert GEMM kernels for operands that are not quantized.

Pointer loads, rows gathered by slot, float32 accumulation. ``M`` counts slots, ``N`` weight rows of
one expert, ``K`` is the contraction. GEMM 1: ``N = 2I`` (or ``I``), ``K = H``; GEMM 2: ``N = H``,
``K = I``. One program computes one tile of one expert. ``ORDERED`` names which of ``a`` and ``out``
has its rows in the order of the plan instead of in slot order, if any.
"""

from __future__ import annotations

from functools import lru_cache

import triton
import triton.language as tl
from torch import Tensor

from moe_ops.activation import formula
from moe_ops.dispatch.gemm_plan import GemmPlan
from moe_ops.dispatch.problem import GemmProblem, WeightRows
from moe_ops.dispatch.tile_plan import split_tiles
from moe_ops.dispatch.tiles import TileConfig, cuts_up, max_programs, own_plan, with_own_plan
from moe_ops.kernels._gemm.epilogue import activate, add_bias, multiply_by, store_tile
from moe_ops.kernels._gemm.operands import GemmOperands
from moe_ops.kernels._gemm.tile import (
    COUNTED,
    add_dot,
    columns_of,
    find_tile,
    load_slots,
    load_tile,
    rows_between,
    tile_arguments,
)
from moe_ops.kernels._runtime.dependent import take_turn
from moe_ops.kernels._runtime.launch import Launch
from moe_ops.kernels._runtime.slots import dense


@triton.jit(do_not_specialize=COUNTED)
def _expert_gemm_kernel(
    a, w, bias, topk_weights, out, product,
    tiles, expert_map, num_slots, num_ids, num_experts, num_entries,
    stride_am, stride_we, stride_wn, stride_wk, width, column,
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, ORDERED: tl.constexpr,
    ADDS: tl.constexpr, RULE: tl.constexpr, STEP: tl.constexpr, UP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """``out[s] = f(topk_weights[s] * a[s // TOP_K] @ w[e].T + bias[e])``; ADDS: added to out[s].

    ADDS is the step between the columns of ``out`` to which columns are added, or 0. ``column``
    is the first of them, ``width`` the number of all.
    ``product``: the result before f, in slot order, or None.
    RULE is the `Formula` of f or None, N counts output columns. STEP is the distance in weight rows
    from one column to the next, UP from a gate row to its up row (0 without a gate).
    """
    take_turn(LONG=True)
    pid_m, pid_n, expert = find_tile(
        tiles, expert_map, num_slots, num_ids, num_experts, num_entries,
        N, BLOCK_M, BLOCK_N, GROUP_M,
    )  # fmt: skip
    if expert < 0:
        return
    WEIGHT_ROWS: tl.constexpr = 2 * N if UP > 0 else N
    slot, real = load_slots(tiles, pid_m, num_slots, num_ids, BLOCK_M)
    n, inside = columns_of(pid_n, N, BLOCK_N)
    n_inside = None if N % BLOCK_N == 0 else inside
    w_row = STEP * n
    k = tl.arange(0, BLOCK_K)
    source = rows_between(tiles, pid_m, slot // TOP_K, num_slots, num_ids, ORDERED == "a", BLOCK_M)
    a_tile = a + source[:, None] * stride_am + k[None, :]
    w_tile = w + expert * stride_we + w_row[None, :] * stride_wn + k[:, None] * stride_wk
    u_tile = w_tile + UP * stride_wn

    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        x = load_tile(a_tile + start, k + start, real, K, BLOCK_K, 1)
        y = load_tile(w_tile + start * stride_wk, k + start, n_inside, K, BLOCK_K, 0)
        if UP > 0:
            z = load_tile(u_tile + start * stride_wk, k + start, n_inside, K, BLOCK_K, 0)
        acc = add_dot(acc, x, y)
        if UP > 0:
            up = add_dot(up, x, z)

    first = expert * WEIGHT_ROWS
    acc = multiply_by(acc, topk_weights, slot, real, 0)
    acc = add_bias(acc, bias, first, w_row, inside, 1)
    if UP > 0:
        up = multiply_by(up, topk_weights, slot, real, 0)
        up = add_bias(up, bias, first, w_row + UP, inside, 1)
    if product is not None:
        store_tile(product, acc, slot, w_row, real, inside, WEIGHT_ROWS)
        if UP > 0:
            store_tile(product, up, slot, w_row + UP, real, inside, WEIGHT_ROWS)
    if RULE is not None:
        acc = activate(acc, up, RULE)
    row = rows_between(tiles, pid_m, slot, num_slots, num_ids, ORDERED == "out", BLOCK_M)
    if ADDS > 0:
        there = out + row[:, None] * width + column + n[None, :] * ADDS
        mask = real[:, None] & inside[None, :]
        acc += tl.load(there, mask=mask, other=0.0).to(tl.float32)
        tl.store(there, acc.to(out.dtype.element_ty), mask=mask)
    else:
        store_tile(out, acc, row, n, real, inside, N)


class DenseGemm:
    """A portable kernel for operands that are not quantized, ready to run."""

    def __init__(self, problem: GemmProblem, plan: GemmPlan) -> None:
        sizes, tiles = problem.sizes, plan.config
        if own_plan(sizes, tiles):
            sizes = with_own_plan(sizes, tiles)
        self.rule, self.part = sizes.rule, cuts_up(sizes, tiles)
        self.adds = problem.adds
        self.programs, self.num_experts = max_programs(sizes, tiles), sizes.num_experts
        self.launch = _dense_gemm_launch(
            sizes.n, sizes.k, problem.top_k, problem.permuted, problem.activation, tiles,
            problem.adds,
        )  # fmt: skip

    def __call__(self, out: Tensor, operands: GemmOperands) -> None:
        """Launch one program for each tile that the plan may hold."""
        a, w, num_slots = operands.a, operands.weight.data, out.shape[0]
        told = tile_arguments(operands.tiles, num_slots, self.num_experts)
        if self.part and told[3] is None:  # a plan for Hopper's kernels, which do not serve
            plan = split_tiles(told[0], num_slots, told[4], self.rule, self.part)
            told = (plan, *told[1:-1], plan.shape[0])
        vectors = dense(operands.weight.bias), dense(operands.topk_weights)
        place = (out.shape[1], operands.column) if self.adds else (None, None)
        strides = (a.stride(0), *w.stride())
        self.launch(
            (self.programs,), a, w, *vectors, out, operands.product, *told, *strides, *place
        )


@lru_cache(maxsize=1024)
def _dense_gemm_launch(
    n: int,
    k: int,
    top_k: int,
    ordered: str | None,
    activation: str,
    tiles: TileConfig,
    adds: int,
) -> Launch:
    rule = formula(activation) if activation else None
    step, up, *_ = WeightRows.of(rule, n, None, None)
    sizes = {"N": n, "K": k, "TOP_K": top_k, "ORDERED": ordered, "ADDS": adds, "RULE": rule}
    return Launch(_expert_gemm_kernel, STEP=step, UP=up, **sizes, **tiles.constants())
