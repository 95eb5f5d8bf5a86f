"""Launchers of the expert GEMMs whose operands are decoded, by the kernel or by the matrix unit.

Two kernels: that of `weight_only_gemm`, which decodes both operands to bf16, and where the GPU
multiplies a scheme's numbers as they are stored, that of `_gemm.block_scaled`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_ops.dispatch.blackwell import is_block_scaled
from moe_ops.dispatch.tiles import device_facts
from moe_ops.fake_impls.decoded_gemm import decoded_gemm as empty_rows
from moe_ops.fake_impls.decoded_gemm import decoded_gemm_act as empty_activated_rows
from moe_ops.kernels import weight_only_gemm
from moe_ops.kernels._gemm import block_scaled as block_scaled_gemm
from moe_ops.kernels.weight_only_gemm import Operands
from moe_ops.tensors import AnyTiles, QTensor


def decoded_gemm(
    a: Tensor,
    a_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    w_global_scale: Tensor | None,
    bias: Tensor | None,
    plan: Tensor | None,
    topk_ids: Tensor | None,
    expert_map: Tensor | None,
    row_tiles: Sequence[int],
    top_k: int,
    scheme: str,
    out_dtype: torch.dtype,
) -> Tensor:
    """Launch one program for each tile that the plan may hold."""
    tiles = (plan, topk_ids, expert_map)
    rest = (bias, *tiles, row_tiles, top_k, scheme, out_dtype)
    out = empty_rows(a, a_scale, w, w_scale, w_global_scale, *rest)
    operands = Operands(a, a_scale, QTensor(w, w_scale, None, w_global_scale), bias)
    return _multiply(out, operands, tiles, row_tiles, top_k, scheme, None)


def decoded_gemm_act(
    a: Tensor,
    a_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    w_global_scale: Tensor | None,
    bias: Tensor | None,
    plan: Tensor | None,
    topk_ids: Tensor | None,
    expert_map: Tensor | None,
    row_tiles: Sequence[int],
    top_k: int,
    scheme: str,
    out_dtype: torch.dtype,
    activation: str,
) -> Tensor:
    """Launch one program for each tile that the plan may hold."""
    tiles = (plan, topk_ids, expert_map)
    rest = (bias, *tiles, row_tiles, top_k, scheme, out_dtype, activation)
    out = empty_activated_rows(a, a_scale, w, w_scale, w_global_scale, *rest)
    operands = Operands(a, a_scale, QTensor(w, w_scale, None, w_global_scale), bias)
    return _multiply(out, operands, tiles, row_tiles, top_k, scheme, activation)


def _multiply(
    out: Tensor,
    operands: Operands,
    tiles: AnyTiles,
    row_tiles: Sequence[int],
    top_k: int,
    scheme: str,
    activation: str | None,
) -> Tensor:
    """``out``, filled by the kernel that the GPU and the scheme's formats ask for."""
    special = is_block_scaled(scheme, device_facts(out.device).arch)
    kernels = block_scaled_gemm if special else weight_only_gemm
    return kernels.multiply(out, operands, tiles, row_tiles, top_k, scheme, activation)
