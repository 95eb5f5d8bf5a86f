"""References of the expert GEMMs, in every scheme.

With ``expert_order`` the rows between two GEMMs (``out`` of the GEMM with an activation, ``a`` of
the GEMM without) are permuted: sorted by expert as in the plan, without its padding. Batched and
permuted rows, which are grouped by expert already, keep their places. Rows past the rows in use are
undefined. Router weights stay in slot order.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from moe_ops.dispatch.row_tiles import gemm_rule
from moe_ops.reference.grouped import Columns, Epilogue, grouped
from moe_ops.reference.onednn import multiplies
from moe_ops.reference.products import product_of
from moe_ops.reference.quantize import moe_quantize
from moe_ops.reference.residency import in_waves
from moe_ops.reference.slots import multiply, planned_rows, take
from moe_ops.reference.weight_and_reduce import moe_fused_mul_sum
from moe_ops.scheme import UNQUANTIZED, get_scheme
from moe_ops.tensors import AnyTiles, AnyWeight, ExpertWeight


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
    product: Tensor | None = None,
) -> Tensor:
    """``out[s] = f(topk_weights[s] * a[s // top_k] @ w[e].T + bias[e])``, rounded once.

    Rows that are not quantized yet are quantized first, with ``a_scale`` or scales from the data.
    How the product is computed follows from the scheme: see `products`.

    Args:
        a: ``(R, K)``; or as the scheme stores activations, 4-bit numbers packed, ``(R, K / 2)``.
        a_scale: ``(R, groups)``; per-tensor scales: one element, or one per expert. For rows that
            are not quantized: the given scale, or None.
        weight: the fields of an `ExpertWeight`, as the scheme stores them. A global scale is a
            float32 factor on the product, ``(E,)``, ``(E, 2)`` (gate, up) or ``(E, N)``; it
            includes the global scale of the rows. The bias is added in float32.
        topk_weights: one per slot; None with rows that the scheme quantizes.
        tiles: the fields of a `Tiles`.
        top_k: slots per row of ``a``.
        scheme: key of the scheme.
        out_dtype: dtype of the result; that of ``a`` unless the scheme quantizes rows.
        activation: key of f; empty: no activation.
        expert_order: whether rows between two GEMMs are permuted, with the scheme "unquantized".
        batch_invariant: whether the plan is; each row is then multiplied by itself.
        product: see `activated_product`.
    """
    numbers, stored = get_scheme(scheme), ExpertWeight(*weight)
    quant, (num_experts, n, _) = numbers.activation, stored.data.shape
    rows: tuple[Any, Any] = a, a_scale
    if quant is not None and a.dtype != quant.dtype:
        _, topk_ids, expert_map = tiles
        rows = moe_quantize(a, a_scale, None, topk_ids, expert_map, num_experts, quant.key)
    inputs = rows[:1] if quant is None or quant.per_tensor else rows
    rule = gemm_rule(scheme, a, tiles, batch_invariant)
    permuted = None if not expert_order else "out" if activation else "a"
    out: Tensor | None = None
    for part, present in [(stored, None)] if stored.host is None else in_waves(stored, tiles):
        then = Epilogue(part.bias, topk_weights, activation, product)
        in_bf16 = then.is_empty and numbers is UNQUANTIZED and multiplies(a, batch_invariant)
        dtype = out_dtype if in_bf16 else torch.float32
        if numbers is UNQUANTIZED:
            inputs = (a.to(dtype),)
        multiplied = product_of(*rows, part, numbers, dtype, batch_invariant)
        columns = Columns(n, num_experts, present, dtype)
        out = grouped(
            multiplied,
            inputs,
            columns,
            tiles,
            rule,
            top_k,
            out_dtype,
            then,
            permuted=permuted,
            out=out,
        )
    return cast(Tensor, out)


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
    """`expert_product`, and its product before f, in slot order, rounded to the same dtype.

    The first GEMM of a forward pass that has a backward pass: f is applied to float32 sums, so the
    first result has the bits that it has without gradients, and the backward pass reads the second.
    """
    slots, columns = a.shape[0] * top_k, weight[0].shape[1]
    product = a.new_zeros(slots, columns, dtype=out_dtype)
    h = expert_product(
        a,
        a_scale,
        weight,
        topk_weights,
        tiles,
        top_k,
        scheme,
        out_dtype,
        activation,
        expert_order,
        batch_invariant,
        product=product,
    )
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
    """``out[s] += topk_weights[s] * a[s // top_k] @ w[e].T``, added in float32, rounded once.

    Column c is added to column ``first_column + column_step * c``. Rows of skipped slots and other
    columns stay as they are.
    """
    w, rule = weight[0], gemm_rule(UNQUANTIZED.key, a, tiles, batch_invariant)
    out = out[:, first_column::column_step][:, : w.shape[1]]
    slots, experts, counts, *_ = planned_rows(tiles, rule, len(out), len(w))
    rows = take(a, slots // top_k).float().split(counts)
    products = out.new_empty((len(slots), out.shape[1]), dtype=torch.float32)
    for expert, mine, result in zip(experts, rows, products.split(counts), strict=True):
        multiply(mine, w[expert].mT.float(), result, batch_invariant)
    if topk_weights is not None:
        products *= topk_weights.flatten()[slots, None].float()
    out.index_copy_(0, slots, (take(out, slots).float() + products).to(out.dtype))


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
    """``out[t] = sum_j topk_weights[t, j] * y[t * k + j]``; y is the `expert_product` of slots."""
    y = expert_product(
        a, a_scale, weight, None, tiles, 1, scheme, out_dtype, "", expert_order, batch_invariant
    )
    _, topk_ids, expert_map = tiles
    return moe_fused_mul_sum(y, topk_weights, topk_ids, expert_map, None, len(weight[0]))
