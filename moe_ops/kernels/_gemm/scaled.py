"""Triton kernel of the expert GEMMs with two quantized operands.

``M`` counts slots, ``N`` output columns, ``K`` is the contraction. A scale of a group along K
multiplies the product of that group before it is added in float32; scales that span K multiply the
sum.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from moe_ops.activation import Formula, formula
from moe_ops.dispatch.gemm_plan import GemmPlan
from moe_ops.dispatch.portable import scale_groups
from moe_ops.dispatch.problem import GemmProblem, WeightRows
from moe_ops.dispatch.tiles import TileConfig, max_programs
from moe_ops.kernels._gemm.epilogue import activate, add_bias, store_tile
from moe_ops.kernels._gemm.operands import GemmOperands
from moe_ops.kernels._gemm.tile import (
    COUNTED,
    columns_of,
    find_tile,
    load_slots,
    load_tile,
    tile_arguments,
)
from moe_ops.kernels._runtime.dependent import take_turn
from moe_ops.kernels._runtime.launch import Launch
from moe_ops.kernels._runtime.slots import dense
from moe_ops.scheme import Quant


class Layout(NamedTuple):
    """Layout of a weight's rows and of the scales: constants of the kernel."""

    step: int
    """Distance in weight rows from one output column to the next."""
    up: int
    """Distance in weight rows from a gate row to its up row; 0 without a gate."""
    weight_rows: int
    """Weight rows per expert."""
    rows: int
    """Weight rows that share a scale."""
    cols: int | None
    """Elements along K that share a scale, of both operands; None: all."""
    uniform: bool
    """Whether the rows of every weight tile share a scale."""
    integer: bool
    """Whether stored values are integers."""


@triton.jit
def find_scales(w_scale, expert, first, row, K: tl.constexpr, LAYOUT: tl.constexpr):
    """Pointers to the scales of a tile's weight rows (gate rows), and of its up rows."""
    GROUPS: tl.constexpr = 1 if LAYOUT.cols is None else (K + LAYOUT.cols - 1) // LAYOUT.cols
    PER_EXPERT: tl.constexpr = (LAYOUT.weight_rows + LAYOUT.rows - 1) // LAYOUT.rows * GROUPS
    w_scale += expert * PER_EXPERT
    at = first if LAYOUT.uniform else row
    up = at + LAYOUT.up
    return w_scale + at // LAYOUT.rows * GROUPS, w_scale + up // LAYOUT.rows * GROUPS


@triton.jit
def load_scales(a_scale, y_scales, z_scales, group, real, inside, LAYOUT: tl.constexpr):
    """The scales of a group along K: of rows, weight rows and up rows."""
    x_scale = tl.load(a_scale + group, mask=real, other=0.0).to(tl.float32)
    y_scale, z_scale = load_weight_scales(y_scales, z_scales, group, inside, LAYOUT)
    return x_scale, y_scale, z_scale


@triton.jit
def load_weight_scales(y_scales, z_scales, group, inside, LAYOUT: tl.constexpr):
    """The scales of a group along K: of weight rows (gate rows) and of up rows."""
    if LAYOUT.uniform:
        y_scale = scale_value(tl.load(y_scales + group))
    else:
        y_scale = scale_value(tl.load(y_scales + group, mask=inside, other=0))
    z_scale = y_scale
    if LAYOUT.up > 0:
        if LAYOUT.uniform:
            z_scale = scale_value(tl.load(z_scales + group))
        else:
            z_scale = scale_value(tl.load(z_scales + group, mask=inside, other=0))
    return y_scale, z_scale


