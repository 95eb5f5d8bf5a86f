"""Triton kernels of the expert GEMMs: pointer loads, rows gathered by slot, float32 accumulation.

``M`` counts slots, ``N`` weight rows of one expert, ``K`` is the contraction. GEMM 1: ``N = 2I``
(or ``I``), ``K = H``; GEMM 2: ``N = H``, ``K = I``. One program computes one tile of one expert.
``ORDERED`` names which of ``a`` and ``out`` has its rows in expert order, not by slot, if any.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_ops.activation import formula
from moe_ops.dispatch.choice import tiles_of
from moe_ops.dispatch.tiles import Gemm, TileConfig, cuts_up, device_facts, max_programs
from moe_ops.dispatch.tuned import Choice
from moe_ops.fake_impls.expert_gemm import expert_gemm as empty_rows
from moe_ops.fake_impls.expert_gemm import expert_gemm_act as empty_activated_rows
from moe_ops.kernels._gemm.tile import (
    COUNTED,
    add_bias,
    add_dot,
    find_tile,
    load_slots,
    load_tile,
    rows_between,
    scale_rows,
    tile_arguments,
)
from moe_ops.kernels._hopper import gemm as hopper_gemm
from moe_ops.kernels._hopper import token_gemm
from moe_ops.kernels._runtime.dependent import take_turn
from moe_ops.kernels._runtime.launch import Launch
from moe_ops.kernels.activation import constants, gate, gate_up
from moe_ops.scheme import get_scheme
from moe_ops.tensors import AnyTiles, split_tiles


@triton.jit(do_not_specialize=COUNTED)
def _expert_gemm_kernel(
    a, w, bias, input_weights, output_weights, out,
    tiles, expert_map, num_slots, num_ids, num_experts, num_entries,
    stride_am, stride_we, stride_wn, stride_wk,
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, ORDERED: tl.constexpr,
    FUNCTION: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, BETA: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """``out[s] = f(input_weights[s] * a[s // TOP_K] @ w[e].T + bias[e]) * output_weights[s]``."""
    take_turn(LONG=True)
    pid_m, pid_n, expert = find_tile(
        tiles, expert_map, num_slots, num_ids, num_experts, num_entries,
        N, BLOCK_M, BLOCK_N, GROUP_M,
    )  # fmt: skip
    if expert < 0:
        return
    slot, real = load_slots(tiles, pid_m, num_slots, num_ids, BLOCK_M)
    n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < N
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

    acc = scale_rows(acc, input_weights, slot, real)
    acc = add_bias(acc, bias, expert, n, inside, N)
    if FUNCTION is not None:
        acc = gate(acc, FUNCTION, LIMIT, ALPHA, BETA)
    acc = scale_rows(acc, output_weights, slot, real)
    row = rows_between(tiles, pid_m, slot, num_slots, num_ids, ORDERED == "out", BLOCK_M)
    at = out + row[:, None] * N + n[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=real[:, None] & inside[None, :])


@triton.jit(do_not_specialize=COUNTED)
def _expert_gemm_gated_kernel(
    a, w, bias, input_weights, out,
    tiles, expert_map, num_slots, num_ids, num_experts, num_entries,
    stride_am, stride_we, stride_wn, stride_wk,
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, ORDERED: tl.constexpr,
    INTERLEAVED: tl.constexpr, FUNCTION: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr,
    BETA: tl.constexpr, LINEAR_BETA: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """As above with gate and up side by side: ``out[s] = f(gate, up)``; N counts output columns."""
    take_turn(LONG=True)
    pid_m, pid_n, expert = find_tile(
        tiles, expert_map, num_slots, num_ids, num_experts, num_entries,
        N, BLOCK_M, BLOCK_N, GROUP_M,
    )  # fmt: skip
    if expert < 0:
        return
    slot, real = load_slots(tiles, pid_m, num_slots, num_ids, BLOCK_M)
    n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < N
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

    g = add_bias(scale_rows(g, input_weights, slot, real), bias, expert, gate_row, inside, 2 * N)
    u = scale_rows(u, input_weights, slot, real)
    u = add_bias(u, bias, expert, gate_row + UP, inside, 2 * N)
    value = gate_up(g, u, FUNCTION, LIMIT, ALPHA, BETA, LINEAR_BETA)
    row = rows_between(tiles, pid_m, slot, num_slots, num_ids, ORDERED == "out", BLOCK_M)
    at = out + row[:, None] * N + n[None, :]
    tl.store(at, value.to(out.dtype.element_ty), mask=real[:, None] & inside[None, :])


class Kernels(NamedTuple):
    """What may compute a GEMM."""

    hopper: tuple[hopper_gemm.Constants, bool] | None
    """Hopper's own kernel, and whether it packs rows; None where it does not serve."""
    launch: Launch
    """Of the kernel for all GPUs."""
    programs: int
    part: int | None
    """See `cuts_up`."""


@lru_cache(maxsize=4096)
def _kernels(
    num_slots: int,
    weight: tuple[int, int, int],
    itemsize: int,
    row_tiles: tuple[int, ...],
    top_k: int,
    device: torch.device,
    activation: str | None,
    ordered: str | None,
    weighted: bool,
) -> Kernels:
    """For an activation, or none, and rows with routing weights, or without."""
    gemm = _gemm(num_slots, weight, itemsize, row_tiles, activation)
    choice, own = _choose(gemm, device), None
    if choice.hopper is not None:
        rule = formula(activation) if activation else None
        scales = hopper_gemm.Scales(of_slots=weighted)
        how = (tuple(weight), itemsize, top_k, rule, scales, choice.hopper, ordered)
        own = hopper_gemm.constants(*how), choice.hopper.packed
    make, tiles = _gated if gemm.halves == 2 else _plain, choice.plain
    launch = make(gemm.n, gemm.k, top_k, ordered, activation, tiles)
    return Kernels(own, launch, max_programs(gemm, tiles), cuts_up(gemm, tiles))


def _gemm(
    num_slots: int,
    weight: tuple[int, int, int],
    itemsize: int,
    row_tiles: tuple[int, ...],
    activation: str | None,
) -> Gemm:
    num_experts, rows, k = weight
    halves = 2 if activation and formula(activation).gated else 1
    return Gemm(num_slots, num_experts, rows // halves, k, itemsize, halves, row_tiles)


def _choose(gemm: Gemm, device: torch.device) -> Choice:
    return tiles_of(gemm, get_scheme("unquantized"), None, device_facts(device))


@lru_cache(maxsize=1024)
def _plain(
    n: int, k: int, top_k: int, ordered: str | None, activation: str | None, tiles: TileConfig
) -> Launch:
    """One accumulator a tile."""
    rule = activation and formula(activation)
    return Launch(
        _expert_gemm_kernel,
        N=n,
        K=k,
        TOP_K=top_k,
        ORDERED=ordered,
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
    """Gate and up accumulators."""
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


def expert_gemm(
    a: Tensor,
    w: Tensor,
    bias: Tensor | None,
    input_weights: Tensor | None,
    output_weights: Tensor | None,
    plan: Tensor | None,
    topk_ids: Tensor | None,
    expert_map: Tensor | None,
    row_tiles: Sequence[int],
    top_k: int,
    expert_order: bool = False,
) -> Tensor:
    """Launch one program for each tile that the plan may hold."""
    tiles = (plan, topk_ids, expert_map)
    out = empty_rows(a, w, bias, input_weights, output_weights, *tiles, row_tiles, top_k)
    vectors = (bias, input_weights, output_weights)
    return _run(out, a, w, vectors, tiles, row_tiles, top_k, None, expert_order)


def expert_gemm_act(
    a: Tensor,
    w: Tensor,
    bias: Tensor | None,
    input_weights: Tensor | None,
    plan: Tensor | None,
    topk_ids: Tensor | None,
    expert_map: Tensor | None,
    row_tiles: Sequence[int],
    top_k: int,
    activation: str,
    expert_order: bool = False,
) -> Tensor:
    """Launch one program for each tile that the plan may hold."""
    tiles = (plan, topk_ids, expert_map)
    out = empty_activated_rows(a, w, bias, input_weights, *tiles, row_tiles, top_k, activation)
    operands, how = hopper_gemm.Operands(a, None, w, None, bias), (activation, "unquantized")
    if token_gemm.rows(out, operands, input_weights, tiles, row_tiles, *how):
        return out
    gated = formula(activation).gated  # its kernel scales no output
    vectors = (bias, input_weights) if gated else (bias, input_weights, None)
    return _run(out, a, w, vectors, tiles, row_tiles, top_k, activation, expert_order)


def _run(
    out: Tensor,
    a: Tensor,
    w: Tensor,
    vectors: tuple[Tensor | None, ...],
    tiles: AnyTiles,
    row_tiles: Sequence[int],
    top_k: int,
    activation: str | None,
    expert_order: bool,
) -> Tensor:
    """Launch the kernel for an activation, or none; ``vectors`` as it takes them."""
    num_slots = out.shape[0]
    if num_slots:
        stride, unit = a.stride()
        if unit != 1:
            a, stride = a.contiguous(), a.shape[1]
        shape = w.shape
        ordered = None if not expert_order else "out" if activation else "a"
        how = (num_slots, shape, w.itemsize, tuple(row_tiles), top_k, w.device, activation, ordered)
        vectors = tuple([v if v is None else v.contiguous() for v in vectors])
        told = tile_arguments(tiles, num_slots, shape[0])
        (bias, weights, *rest), in_place = vectors, a if ordered == "a" else None
        kernels, unscaled = _kernels(*how, weights is not None), all(v is None for v in rest)
        if kernels.hopper and unscaled and hopper_gemm.serves(a.dtype, w, in_place):
            given = hopper_gemm.Operands(a, weights, w, None, bias)
            hopper_gemm.run(out, given, told, *kernels.hopper)
            return out
        if kernels.part and told[3] is None:  # a plan for Hopper's kernels, which do not serve
            plan = split_tiles(told[0], num_slots, shape[0], row_tiles, kernels.part)
            told = (plan, *told[1:-1], plan.shape[0])
        kernels.launch((kernels.programs,), a, w, *vectors, out, *told, stride, *w.stride())
    return out
