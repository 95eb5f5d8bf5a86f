"""The steps of an expert GEMM's tile that its kernels share."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def map_tile(pid, num_pid_m, num_pid_n, GROUP_M: tl.constexpr):
    """Tiles in bands of GROUP_M rows, down each band first: its weights stay in the L2 cache."""
    band = pid // (GROUP_M * num_pid_n)
    first = band * GROUP_M
    height = tl.minimum(num_pid_m - first, GROUP_M)
    inside = pid % (GROUP_M * num_pid_n)
    return first + inside % height, inside // height


@triton.jit
def load_slots(sorted_token_ids, pid_m, num_slots, BLOCK_M: tl.constexpr):
    """The slots of a tile (0 for padding, so that addresses stay inside) and which are real."""
    slot = tl.load(sorted_token_ids + pid_m * BLOCK_M + tl.arange(0, BLOCK_M))
    real = slot < num_slots
    return tl.where(real, slot, 0).to(tl.int64), real


@triton.jit
def load_tile(
    pointers, k, rows_inside, K: tl.constexpr, BLOCK_K: tl.constexpr, K_AXIS: tl.constexpr
):
    """A tile of an operand, zero past K and outside (rows_inside None: all inside)."""
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
def scale_rows(acc, weights, slot, real):
    """Each row times its router weight, in float32."""
    if weights is not None:
        scale = tl.load(weights + slot, mask=real, other=0.0).to(tl.float32)
        acc = acc * scale[:, None]
    return acc


@triton.jit
def add_bias(acc, bias, expert, n, inside, ROWS):
    """The bias of each weight row, in float32."""
    if bias is not None:
        acc += tl.load(bias + expert * ROWS + n, mask=inside, other=0.0).to(tl.float32)[None, :]
    return acc
