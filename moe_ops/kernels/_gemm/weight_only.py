"""Triton kernel of the expert GEMMs that dequantize weights, or both operands.

``M`` counts slots, ``N`` output columns, ``K`` is the contraction. Weights are the second operand
of each product. Tensor cores that read registers take the dequantized weights from registers. For
tensor cores that read shared memory (WGMMA, tcgen05) the weights are written there first.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_ops.activation import formula
from moe_ops.dispatch.gemm_plan import GemmPlan
from moe_ops.dispatch.problem import GemmProblem, WeightRows
from moe_ops.dispatch.tiles import TileConfig, max_programs
from moe_ops.kernels._gemm.dequantize import Format, dequantize, load_groups, scale_value
from moe_ops.kernels._gemm.epilogue import activate, add_bias, multiply_by, store_tile
from moe_ops.kernels._gemm.operands import GemmOperands
from moe_ops.kernels._gemm.tile import (
    COUNTED,
    add_dot,
    columns_of,
    find_tile,
    load_slots,
    load_tile,
    tile_arguments,
)
from moe_ops.kernels._runtime.dependent import take_turn
from moe_ops.kernels._runtime.launch import Launch
from moe_ops.kernels._runtime.slots import dense
from moe_ops.scheme import Quant, Scheme, get_scheme
from moe_ops.scheme.weights import rows_per_scale


@triton.jit
def per_row(vector, expert, row, SHARE: tl.constexpr, COLS: tl.constexpr, FORMAT: tl.constexpr):
    """Pointers to the first entry of each weight row; None if there is no vector.

    Every SHARE weight rows of an expert share COLS entries.
    """
    at = None
    if vector is not None:
        PER_EXPERT: tl.constexpr = (FORMAT.weight_rows + SHARE - 1) // SHARE * COLS
        at = vector + expert * PER_EXPERT + row // SHARE * COLS
    return at


@triton.jit
def load_zero_points(
    zero_points, row, start, inside, K: tl.constexpr, BLOCK_K: tl.constexpr, FORMAT: tl.constexpr
):
    """Zero points of the groups that a step touches, minus the storage offset; None without any."""
    value = None
    if zero_points is not None:
        value = load_groups(zero_points, start, inside, K, BLOCK_K, FORMAT).to(tl.int32)
        if FORMAT.bits == 4:
            value = (value >> (4 * (row % 2)[None, :])) & 15
        value = value - FORMAT.offset
    return value


@triton.jit
def row_pointers(a, row, stride_am, BLOCK_K: tl.constexpr, ROWS: tl.constexpr):
    """Pointers to a tile's rows, and the entries of a step along K.

    Quantized rows are addressed with K first, (K, M), as weights are.
    """
    if ROWS is None:
        k = tl.arange(0, BLOCK_K)
        tile = a + row[:, None] * stride_am + k[None, :]
    else:
        k = tl.arange(0, BLOCK_K // 2 if ROWS.paired else BLOCK_K)
        tile = a + row[None, :] * stride_am + k[:, None]
    return tile, k


@triton.jit
def row_scales(a_scale, expert, row, stride_se, stride_sm):
    """Pointers to the scales of rows; None if rows are not quantized.

    None becomes a value here because a tuple in a kernel cannot hold it.
    """
    scales = a_scale
    if a_scale is not None:
        scales = a_scale + expert * stride_se + row * stride_sm
    return scales


@triton.jit
def load_rows(
    tile, scales, k, start, real, K: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr
):
    """A tile of rows (M, BLOCK_K); quantized rows are dequantized to bf16, which is exact."""
    if ROWS is None:
        x = load_tile(tile + start, k + start, real, K, BLOCK_K, 1)
    else:
        PACK: tl.constexpr = 2 if ROWS.paired else 1
        first = start // PACK
        stored = load_tile(tile + first, k + first, real, K // PACK, BLOCK_K // PACK, 0)
        scale = None
        if ROWS.in_tile:
            scale = load_groups(scales, start, real, K, BLOCK_K, ROWS)
        x = tl.trans(dequantize(stored, scale, None, tl.bfloat16, BLOCK_K, ROWS))
    return x


@triton.jit
def add_product(
    acc, x, stored, scales, zero_points, row, start, inside,
    K: tl.constexpr, BLOCK_K: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """``acc + x @ dequantized(stored)``; ``scales`` and ``zero_points`` are pointers per row."""
    scale = load_groups(scales, start, inside, K, BLOCK_K, FORMAT)
    zero_point = load_zero_points(zero_points, row, start, inside, K, BLOCK_K, FORMAT)
    y = dequantize(stored, scale, zero_point, x.dtype, BLOCK_K, FORMAT)
    if FORMAT.cols is None or FORMAT.in_tile:
        acc = add_dot(acc, x, y)
    else:
        acc += tl.dot(x, y, input_precision="ieee") * scale_value(scale, FORMAT)
    return acc


@triton.jit
def finish_sums(
    acc, scales, a_scales, global_scale, bias, topk_weights, expert, row, slot, real, inside,
    FORMAT: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Apply scales that span K, the global scale, router weights and the bias."""
    if ROWS is not None and ROWS.cols is None:
        acc *= tl.load(a_scales, mask=real, other=0.0)[:, None]
    if FORMAT.cols is None:
        acc *= scale_value(tl.load(scales, mask=inside, other=0), FORMAT)[None, :]
    if global_scale is not None:
        at = per_row(global_scale, expert, row, FORMAT.global_rows, 1, FORMAT)
        acc *= tl.load(at, mask=inside, other=0.0)[None, :]
    acc = multiply_by(acc, topk_weights, slot, real, 0)
    return add_bias(acc, bias, expert * FORMAT.weight_rows, row, inside, 1)


