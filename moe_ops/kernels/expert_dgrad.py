"""Triton kernel of the expert GEMM with transposed stored weights: gradients of a product's rows.

The contraction runs over the rows N of the weight, whose tiles are dequantized as in the forward
pass and transposed. Scales multiply the weights, since they differ along the contraction.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_ops.dispatch.row_tiles import gemm_rule
from moe_ops.dispatch.tile_plan import split_tiles
from moe_ops.dispatch.tiles import TileConfig, cdiv, is_direct, max_row_tiles, row_tile
from moe_ops.fake_impls.expert_dgrad import expert_dgrad as empty_rows
from moe_ops.kernels._gemm.dequantize import Format, load_groups, plain_numbers, scale_value, spread
from moe_ops.kernels._gemm.epilogue import store_tile
from moe_ops.kernels._gemm.tile import (
    COUNTED,
    add_dot,
    columns_of,
    find_tile,
    load_slots,
    tile_arguments,
)
from moe_ops.kernels._gemm.unpack import plain_data
from moe_ops.kernels._gemm.weight_only import (
    Variant,
    as_bytes,
    load_zero_points,
    per_row,
    stored_entries,
)
from moe_ops.kernels._runtime.dependent import take_turn
from moe_ops.kernels._runtime.launch import Launch
from moe_ops.kernels._runtime.slots import dense
from moe_ops.scheme import get_scheme, is_packed
from moe_ops.scheme.packed import swapped
from moe_ops.scheme.weights import rows_per_scale
from moe_ops.tensors import AnyTiles


@triton.jit(do_not_specialize=COUNTED)
def _expert_dgrad_kernel(
    dy, w, w_scale, w_zero_point, w_global_scale, out,
    tiles, expert_map, num_slots, num_ids, num_experts, num_entries,
    stride_we, stride_wn, stride_wk,
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, FORMAT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """``out[s] = dy[s // TOP_K] @ dequantized(w[e])``; BLOCK_N rows of the weight at a time."""
    take_turn(LONG=True)
    pid_m, pid_k, expert = find_tile(
        tiles, expert_map, num_slots, num_ids, num_experts, num_entries,
        K, BLOCK_M, BLOCK_K, GROUP_M,
    )  # fmt: skip
    if expert < 0:
        return
    PACK: tl.constexpr = 2 if FORMAT.paired else 1
    SHARE: tl.constexpr = 2 if FORMAT.bits == 4 else 1  # rows whose zero points share a byte
    GROUPS: tl.constexpr = 1 if FORMAT.cols is None else (K + FORMAT.cols - 1) // FORMAT.cols
    slot, real = load_slots(tiles, pid_m, num_slots, num_ids, BLOCK_M)
    k, k_inside = columns_of(pid_k, K, BLOCK_K)
    first, entry = pid_k * BLOCK_K, tl.arange(0, BLOCK_K // PACK) + pid_k * (BLOCK_K // PACK)
    rows = dy + (slot // TOP_K)[:, None] * N
    w_tile = w + expert * stride_we + entry[:, None] * stride_wk
    acc = tl.zeros((BLOCK_M, BLOCK_K), dtype=tl.float32)
    for start in range(0, N, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        inside = n < N
        x = tl.load(rows + n[None, :], mask=real[:, None] & inside[None, :], other=0.0)
        loaded = (entry < K // PACK)[:, None] & inside[None, :]
        stored = tl.load(w_tile + n[None, :] * stride_wn, mask=loaded, other=0)
        scales = per_row(w_scale, expert, n, FORMAT.rows, GROUPS, FORMAT)
        zeros = per_row(w_zero_point, expert, n, SHARE, GROUPS, FORMAT)
        zero_point = load_zero_points(zeros, n, first, inside, K, BLOCK_K, FORMAT)
        factor = scale_value(load_groups(scales, first, inside, K, BLOCK_K, FORMAT), FORMAT)
        if w_global_scale is not None:
            at = per_row(w_global_scale, expert, n, FORMAT.global_rows, 1, FORMAT)
            factor *= tl.load(at, mask=inside, other=0.0).to(tl.float32)[None, :]
        value = plain_numbers(stored, zero_point, x.dtype, BLOCK_K, FORMAT)
        y = (value.to(tl.float32) * spread(factor, BLOCK_K)).to(x.dtype)
        acc = add_dot(acc, x, tl.trans(y))
    store_tile(out, acc, slot, k, real, k_inside, K)


def dgrad_tiles(tile: int, itemsize: int) -> TileConfig:
    """Default tiles for the plan's row tile: ``block_k`` output columns, ``block_n`` a step."""
    block_m = min(tile & -tile, 128)
    if itemsize == 4:
        return TileConfig(block_m, 16, 64, 8, 8, 2)
    return TileConfig(block_m, 64, 128, 8, 8 if block_m > 32 else 4, 3)


@lru_cache(maxsize=1024)
def _dgrad_launch(n: int, k: int, top_k: int, form: Format, tiles: TileConfig) -> Launch:
    return Launch(_expert_dgrad_kernel, N=n, K=k, TOP_K=top_k, FORMAT=form, **tiles.constants())


def expert_dgrad(
    a: Tensor,
    w: Tensor,
    w_scale: Tensor,
    w_zero_point: Tensor | None,
    w_global_scale: Tensor | None,
    tiles: AnyTiles,
    top_k: int,
    scheme: str,
    batch_invariant: bool = False,
) -> Tensor:
    """Unpack the weight if it is packed; then launch a program for each tile of the plan."""
    out = empty_rows(
        a, w, w_scale, w_zero_point, w_global_scale, tiles, top_k, scheme, batch_invariant
    )
    (num_slots, k), (num_experts, n, _) = out.shape, w.shape
    if num_slots == 0:
        return out
    rule, parsed = gemm_rule(scheme, a, tiles, batch_invariant), get_scheme(scheme)
    if is_packed(w):
        w = plain_data(w, parsed.weight)
        w_scale, w_zero_point = swapped(w_scale), swapped(w_zero_point)
    direct = tiles[1] is not None and is_direct(num_slots, num_experts)
    tile = 16 if direct else row_tile(rule, num_slots, num_experts)
    sizes, told = dgrad_tiles(tile, a.itemsize), tile_arguments(tiles, num_slots, num_experts)
    if not direct and sizes.block_m != tile:
        plan = split_tiles(told[0], num_slots, num_experts, rule, sizes.block_m)
        told = (plan, *told[1:-1], plan.shape[0])
    w = stored_entries(w, parsed.weight)
    halves = 1 if w_global_scale is None else w_global_scale.numel() // num_experts
    shares = rows_per_scale(w_scale, parsed.weight, n), n // halves
    variant = Variant(n, k, top_k, parsed, "", *shares, w.dtype == torch.uint16, False)
    blocks = tile // sizes.block_m * cdiv(k, sizes.block_k)
    programs = max_row_tiles(num_slots, num_experts, tile) * blocks
    _dgrad_launch(n, k, top_k, variant.weight_format(sizes), sizes)(
        (programs,), a.contiguous(), w, as_bytes(dense(w_scale)), dense(w_zero_point),
        dense(w_global_scale), out, *told, *w.stride(),
    )  # fmt: skip
    return out
