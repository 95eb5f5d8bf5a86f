"""Launchers of the expert GEMMs for operands that are not quantized."""

from __future__ import annotations

from torch import Tensor

from moe_ops.dispatch.hopper import KernelTiles
from moe_ops.fake_impls.expert_gemm import expert_matmul as empty_rows
from moe_ops.fake_impls.expert_gemm import expert_matmul_add as check_target
from moe_ops.kernels._gemm.operands import GemmOperands
from moe_ops.kernels._gemm.run import call_gemm
from moe_ops.tensors import AnyTiles


def expert_matmul(
    a: Tensor,
    w: Tensor,
    bias: Tensor | None,
    topk_weights: Tensor | None,
    tiles: AnyTiles,
    top_k: int,
    activation: str = "",
    expert_order: bool = False,
    batch_invariant: bool = False,
    *,
    config: KernelTiles | None = None,
) -> Tensor:
    """Run the kernel that `plan_gemm` chooses, or the kernel of a given ``config``."""
    how = (top_k, activation, expert_order, batch_invariant)
    return call_gemm(
        GemmOperands(a, w, tiles, bias, topk_weights),
        ("expert_matmul", *how),
        lambda: empty_rows(a, w, bias, topk_weights, tiles, *how),
        config,
    )


def expert_matmul_add(
    a: Tensor,
    w: Tensor,
    topk_weights: Tensor | None,
    tiles: AnyTiles,
    top_k: int,
    batch_invariant: bool = False,
    *,
    out: Tensor,
) -> None:
    """Run the portable kernel, whose programs each add to a tile of ``out``."""
    how = (top_k, batch_invariant)

    def checked() -> Tensor:
        check_target(a, w, topk_weights, tiles, *how, out=out)
        return out

    settings = ("expert_matmul_add", *how, out.shape, out.stride(), out.dtype)
    call_gemm(GemmOperands(a, w, tiles, None, topk_weights), settings, checked, out=out)