@triton.jit(do_not_specialize=COUNTED)
def weight_only_gemm_kernel(
    a, a_scale, w, w_scale, w_zero_point, w_global_scale, bias, topk_weights, out, product,
    tiles, expert_map, num_slots, num_ids, num_experts, num_entries,
    stride_am, stride_se, stride_sm, stride_we, stride_wn, stride_wk,
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr,
    RULE: tl.constexpr, FORMAT: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """``out[s] = f(topk_weights[s] * a[s // TOP_K] @ dequantized(w[e]).T + bias[e])``.

    ``product``: the result before f, or None. RULE is a `Formula` or None, FORMAT the `Format` of
    weights, ROWS the `Format` of rows, or None if rows are not quantized. Quantized rows are
    dequantized to bf16; scales of whole rows multiply the sums.
    """
    take_turn(LONG=True)
    pid_m, pid_n, expert = find_tile(
        tiles, expert_map, num_slots, num_ids, num_experts, num_entries,
        N, BLOCK_M, BLOCK_N, GROUP_M,
    )  # fmt: skip
    if expert < 0:
        return
    PACK: tl.constexpr = 2 if FORMAT.paired else 1
    SHARE: tl.constexpr = 2 if FORMAT.bits == 4 else 1  # rows whose zero points share a byte
    GROUPS: tl.constexpr = 1 if FORMAT.cols is None else (K + FORMAT.cols - 1) // FORMAT.cols
    slot, real = load_slots(tiles, pid_m, num_slots, num_ids, BLOCK_M)
    n, inside = columns_of(pid_n, N, BLOCK_N)
    n_inside = None if N % BLOCK_N == 0 else inside
    row, u_row = FORMAT.step * n, FORMAT.step * n + FORMAT.up
    entry = tl.arange(0, BLOCK_K // PACK)
    a_tile, a_k = row_pointers(a, slot // TOP_K, stride_am, BLOCK_K, ROWS)
    a_scales = row_scales(a_scale, expert, slot // TOP_K, stride_se, stride_sm)
    w_tile = w + expert * stride_we + row[None, :] * stride_wn + entry[:, None] * stride_wk
    scales = per_row(w_scale, expert, row, FORMAT.rows, GROUPS, FORMAT)
    u_scales = per_row(w_scale, expert, u_row, FORMAT.rows, GROUPS, FORMAT)
    zeros = per_row(w_zero_point, expert, row, SHARE, GROUPS, FORMAT)
    u_zeros = per_row(w_zero_point, expert, u_row, SHARE, GROUPS, FORMAT)

    g = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    u = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        x = load_rows(a_tile, a_scales, a_k, start, real, K, BLOCK_K, ROWS)
        y_tile, p = w_tile + start // PACK * stride_wk, entry + start // PACK
        y = load_tile(y_tile, p, n_inside, K // PACK, BLOCK_K // PACK, 0)
        g = add_product(g, x, y, scales, zeros, row, start, inside, K, BLOCK_K, FORMAT)
        if FORMAT.up > 0:
            z_tile = y_tile + FORMAT.up * stride_wn
            z = load_tile(z_tile, p, n_inside, K // PACK, BLOCK_K // PACK, 0)
            u = add_product(u, x, z, u_scales, u_zeros, u_row, start, inside, K, BLOCK_K, FORMAT)
    g = finish_sums(
        g, scales, a_scales, w_global_scale, bias, topk_weights, expert, row, slot, real, inside,
        FORMAT, ROWS,
    )  # fmt: skip
    if FORMAT.up > 0:
        u = finish_sums(
            u, u_scales, a_scales, w_global_scale, bias, topk_weights, expert, u_row, slot, real,
            inside, FORMAT, ROWS,
        )  # fmt: skip
    if product is not None:
        store_tile(product, g, slot, row, real, inside, FORMAT.weight_rows)
        if FORMAT.up > 0:
            store_tile(product, u, slot, u_row, real, inside, FORMAT.weight_rows)
    if RULE is not None:
        g = activate(g, u, RULE)
    store_tile(out, g, slot, n, real, inside, N)


class StoredGemm:
    """A portable kernel for stored weights, ready to run."""

    kernel: Any
    """The Triton kernel."""

    def __init__(self, problem: GemmProblem, plan: GemmPlan) -> None:
        self.problem, self.tiles = problem, plan.config
        self.scheme = get_scheme(problem.scheme)
        self.programs = max_programs(problem.sizes, plan.config)

    def viewed(self, operands: GemmOperands) -> GemmOperands:
        """The operands with stored values viewed as the kernel loads them."""
        return operands

    def vectors(self, operands: GemmOperands) -> tuple[Tensor | None, ...]:
        """The kernel's arguments between the weight's scales and the result."""
        return operands.weight.global_scale, operands.weight.bias

    def __call__(self, out: Tensor, operands: GemmOperands) -> None:
        """Launch one program for each tile that the plan may hold."""
        operands = self.viewed(operands)
        a, w, num_experts = operands.a, operands.weight.data, operands.weight.data.shape[0]
        variant = Variant.of(self.problem, operands, self.scheme)
        _weight_only_launch(type(self), variant, self.tiles)(
            (self.programs,),
            a,
            as_bytes(dense(operands.a_scale)),
            w,
            as_bytes(dense(operands.weight.scale)),
            *map(dense, self.vectors(operands)),
            out,
            operands.product,
            *tile_arguments(operands.tiles, out.shape[0], self.problem.sizes.num_experts),
            a.stride(0),
            *scale_strides(operands.a_scale, self.scheme.activation, num_experts),
            *w.stride(),
        )


class DequantizeGemm(StoredGemm):
    """The kernel that dequantizes weights, and quantized rows, ready to run."""

    kernel = weight_only_gemm_kernel

    def viewed(self, operands: GemmOperands) -> GemmOperands:
        """View stored values as `stored_entries`."""
        weight = operands.weight
        data = stored_entries(weight.data, self.scheme.weight)
        operands = operands._replace(weight=weight._replace(data=data))
        if self.scheme.activation is not None:
            operands = operands._replace(a=stored_entries(operands.a, self.scheme.activation))
        return operands

    def vectors(self, operands: GemmOperands) -> tuple[Tensor | None, ...]:
        """The kernel's arguments between the weight's scales and the result."""
        weight = operands.weight
        return weight.zero_point, weight.global_scale, weight.bias, operands.topk_weights


class Variant(NamedTuple):
    """Constants of a launch besides its tiles; they do not depend on the number of slots."""

    n: int
    """Output columns."""
    k: int
    top_k: int
    scheme: Scheme
    activation: str
    scale_rows: int
    """Weight rows that share a scale."""
    global_rows: int
    """Weight rows that share a global scale."""
    words: bool
    """Whether the kernel loads words of two neighbours along K from the weight."""
    row_words: bool
    """Whether the kernel loads words of two neighbours along K from quantized rows."""

    @staticmethod
    def of(problem: GemmProblem, operands: GemmOperands, scheme: Scheme) -> Variant:
        """The variant of a call."""
        sizes, (num_experts, rows, _) = problem.sizes, operands.weight.data.shape
        scale, factor = operands.weight.scale, operands.weight.global_scale
        halves = 1 if factor is None else factor.numel() // num_experts
        return Variant(
            n=sizes.n,
            k=sizes.k,
            top_k=problem.top_k,
            scheme=scheme,
            activation=problem.activation,
            scale_rows=rows_per_scale(scale, scheme.weight, rows),
            global_rows=rows // halves,
            words=operands.weight.data.dtype == torch.uint16,
            row_words=operands.a.dtype == torch.uint16,
        )

    def weight_format(self, tiles: TileConfig) -> Format:
        """The `Format` of the weights for these tiles."""
        quant = self.scheme.weight
        rule = formula(self.activation) if self.activation else None
        step, up, count, rows, cols, _ = WeightRows.of(rule, self.n, quant, self.scale_rows)
        return Format(
            step=step,
            up=up,
            weight_rows=count,
            paired=quant.element.values_per_byte == 2 or self.words,
            cols=cols,
            in_tile=cols is not None and (cols < tiles.block_k or tiles.block_m > 32),
            keeps_nan=False,
            rows=rows,
            global_rows=self.global_rows,
            **_stored(quant),
        )

    def row_format(self) -> Format | None:
        """The `Format` of quantized rows; None if rows are not quantized."""
        quant = self.scheme.activation
        return None if quant is None else format_of_rows(quant, words=self.row_words)


@lru_cache(maxsize=1024)
def _weight_only_launch(kind: type[StoredGemm], variant: Variant, tiles: TileConfig) -> Launch:
    return Launch(
        kind.kernel,
        N=variant.n,
        K=variant.k,
        TOP_K=variant.top_k,
        RULE=formula(variant.activation) if variant.activation else None,
        FORMAT=variant.weight_format(tiles),
        ROWS=variant.row_format(),
        **tiles.constants(),
    )


def format_of_rows(quant: Quant, *, words: bool) -> Format:
    """The `Format` of quantized rows; ``words``: of two neighbours, see `stored_entries`."""
    cols = quant.group.cols if quant.local else None
    return Format(
        step=1,
        up=0,
        weight_rows=0,
        paired=quant.element.values_per_byte == 2 or words,
        cols=cols,
        in_tile=cols is not None,
        keeps_nan=True,
        rows=1,
        global_rows=0,
        **_stored(quant),
    )


def _stored(quant: Quant) -> dict[str, Any]:
    """The fields of a `Format` that say how a number and a scale are stored."""
    return {
        "bits": quant.element.bits,
        "exponent": 4 if quant.element.name == "fp8" else quant.element.exponent,
        "offset": quant.element.offset,
        "scale": quant.scale if quant.scale in ("e8m0", "e4m3") else "float",
    }


def scale_strides(scale: Tensor | None, rows: Quant | None, num_experts: int) -> tuple[int, int]:
    """Strides of row scales: from expert to expert, and from row to row."""
    if scale is None or rows is None:
        return 0, 0
    if rows.per_tensor:  # one scale, or one per expert
        return int(scale.numel() == num_experts > 1), 0
    return 0, scale.shape[1]


def stored_entries(x: Tensor, quant: Quant) -> Tensor:
    """View stored values as bytes, or as words of two neighbours along K if the layout allows."""
    if quant.element.values_per_byte == 2:
        return x
    sizes = x.shape[-1] | x.stride(-2) | x.stride(0) | x.storage_offset()
    return x.view(torch.uint16 if x.stride(-1) == 1 and sizes % 2 == 0 else torch.uint8)


def as_bytes(x: Tensor | None) -> Tensor | None:
    """View fp8 as bytes: not every architecture has the dtype, and kernels decode its bits."""
    return x.view(torch.uint8) if x is not None and x.dtype == torch.float8_e4m3fn else x
