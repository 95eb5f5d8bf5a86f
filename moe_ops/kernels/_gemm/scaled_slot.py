"""Triton kernel that quantizes the rows of few slots and computes a GEMM of quantized operands.

One slot per tile. Every program quantizes the row of its slot again, piece by piece in the main
loop, which costs less than a separate launch that does it once. The scales of rows and weights span
K: see `moe_ops.dispatch.families.portable.SLOT`.
"""

from __future__ import annotations

from functools import lru_cache

import triton
import triton.language as tl
from torch import Tensor

from moe_ops.dispatch.gemm_plan import GemmPlan
from moe_ops.dispatch.problem import GemmProblem
from moe_ops.dispatch.tiles import TileConfig, max_programs, next_power_of_2
from moe_ops.kernels._gemm.epilogue import activate
from moe_ops.kernels._gemm.operands import GemmOperands
from moe_ops.kernels._gemm.scaled import (
    ScaledVariant,
    add_product,
    find_scales,
    finish_sums,
    load_weight_scales,
    zero_sums,
)
from moe_ops.kernels._gemm.tile import COUNTED, columns_of, find_tile, load_tile, tile_arguments
from moe_ops.kernels._quantize.rounding import encode, magnitude, rule_of, scale_of
from moe_ops.kernels._runtime.dependent import take_turn
from moe_ops.kernels._runtime.launch import Launch
from moe_ops.kernels._runtime.slots import dense

BYTES_AT_ONCE = 256
"""Bytes of a row that a thread reads at once to find the row's largest magnitude."""


@triton.jit
def scale_of_row(row, static_scale, K: tl.constexpr, QUANT: tl.constexpr, CHUNK: tl.constexpr):
    """The scale (1,) of a whole row: the given one, or one from the row's largest magnitude."""
    if static_scale is not None:
        scale = tl.load(static_scale + tl.arange(0, 1)).to(tl.float32)
    else:
        most = tl.zeros((1,), dtype=tl.int32)
        for start in tl.static_range(0, K, CHUNK):
            k = start + tl.arange(0, CHUNK)
            x = load_piece(row, k, K, CHUNK).to(tl.float32)
            most = tl.maximum(most, tl.max(magnitude(x), 1))
        scale = scale_of(most.to(tl.float32, bitcast=True), QUANT)
    return scale


