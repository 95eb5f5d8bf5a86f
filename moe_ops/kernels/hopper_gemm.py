"""Launcher of the expert GEMMs of many rows on Hopper."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moe_ops.activation import Formula
from moe_ops.kernels.hopper_tile import hopper_gemm_kernel
from moe_ops.kernels.pack import pack_rows
from moe_ops.tiles import HopperTiles, cdiv, device_facts

DTYPES = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float8_e4m3fn: gl.float8e4nv,
}
SWIZZLE = 128
"""Bytes of a row of a tile, which the swizzle of shared memory spans."""


@dataclass(frozen=True)
class Constants:
    """What a kernel is made for."""

    N: int
    """Output columns."""
    K: int
    RULE: Formula | None
    """Of the activation."""
    GATED: bool
    STEP: int
    """From the weight row of an output column to that of the next one."""
    UP: int
    """From a gate row to its up row; 0 where there is no gate."""
    WEIGHT_ROWS: int
    """Of an expert."""
    SCALE_ROWS: int
    """Weight rows that share a scale."""
    SCALE_COLS: int | None
    """Elements along K that share a scale, of both operands; None: all, or there are no scales."""
    ITEMSIZE: int
    BLOCK_M: int
    BLOCK_N: int
    """Weight rows of a tile: half of them gate rows where there are such."""
    BLOCK_K: int
    GROUP_M: int
    STAGES: int
    BY_COLUMNS: bool
    """Whether a warp group takes half of a tile's columns (else of its rows)."""
    OUT_N: int
    """Output columns of a tile."""
    NUM_N: int
    STEPS: int


@lru_cache(maxsize=1024)
def constants(
    weight: tuple[int, int, int],
    itemsize: int,
    rule: Formula | None,
    scale_groups: tuple[int, int | None],
    tiles: HopperTiles,
) -> Constants:
    """The constants for a weight ``(E, rows, K)``, an activation, and ``(rows, cols)`` a scale."""
    _, rows, k = weight
    gated, interleaved = rule is not None and rule.gated, rule is not None and rule.interleaved
    n = rows // 2 if gated else rows
    out_n, block_k = tiles.block_n // 2 if gated else tiles.block_n, SWIZZLE // itemsize
    return Constants(
        N=n,
        K=k,
        RULE=rule,
        GATED=gated,
        STEP=2 if interleaved else 1,
        UP=(1 if interleaved else n) if gated else 0,
        WEIGHT_ROWS=rows,
        SCALE_ROWS=scale_groups[0],
        SCALE_COLS=scale_groups[1],
        ITEMSIZE=itemsize,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_K=block_k,
        GROUP_M=tiles.group_m,
        STAGES=tiles.num_stages,
        BY_COLUMNS=tiles.block_m == 64,
        OUT_N=out_n,
        NUM_N=cdiv(n, out_n),
        STEPS=cdiv(k, block_k),
    )


def _weight_box(w: Tensor, c: Constants) -> TensorDescriptor:
    """Boxes of a weight; of gate and up rows, 8 of each in turn, where there are both."""
    layout: Any = gl.NVMMASharedLayout(SWIZZLE, 8 * c.ITEMSIZE, rank=5 if c.GATED else 3)
    if not c.GATED:
        return TensorDescriptor.from_tensor(w, [1, c.BLOCK_N, c.BLOCK_K], layout)
    expert, row, _ = w.stride()
    shape = [w.shape[0], c.N // 8, 2, 8, c.K]
    strides = [expert, 8 * c.STEP * row, c.UP * row, c.STEP * row, 1]
    return TensorDescriptor(w, shape, strides, [1, c.BLOCK_N // 16, 2, 8, c.BLOCK_K], layout)


def run(
    out: Tensor,
    a: Tensor,
    a_scale: Tensor | None,
    w: Tensor,
    w_scale: Tensor | None,
    bias: Tensor | None,
    plan: tuple[Tensor, Tensor, Tensor],
    top_k: int,
    c: Constants,
) -> None:
    """Pack the rows, then one program a processor.

    Args:
        out: ``(slots, N)``, contiguous.
        a: rows, contiguous along K.
        a_scale: as `pack_rows` takes them, or None.
        w: ``(E, rows, K)``, contiguous along K.
        w_scale: float32, contiguous, or None.
        bias: ``(E, rows)``, contiguous, or None.
        plan: with tiles of ``c.BLOCK_M`` rows.
        top_k: slots of a row of ``a``.
        c: see `constants`.
    """
    sorted_token_ids, expert_ids, num_tokens_post_padded = plan
    num_slots, bits = out.shape[0], 8 * c.ITEMSIZE
    rows, scales = pack_rows(
        a, a_scale, sorted_token_ids, num_tokens_post_padded, num_slots, top_k
    )
    layout = gl.NVMMASharedLayout(SWIZZLE, bits, rank=2)
    a_box = TensorDescriptor.from_tensor(rows, [c.BLOCK_M, c.BLOCK_K], layout)
    scale_box = a_box
    if c.SCALE_COLS is not None:
        flat = gl.NVMMASharedLayout(0, 32, rank=2)
        scale_box = TensorDescriptor.from_tensor(scales, [1, c.BLOCK_M], flat)
    hopper_gemm_kernel[(device_facts(w.device).processors,)](
        a_box, _weight_box(w, c), scale_box, bias, out,
        expert_ids if scales is None else scales,  # not read without scales
        expert_ids if w_scale is None else w_scale,
        sorted_token_ids, expert_ids, num_tokens_post_padded, num_slots, c,
        num_warps=4,
    )  # fmt: skip
