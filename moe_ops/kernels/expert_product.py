"""Launchers of the expert GEMMs: each runs the kernel that `plan_gemm` chooses."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops import sizes
from moe_ops.dispatch.early import EARLY
from moe_ops.dispatch.hopper import KernelTiles
from moe_ops.fake_impls import expert_product as fakes
from moe_ops.kernels._gemm.operands import GemmOperands
from moe_ops.kernels._gemm.run import call_gemm
from moe_ops.kernels.weight_and_reduce import moe_fused_mul_sum
from moe_ops.residency import residency_of
from moe_ops.scheme import UNQUANTIZED
from moe_ops.tensors import AnyTiles, AnyWeight


def expert_product(
    a: Tensor,
    a_scale: Tensor | None,
    weight: AnyWeight,
    topk_weights: Tensor | None,
    tiles: AnyTiles,
    top_k: int,
    scheme: str,
    out_dtype: torch.dtype,
    activation: str = "",
    expert_order: bool = False,
    batch_invariant: bool = False,
    *,
    config: KernelTiles | None = None,
    product: Tensor | None = None,
) -> Tensor:
    """Run the plan's kernel, or that of a given ``config``, which may quantize its rows itself.

    ``product``: see `GemmOperands`.
    """
    settings = (top_k, scheme, out_dtype, activation, expert_order, batch_invariant)
    stored = sizes.expert_weight(weight)
    operands = GemmOperands(a, a_scale, stored, topk_weights, tiles, product=product)

    def empty() -> Tensor:
        return fakes.expert_product(
            a, a_scale, weight, topk_weights, tiles, top_k, scheme, out_dtype, activation,
            expert_order, batch_invariant,
        )  # fmt: skip

    return call_gemm("expert_product", operands, settings, empty, config)


def activated_product(
    a: Tensor,
    a_scale: Tensor | None,
    weight: AnyWeight,
    topk_weights: Tensor | None,
    tiles: AnyTiles,
    top_k: int,
    scheme: str,
    out_dtype: torch.dtype,
    activation: str,
    expert_order: bool = False,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """Run the kernel of `expert_product`; one that stores no product follows a GEMM that does."""
    rows, columns = a.shape[0] * top_k, weight[0].shape[1]
    product = a.new_empty(rows, columns, dtype=out_dtype)
    h = expert_product(
        a, a_scale, weight, topk_weights, tiles, top_k, scheme, out_dtype, activation, expert_order,
        batch_invariant, product=product,
    )  # fmt: skip
    return h, product


def expert_product_out(
    a: Tensor,
    weight: AnyWeight,
    topk_weights: Tensor | None,
    tiles: AnyTiles,
    top_k: int,
    batch_invariant: bool = False,
    first_column: int = 0,
    column_step: int = 1,
    *,
    out: Tensor,
) -> None:
    """Run the portable kernel, whose programs each add to a tile of columns of ``out``."""

    def checked() -> Tensor:
        fakes.expert_product_out(
            a, weight, topk_weights, tiles, top_k, batch_invariant, first_column, column_step,
            out=out,
        )  # fmt: skip
        return out

    settings = (top_k, UNQUANTIZED.key, out.dtype, "", False, batch_invariant)
    place = (first_column, column_step, out.shape, out.stride())
    held = sizes.expert_weight(weight)
    operands = GemmOperands(a, None, held, topk_weights, tiles, column=first_column)
    call_gemm("expert_product.out", operands, (*settings, *place), checked, out=out)


def expert_product_sum(
    a: Tensor,
    a_scale: Tensor | None,
    weight: AnyWeight,
    topk_weights: Tensor | None,
    tiles: AnyTiles,
    scheme: str,
    out_dtype: torch.dtype,
    expert_order: bool = False,
    batch_invariant: bool = False,
) -> Tensor:
    """Run the kernel that also sums if it takes the GEMM, else a GEMM kernel and a sum kernel."""
    stored, early = sizes.expert_weight(weight), EARLY.get()
    if stored.host is not None and _in_waves(stored.host, tiles):
        y = expert_product(
            a, a_scale, weight, None, tiles, 1, scheme, out_dtype, "", expert_order,
            batch_invariant,
        )  # fmt: skip
        _, topk_ids, expert_map = tiles
        return moe_fused_mul_sum(y, topk_weights, topk_ids, expert_map, None, len(stored.data))
    operands = GemmOperands(a, a_scale, stored, topk_weights, tiles, early)
    settings = (1, scheme, out_dtype, "", expert_order, batch_invariant)

    def empty() -> Tensor:
        return fakes.expert_product_sum(
            a, a_scale, weight, topk_weights, tiles, scheme, out_dtype, expert_order,
            batch_invariant,
        )  # fmt: skip

    return call_gemm("expert_product_sum", operands, settings, empty)


def _in_waves(host: Tensor, tiles: AnyTiles) -> bool:
    """Whether a routing may want more experts than there are slots."""
    topk_ids = tiles[1]
    return topk_ids is not None and topk_ids.numel() > residency_of(host)[0].num_slots
