"""Expert GEMMs on block-scaled matrix instructions, which multiply stored numbers and their scales.

The alternative, on GPUs that have such instructions (`dispatch.blackwell.BLOCK_SCALED`), to the
kernel in `weight_only`, which dequantizes both operands to bf16. Products of numbers and scales are
exact in both kernels and are summed in float32. This kernel is compiled for these GPUs and
interpreted by the tests, **not yet run on one**.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_ops.kernels._gemm.epilogue import activate_rows, store_tile
from moe_ops.kernels._gemm.tile import COUNTED, columns_of, find_tile, load_slots, load_tile
from moe_ops.kernels._gemm.weight_only import (
    StoredGemm,
    finish_sums,
    per_row,
    row_pointers,
    row_scales,
)
from moe_ops.kernels._runtime.dependent import take_turn


@triton.jit
def load_scales(base, start, inside, K: tl.constexpr, BLOCK_K: tl.constexpr, FORMAT: tl.constexpr):
    """Load the scales of a step of K, (rows, groups); scales of 1 if a scale spans K."""
    if FORMAT.cols is None:
        scales = tl.full((inside.shape[0], BLOCK_K // 32), 127, tl.uint8)
    else:
        group = start // FORMAT.cols + tl.arange(0, BLOCK_K // FORMAT.cols)
        mask = inside[:, None] & (group < (K + FORMAT.cols - 1) // FORMAT.cols)[None, :]
        scales = tl.load(base[:, None] + group[None, :], mask=mask, other=0)
        if FORMAT.scale == "e4m3":
            scales = scales.to(tl.float8e4nv, bitcast=True)
    return scales


@triton.jit(do_not_specialize=COUNTED)
def block_scaled_gemm_kernel(
    a, a_scale, w, w_scale, w_global_scale, bias, out, product,
    tiles, expert_map, num_slots, num_ids, num_experts, num_entries,
    stride_am, stride_se, stride_sm, stride_we, stride_wn, stride_wk,
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr,
    RULE: tl.constexpr, FORMAT: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """``out[s] = f(numbers(a[s // TOP_K]) @ numbers(w[e]).T + bias[e])``.

    ``product``: the result before f, or None. Weights are the first operand. The gate and up rows
    of a tile alternate, so one product yields both in adjacent columns.
    """
    take_turn(LONG=True)
    pid_m, pid_n, expert = find_tile(
        tiles, expert_map, num_slots, num_ids, num_experts, num_entries,
        N, BLOCK_M, BLOCK_N, GROUP_M,
    )  # fmt: skip
    if expert < 0:
        return
    HALVES: tl.constexpr = 2 if FORMAT.up > 0 else 1
    PACK: tl.constexpr = 2 if FORMAT.paired else 1
    A_PACK: tl.constexpr = 2 if ROWS.paired else 1
    ELEMENT: tl.constexpr = "e2m1" if FORMAT.paired else "e4m3"
    A_ELEMENT: tl.constexpr = "e2m1" if ROWS.paired else "e4m3"
    GROUPS: tl.constexpr = (K + FORMAT.cols - 1) // FORMAT.cols
    slot, real = load_slots(tiles, pid_m, num_slots, num_ids, BLOCK_M)
    each = tl.arange(0, BLOCK_N * HALVES)
    column = pid_n * BLOCK_N + each // HALVES
    row, inside = FORMAT.step * column + FORMAT.up * (each % HALVES), column < N
    row_inside = None if N % BLOCK_N == 0 else inside
    entry = tl.arange(0, BLOCK_K // PACK)
    a_tile, a_k = row_pointers(a, slot // TOP_K, stride_am, BLOCK_K, ROWS)
    a_scales = row_scales(a_scale, expert, slot // TOP_K, stride_se, stride_sm)
    w_tile = w + expert * stride_we + row[:, None] * stride_wn + entry[None, :] * stride_wk
    scales = per_row(w_scale, expert, row, FORMAT.rows, GROUPS, FORMAT)

    acc = tl.zeros((BLOCK_N * HALVES, BLOCK_M), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        at, a_at = start // PACK, start // A_PACK
        y = load_tile(
            w_tile + at * stride_wk, entry + at, row_inside, K // PACK, BLOCK_K // PACK, 1
        )
        x = load_tile(a_tile + a_at, a_k + a_at, real, K // A_PACK, BLOCK_K // A_PACK, 0)
        y_scale = load_scales(scales, start, inside, K, BLOCK_K, FORMAT)
        x_scale = load_scales(a_scales, start, real, K, BLOCK_K, ROWS)
        acc = tl.dot_scaled(y, y_scale, ELEMENT, x, x_scale, A_ELEMENT, acc)

    acc = finish_sums(
        tl.trans(acc), scales, a_scales, w_global_scale, bias, None, expert, row, slot, real,
        inside, FORMAT, ROWS,
    )  # fmt: skip
    if product is not None:
        store_tile(product, acc, slot, row, real, inside, FORMAT.weight_rows)
    acc = activate_rows(acc, RULE, 1, 1)
    n, n_inside = columns_of(pid_n, N, BLOCK_N)
    store_tile(out, acc, slot, n, real, n_inside, N)


class BlockScaledGemm(StoredGemm):
    """The kernel of block-scaled matrix instructions, ready to run."""

    kernel = block_scaled_gemm_kernel