@triton.jit
def load_piece(row, k, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Columns k of a row: (1, BLOCK_K)."""
    return load_tile(row + k[None, :], k, None, K, BLOCK_K, 1)


@triton.jit
def quantize_piece(
    x, scale, k, K: tl.constexpr, BLOCK_K: tl.constexpr, QUANT: tl.constexpr, dtype: tl.constexpr
):
    """Quantize a piece (1, BLOCK_K) of a row with the scale (1,) of the row."""
    ratio = tl.div_rn(x.to(tl.float32), scale[:, None])
    if K % BLOCK_K > 0:
        ratio = tl.where((k < K)[None, :], ratio, 0.0)  # 0 / (a given scale) may be NaN
    return encode(ratio, QUANT).to(dtype)


@triton.jit
def add_row(acc, x, y, LAYOUT: tl.constexpr):
    """`add_product` of one row with operands swapped: ``acc`` (BLOCK_N, COLUMNS).

    The second operand of an MMA has at least 8 columns: each column is a copy of the row.
    """
    x = tl.broadcast_to(tl.trans(x), (x.shape[1], acc.shape[1]))
    return add_product(acc, y, x, None, None, LAYOUT)


@triton.jit
def finish(
    acc, up, scale, scales, bias, expert, w_row, inside, RULE: tl.constexpr, LAYOUT: tl.constexpr
):
    """The outputs (COLUMNS, BLOCK_N) from the sums of gate rows and up rows (BLOCK_N, COLUMNS)."""
    acc = finish_sums(tl.trans(acc), scale, scales[0], bias, expert, w_row, inside, LAYOUT)
    if LAYOUT.up > 0:
        w_row += LAYOUT.up
        up = finish_sums(tl.trans(up), scale, scales[1], bias, expert, w_row, inside, LAYOUT)
    if RULE is not None:
        acc = activate(acc, up, RULE)
    return acc


@triton.jit(do_not_specialize=COUNTED)
def scaled_gemm_slot_kernel(
    a, a_scale, w, w_scale, bias, out,
    tiles, expert_map, num_slots, num_ids, num_experts, num_entries,
    stride_am, stride_we, stride_wn, stride_wk,
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr,
    RULE: tl.constexpr, LAYOUT: tl.constexpr, QUANT: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """``out[s] = f(scale * w_scale * q(a[s // TOP_K]) @ w[e].T + bias[e])``.

    Quantizes row ``a[s // TOP_K]`` to ``q`` and ``scale``. Bitwise equal to `scaled_gemm_kernel` on
    rows quantized before. ``a_scale`` is the given scale of all rows, or None. QUANT is the `Rule`
    of rows, CHUNK the columns read at once to find a row's scale; for the other arguments see
    `scaled_gemm_kernel`.
    """
    take_turn(LONG=True)
    slot, pid_n, expert = find_tile(
        tiles, expert_map, num_slots, num_ids, num_experts, num_entries,
        N, BLOCK_M, BLOCK_N, GROUP_M,
    )  # fmt: skip
    row, out = a + slot.to(tl.int64) // TOP_K * stride_am, out + slot.to(tl.int64) * N
    scale = scale_of_row(row, a_scale, K, QUANT, CHUNK)  # overlaps the load of the expert's id
    if expert < 0:
        return
    n, inside = columns_of(pid_n, N, BLOCK_N)
    n_inside = None if N % BLOCK_N == 0 else inside
    k = tl.arange(0, BLOCK_K)
    w_row = LAYOUT.step * n
    w_tile = w + expert * stride_we + w_row[:, None] * stride_wn + k[None, :] * stride_wk
    scale_at = find_scales(w_scale, expert, LAYOUT.step * pid_n * BLOCK_N, w_row, K, LAYOUT)
    scales = load_weight_scales(scale_at[0], scale_at[1], 0, inside, LAYOUT)
    ELEMENT: tl.constexpr = w.dtype.element_ty
    LAST: tl.constexpr = (K - 1) // BLOCK_K * BLOCK_K
    x = quantize_piece(load_piece(row, k, K, BLOCK_K), scale, k, K, BLOCK_K, QUANT, ELEMENT)
    ahead = load_piece(row, k + min(BLOCK_K, LAST), K, BLOCK_K)
    acc, up = zero_sums(BLOCK_N, BLOCK_M, LAYOUT), zero_sums(BLOCK_N, BLOCK_M, LAYOUT)
    for start in range(0, K, BLOCK_K):
        y_tile = w_tile + start * stride_wk
        y = load_tile(y_tile, k + start, n_inside, K, BLOCK_K, 1)
        acc = add_row(acc, x, y, LAYOUT)
        if LAYOUT.up > 0:
            z = load_tile(y_tile + LAYOUT.up * stride_wn, k + start, n_inside, K, BLOCK_K, 1)
            up = add_row(up, x, z, LAYOUT)
        # The next piece is quantized, and the one after it loaded, while this one is multiplied.
        after = tl.minimum(start + BLOCK_K, LAST)
        x = quantize_piece(ahead, scale, k + after, K, BLOCK_K, QUANT, ELEMENT)
        ahead = load_piece(row, k + tl.minimum(start + 2 * BLOCK_K, LAST), K, BLOCK_K)
    acc = finish(acc, up, scale, scales, bias, expert, w_row, inside, RULE, LAYOUT)
    mask = (tl.arange(0, BLOCK_M) == 0)[:, None] & inside[None, :]  # all rows are copies
    tl.store(out + tl.broadcast_to(n[None, :], mask.shape), acc.to(out.dtype.element_ty), mask=mask)


class SlotGemm:
    """The kernel for few slots that quantizes their rows, ready to run."""

    def __init__(self, problem: GemmProblem, plan: GemmPlan) -> None:
        sizes, tiles = problem.sizes, plan.config
        at_once = 32 * tiles.num_warps * BYTES_AT_ONCE // sizes.itemsize
        chunk = min(next_power_of_2(sizes.k), at_once)
        self.programs, self.num_experts = max_programs(sizes, tiles), sizes.num_experts
        self.launch = _scaled_slot_launch(ScaledVariant.of(problem), chunk, tiles)

    def __call__(self, out: Tensor, operands: GemmOperands) -> None:
        """Launch one program per slot and tile of columns."""
        a, w = operands.a, operands.weight.data
        scales = dense(operands.a_scale), dense(operands.weight.scale)
        told = tile_arguments(operands.tiles, out.shape[0], self.num_experts)
        bias = dense(operands.weight.bias)
        self.launch(
            (self.programs,), a, scales[0], w, scales[1], bias, out, *told, a.stride(0), *w.stride()
        )


@lru_cache(maxsize=1024)
def _scaled_slot_launch(variant: ScaledVariant, chunk: int, tiles: TileConfig) -> Launch:
    quant = rule_of(variant.quant)
    constants = variant.constants(tiles)
    return Launch(scaled_gemm_slot_kernel, QUANT=quant, CHUNK=chunk, **constants)
