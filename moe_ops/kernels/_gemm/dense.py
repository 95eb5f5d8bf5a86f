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
from moe_ops.dispatch.problem import GemmProblem
from moe_ops.dispatch.tile_plan import split_tiles
from moe_ops.dispatch.tiles import (
    TileConfig,
    cuts_up,
    max_programs,
    own_plan,
    with_own_plan,
)
from moe_ops.kernels._gemm.operands import GemmOperands
from moe_ops.kernels._gemm.tile import (
    COUNTED,
    add_bias,
    add_dot,
    columns_of,
    find_tile,
    load_slots,
    load_tile,
    rows_between,
    scale_rows,
    store_tile,
    tile_arguments,
)
from moe_ops.kernels._runtime.dependent import take_turn
from moe_ops.kernels._runtime.launch import Launch
from moe_ops.kernels._runtime.slots import dense
from moe_ops.kernels.activation import constants, gate, gate_up
from moe_ops.kernels.align import sorted_slots


@triton.jit(do_not_specialize=COUNTED)
def _expert_gemm_kernel(
    a, w, bias, topk_weights, out,
    tiles, expert_map, num_slots, num_ids, num_experts, num_entries,
    stride_am, stride_we, stride_wn, stride_wk,
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, ORDERED: tl.constexpr,
    ADDS: tl.constexpr,
    FUNCTION: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, BETA: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """``out[s] = f(topk_weights[s] * a[s // TOP_K] @ w[e].T + bias[e])``; ADDS: added to out[s]."""
    take_turn(LONG=True)
    pid_m, pid_n, expert = find_tile(
        tiles, expert_map, num_slots, num_ids, num_experts, num_entries,
        N, BLOCK_M, BLOCK_N, GROUP_M,
    )  # fmt: skip
    if expert < 0:
        return
    slot, real = load_slots(tiles, pid_m, num_slots, num_ids, BLOCK_M)
    n, inside = columns_of(pid_n, N, BLOCK_N)
    n_inside = None if N % BLOCK_N == 0 else inside
    k = tl.arange(0, BLOCK_K)
    source = rows_between(tiles, pid_m, slot // TOP_K, num_slots, num_ids, ORDERED == "a", BLOCK_M)
    a_tile = a + source[:, None] * stride_am + k[None, :]
    w_tile = w + expert * stride_we + n[None, :] * stride_wn + k[:, None] * stride_wk

    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        x = load_tile(a_tile + start, k + start, real, K, BLOCK_K, 1)
        y = load_tile(w_tile + start * stride_wk, k + start, n_inside, K, BLOCK_K, 0)
        acc = add_dot(acc, x, y)

    acc = scale_rows(acc, topk_weights, slot, real)
    acc = add_bias(acc, bias, expert, n, inside, N)
    if FUNCTION is not None:
        acc = gate(acc, FUNCTION, LIMIT, ALPHA, BETA)
    row = rows_between(tiles, pid_m, slot, num_slots, num_ids, ORDERED == "out", BLOCK_M)
    if ADDS:
        there = out + row[:, None] * N + n[None, :]
        acc += tl.load(there, mask=real[:, None] & inside[None, :], other=0.0).to(tl.float32)
    store_tile(out, acc, row, n, real, inside, N)


@triton.jit(do_not_specialize=COUNTED)
def _expert_gemm_gated_kernel(
    a, w, bias, topk_weights, out,
    tiles, expert_map, num_slots, num_ids, num_experts, num_entries,
    stride_am, stride_we, stride_wn, stride_wk,
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, ORDERED: tl.constexpr,
    INTERLEAVED: tl.constexpr, FUNCTION: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr,
    BETA: tl.constexpr, LINEAR_BETA: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """`_expert_gemm_kernel` with gate and up: ``out[s] = f(gate, up)``; N counts output columns."""
    take_turn(LONG=True)
    pid_m, pid_n, expert = find_tile(
        tiles, expert_map, num_slots, num_ids, num_experts, num_entries,
        N, BLOCK_M, BLOCK_N, GROUP_M,
    )  # fmt: skip
    if expert < 0:
        return
    slot, real = load_slots(tiles, pid_m, num_slots, num_ids, BLOCK_M)
    n, inside = columns_of(pid_n, N, BLOCK_N)
    n_inside = None if N % BLOCK_N == 0 else inside
    gate_row = 2 * n if INTERLEAVED else n
    UP: tl.constexpr = 1 if INTERLEAVED else N
    k = tl.arange(0, BLOCK_K)
    a_tile = a + (slot // TOP_K)[:, None] * stride_am + k[None, :]
    g_tile = w + expert * stride_we + gate_row[None, :] * stride_wn + k[:, None] * stride_wk
    u_tile = g_tile + UP * stride_wn

    g = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    u = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        x = load_tile(a_tile + start, k + start, real, K, BLOCK_K, 1)
        y = load_tile(g_tile + start * stride_wk, k + start, n_inside, K, BLOCK_K, 0)
        z = load_tile(u_tile + start * stride_wk, k + start, n_inside, K, BLOCK_K, 0)
        g = add_dot(g, x, y)
        u = add_dot(u, x, z)

    g = add_bias(scale_rows(g, topk_weights, slot, real), bias, expert, gate_row, inside, 2 * N)
    u = scale_rows(u, topk_weights, slot, real)
    u = add_bias(u, bias, expert, gate_row + UP, inside, 2 * N)
    value = gate_up(g, u, FUNCTION, LIMIT, ALPHA, BETA, LINEAR_BETA)
    row = rows_between(tiles, pid_m, slot, num_slots, num_ids, ORDERED == "out", BLOCK_M)
    store_tile(out, value, row, n, real, inside, N)


class DenseGemm:
    """A portable kernel for operands that are not quantized, ready to run."""

    def __init__(self, problem: GemmProblem, plan: GemmPlan) -> None:
        sizes, tiles = problem.sizes, plan.config
        self.sorts = own_plan(sizes, tiles)
        if self.sorts:
            sizes = with_own_plan(sizes, tiles)
        self.rule, self.part = sizes.rule, cuts_up(sizes, tiles)
        self.programs = max_programs(sizes, tiles)
        how = (sizes.n, sizes.k, problem.top_k, problem.permuted, problem.activation, tiles)
        self.launch = _gated(*how) if sizes.halves == 2 else _plain(*how, problem.adds)

    def __call__(self, out: Tensor, given: GemmOperands) -> None:
        """Launch one program for each tile that the plan may hold."""
        a, w, num_slots, tiles = given.a, given.weight.data, out.shape[0], given.tiles
        if self.sorts:
            tiles = (sorted_slots(*tiles[1:], w.shape[0], self.rule), *tiles[1:])
        told = tile_arguments(tiles, num_slots, w.shape[0])
        if self.part and told[3] is None:  # a plan for Hopper's kernels, which do not serve
            plan = split_tiles(told[0], num_slots, w.shape[0], self.rule, self.part)
            told = (plan, *told[1:-1], plan.shape[0])
        vectors = dense(given.weight.bias), dense(given.topk_weights)
        self.launch((self.programs,), a, w, *vectors, out, *told, a.stride(0), *w.stride())


@lru_cache(maxsize=1024)
def _plain(
    n: int,
    k: int,
    top_k: int,
    ordered: str | None,
    activation: str,
    tiles: TileConfig,
    adds: bool,
) -> Launch:
    """Launch of the kernel with one accumulator per tile."""
    rule = formula(activation) if activation else None
    return Launch(
        _expert_gemm_kernel,
        N=n,
        K=k,
        TOP_K=top_k,
        ORDERED=ordered,
        ADDS=adds,
        FUNCTION=rule and rule.function,
        LIMIT=rule and rule.limit,
        ALPHA=rule and rule.alpha,
        BETA=rule and rule.beta,
        **tiles.constants(),
    )


@lru_cache(maxsize=1024)
def _gated(
    n: int, k: int, top_k: int, ordered: str | None, activation: str, tiles: TileConfig
) -> Launch:
    """Launch of the kernel with a gate and an up accumulator per tile."""
    rule = formula(activation)
    return Launch(
        _expert_gemm_gated_kernel,
        N=n,
        K=k,
        TOP_K=top_k,
        ORDERED=ordered,
        INTERLEAVED=rule.interleaved,
        **constants(rule),
        **tiles.constants(),
    )
