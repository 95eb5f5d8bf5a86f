"""The steps of an expert GEMM's tile that its kernels share."""

from __future__ import annotations

import triton
import triton.language as tl

from moe_ops.kernels.activation import gate, gate_up


@triton.jit
def map_tile(pid, num_pid_m, num_pid_n, GROUP_M: tl.constexpr):
    """Tiles in bands of GROUP_M rows, down each band first: its weights stay in the L2 cache."""
    band = pid // (GROUP_M * num_pid_n)
    first = band * GROUP_M
    height = tl.minimum(num_pid_m - first, GROUP_M)
    inside = pid % (GROUP_M * num_pid_n)
    return first + inside % height, inside // height


@triton.jit
def find_tile(
    expert_ids, num_tokens_post_padded, N: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """This program's tile (row and column) and its expert, -1 where there is nothing to do."""
    num_pid_m = tl.load(num_tokens_post_padded) // BLOCK_M
    num_pid_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    used = tl.program_id(0) < num_pid_m * num_pid_n
    pid = tl.where(used, tl.program_id(0), 0)
    pid_m, pid_n = map_tile(pid, tl.maximum(num_pid_m, 1), num_pid_n, GROUP_M)
    return pid_m, pid_n, tl.load(expert_ids + pid_m, mask=used, other=-1).to(tl.int64)


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


@triton.jit
def activate(g, u, RULE: tl.constexpr):
    """A `Formula` of gate and up, in float32; of the gate alone where the formula has no gate."""
    FUNCTION: tl.constexpr = RULE.function
    LIMIT: tl.constexpr = RULE.limit
    ALPHA: tl.constexpr = RULE.alpha
    BETA: tl.constexpr = RULE.beta
    LINEAR_BETA: tl.constexpr = RULE.linear_beta
    if RULE.gated:
        value = gate_up(g, u, FUNCTION, LIMIT, ALPHA, BETA, LINEAR_BETA)
    else:
        value = gate(g, FUNCTION, LIMIT, ALPHA, BETA)
    return value