@triton.jit
def scale_value(stored):
    """A weight's scales in float32. Bytes are e8m0 codes; code 0 (2**-127) becomes 0."""
    if stored.dtype == tl.uint8:
        value = (stored.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    else:
        value = stored.to(tl.float32)
    return value


@triton.jit
def zero_sums(ROWS: tl.constexpr, COLS: tl.constexpr, LAYOUT: tl.constexpr):
    """Zero accumulators: int32 (exact) for int8 with scales that span K, else float32."""
    if LAYOUT.integer and LAYOUT.cols is None:
        acc = tl.zeros((ROWS, COLS), dtype=tl.int32)
    else:
        acc = tl.zeros((ROWS, COLS), dtype=tl.float32)
    return acc


@triton.jit
def apply_scales(product, x_scale, w_scale, LAYOUT: tl.constexpr):
    """``product`` in float32 times the scales of its rows and of its columns."""
    value = product.to(tl.float32)
    if LAYOUT.uniform:
        value *= (x_scale * w_scale)[:, None]
    else:
        value *= x_scale[:, None] * w_scale[None, :]
    return value


@triton.jit
def add_product(acc, x, y, x_scale, w_scale, LAYOUT: tl.constexpr):
    """``acc + x @ y``, the product scaled if scales are per group along K.

    Hopper's fp8 tensor cores accumulate in fewer bits than float32 has, so each product starts from
    zero and is added in float32.
    """
    if LAYOUT.integer and LAYOUT.cols is None:
        acc = tl.dot(x, y, acc, out_dtype=tl.int32)
    elif LAYOUT.cols is None:
        acc += tl.dot(x, y)
    else:
        if LAYOUT.cols < 32:  # less than the K of an 8-bit MMA; the product is exact in fp16
            x, y = x.to(tl.float16), y.to(tl.float16)
        acc += apply_scales(tl.dot(x, y), x_scale, w_scale, LAYOUT)
    return acc


@triton.jit
def finish_sums(acc, x_scale, w_scale, bias, expert, row, inside, LAYOUT: tl.constexpr):
    """Apply scales that span K, and add the bias of each weight row."""
    if LAYOUT.cols is None:
        acc = apply_scales(acc, x_scale, w_scale, LAYOUT)
    return add_bias(acc, bias, expert * LAYOUT.weight_rows, row, inside, 1)


@triton.jit(do_not_specialize=COUNTED)
def scaled_gemm_kernel(
    a, a_scale, w, w_scale, bias, out, product,
    tiles, expert_map, num_slots, num_ids, num_experts, num_entries,
    stride_am, stride_sm, stride_se, stride_we, stride_wn, stride_wk,
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr,
    RULE: tl.constexpr, LAYOUT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """``out[s] = f(a_scale * w_scale * a[s // TOP_K] @ w[e].T + bias[e])``.

    ``product``: the result before f, or None. RULE is the `Formula` of f or None, LAYOUT a
    `Layout`; both are NamedTuples.
    """
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
    row = LAYOUT.step * n
    w_tile = w + expert * stride_we + row[None, :] * stride_wn + k[:, None] * stride_wk
    first = LAYOUT.step * pid_n * BLOCK_N
    y_scales, z_scales = find_scales(w_scale, expert, first, row, K, LAYOUT)
    a_tile = a + (slot // TOP_K)[:, None] * stride_am + k[None, :]
    a_scale += slot // TOP_K * stride_sm + expert * stride_se
    scales = load_scales(a_scale, y_scales, z_scales, 0, real, inside, LAYOUT)
    acc, up = zero_sums(BLOCK_M, BLOCK_N, LAYOUT), zero_sums(BLOCK_M, BLOCK_N, LAYOUT)
    for start in range(0, K, BLOCK_K):
        x_scale, y_scale, z_scale = scales
        if LAYOUT.cols is not None:  # the scales of the next step are loaded one step ahead
            group = tl.minimum(start + BLOCK_K, K - 1) // LAYOUT.cols
            scales = load_scales(a_scale, y_scales, z_scales, group, real, inside, LAYOUT)
        x = load_tile(a_tile + start, k + start, real, K, BLOCK_K, 1)
        y_tile = w_tile + start * stride_wk
        y = load_tile(y_tile, k + start, n_inside, K, BLOCK_K, 0)
        acc = add_product(acc, x, y, x_scale, y_scale, LAYOUT)
        if LAYOUT.up > 0:
            z = load_tile(y_tile + LAYOUT.up * stride_wn, k + start, n_inside, K, BLOCK_K, 0)
            up = add_product(up, x, z, x_scale, z_scale, LAYOUT)
    if LAYOUT.cols is None:  # loaded only now: in the loop they would occupy registers
        scales = load_scales(a_scale, y_scales, z_scales, 0, real, inside, LAYOUT)
    acc = finish_sums(acc, scales[0], scales[1], bias, expert, row, inside, LAYOUT)
    if LAYOUT.up > 0:
        up = finish_sums(up, scales[0], scales[2], bias, expert, row + LAYOUT.up, inside, LAYOUT)
    if product is not None:
        store_tile(product, acc, slot, row, real, inside, LAYOUT.weight_rows)
        if LAYOUT.up > 0:
            store_tile(product, up, slot, row + LAYOUT.up, real, inside, LAYOUT.weight_rows)
    if RULE is not None:
        acc = activate(acc, up, RULE)
    store_tile(out, acc, slot, n, real, inside, N)


class ScaledGemm:
    """The portable kernel for two quantized operands, ready to run."""

    def __init__(self, problem: GemmProblem, plan: GemmPlan) -> None:
        self.quant, self.num_experts = problem.quant, problem.sizes.num_experts
        self.programs = max_programs(problem.sizes, plan.config)
        self.launch = _scaled_gemm_launch(ScaledVariant.of(problem), plan.config)

    def __call__(self, out: Tensor, operands: GemmOperands) -> None:
        """Launch one program for each tile that the plan may hold."""
        a, a_scale, w = operands.a, operands.a_scale, operands.weight.data
        scales, bias = (dense(a_scale), dense(operands.weight.scale)), dense(operands.weight.bias)
        told = tile_arguments(operands.tiles, out.shape[0], self.num_experts)
        strides = _scale_strides(a, a_scale, self.quant)
        self.launch(
            (self.programs,), a, scales[0], w, scales[1], bias, out, operands.product, *told,
            a.stride(0), *strides, *w.stride(),
        )  # fmt: skip


class ScaledVariant(NamedTuple):
    """Constants of a launch besides its tiles; they do not depend on the number of slots."""

    n: int
    """Output columns."""
    k: int
    top_k: int
    quant: Quant
    """Quantization of rows."""
    activation: str
    weight: WeightRows

    @staticmethod
    def of(problem: GemmProblem) -> ScaledVariant:
        """The variant of a problem."""
        sizes, quant = problem.sizes, problem.quant
        rest = (problem.activation, problem.weight_rows)
        return ScaledVariant(sizes.n, sizes.k, problem.top_k, quant, *rest)

    def constants(self, tiles: TileConfig) -> dict[str, Any]:
        """The constexpr arguments of a kernel for two quantized operands."""
        rule = formula(self.activation) if self.activation else None
        sizes = {"N": self.n, "K": self.k, "TOP_K": self.top_k}
        layout = self._layout(rule, tiles.block_n)
        return {**sizes, "RULE": rule, "LAYOUT": layout, **tiles.constants()}

    def _layout(self, rule: Formula | None, block_n: int) -> Layout:
        """The `Layout` for tiles of ``block_n`` output columns."""
        step, up, count, rows, *_ = self.weight
        groups = scale_groups(self.n, self.quant.shared_cols, rows, rule)
        return Layout(
            step=step,
            up=up,
            weight_rows=count,
            rows=rows,
            cols=groups.k,
            uniform=block_n <= groups.n,
            integer=not self.quant.dtype.is_floating_point,
        )


@lru_cache(maxsize=1024)
def _scaled_gemm_launch(variant: ScaledVariant, tiles: TileConfig) -> Launch:
    return Launch(scaled_gemm_kernel, **variant.constants(tiles))


def _scale_strides(a: Tensor, a_scale: Tensor, quant: Quant) -> tuple[int, int]:
    """Strides of row scales: from row to row, and from expert to expert."""
    if quant.per_tensor:
        return 0, int(a_scale.numel() > 1)
    return a_scale.numel() // a.shape[0], 0
