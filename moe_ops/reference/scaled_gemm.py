"""Reference of the expert GEMM with two quantized operands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from moe_ops.dispatch.row_tiles import gemm_rule
from moe_ops.reference.grouped import Product, grouped
from moe_ops.reference.quantize import moe_quantize
from moe_ops.reference.slots import multiply, planned_rows
from moe_ops.reference.weight_only_gemm import one_expert
from moe_ops.scheme import (
    WHOLE,
    Element,
    Quant,
    Scheme,
    dequantize_rows,
    dequantize_weight,
    get_scheme,
)
from moe_ops.scheme.rounding import scale_value
from moe_ops.scheme.weights import rows_per_scale
from moe_ops.tensors import AnyTiles, QTensor


def scaled_matmul(
    a: Tensor,
    a_scale: Tensor | None,
    w: Tensor,
    w_scale: Tensor,
    w_global_scale: Tensor | None,
    bias: Tensor | None,
    tiles: AnyTiles,
    top_k: int,
    scheme: str,
    out_dtype: torch.dtype,
    activation: str = "",
    batch_invariant: bool = False,
) -> Tensor:
    """``out[s] = f(a_scale * w_scale * (a[s // top_k] @ w[e].T) + bias[e])``, rounded once.

    Rows that are not quantized yet are quantized first, with ``a_scale`` or scales from the data.

    If the scheme multiplies stored values, the products within a scale group along K are summed
    first (exactly for int8), then scaled, then added up, all in float32. (Hopper's fp8 tensor cores
    keep about 14 bits of the sum within a group.) If the scheme is `decoded`, both operands are
    dequantized (times ``w_global_scale``) and products are summed in float32.

    Args:
        a: ``(R, K)``; or as the scheme stores activations, 4-bit numbers packed, ``(R, K / 2)``.
        a_scale: ``(R, groups)``; per-tensor scales: one element, or one per expert. For rows that
            are not quantized: the given scale, or None.
        w: weights as the scheme stores them.
        w_scale: scales of the weights' groups, as the scheme stores them.
        w_global_scale: a float32 factor on the product, ``(E,)``, ``(E, 2)`` (gate, up) or
            ``(E, N)``, that includes the global scale of the rows.
        bias: ``(E, N)``, added in float32.
        tiles: the fields of a `Tiles`.
        top_k: slots per row of ``a``.
        scheme: key of the scheme.
        out_dtype: dtype of the result.
        activation: key of f; empty: no activation.
        batch_invariant: whether the plan is; each row is then multiplied by itself.
    """
    known, stored = get_scheme(scheme), QTensor(w, w_scale, None, w_global_scale)
    quant, _ = known.quants
    rows: tuple[Any, Any] = a, a_scale
    if a.dtype != quant.dtype:
        _, topk_ids, expert_map = tiles
        rows = moe_quantize(a, a_scale, None, topk_ids, expert_map, w.shape[0], quant.key)
    make = _decoded if known.decoded else _scaled
    product = make(rows[1], stored, known, batch_invariant)
    inputs = rows[:1] if quant.per_tensor else rows
    rule = gemm_rule(scheme, a, tiles, batch_invariant)
    planned = planned_rows(tiles, rule, len(a) * top_k, w.shape[0])
    return grouped(product, inputs, w, planned, top_k, out_dtype, bias=bias, activation=activation)


def _row_scales(rows: Sequence[Tensor], a_scale: Tensor, expert: int, num_experts: int) -> Tensor:
    """``(R, groups)``: the scales of an expert's rows; of all rows or the expert if per tensor."""
    if len(rows) == 1:
        return a_scale.flatten().expand(num_experts)[expert].expand(len(rows[0]), 1)
    return rows[1]


def _decoded(a_scale: Tensor, stored: QTensor, scheme: Scheme, batch_invariant: bool) -> Product:
    """Products of the numbers that stored values stand for."""
    quant, num_experts = cast(Quant, scheme.activation), len(stored.data)

    def product(expert: int, rows: Sequence[Tensor], out: Tensor) -> None:
        x = dequantize_rows(rows[0], _row_scales(rows, a_scale, expert, num_experts), quant)
        weight = dequantize_weight(one_expert(stored, expert), scheme)[0]
        multiply(x, weight.t(), out, batch_invariant)

    return product


def _scaled(a_scale: Tensor, stored: QTensor, scheme: Scheme, batch_invariant: bool) -> Product:
    """Products of stored values, scaled group by group."""
    w, (num_experts, n, k) = stored.data, stored.data.shape
    weight_quant = cast(Quant, scheme.weight)
    cols = 1 if weight_quant.group.cols == WHOLE else -(-k // weight_quant.group.cols)
    w_scale: Any = stored.scale
    groups = scale_value(w_scale).view(num_experts, -1, cols)
    w_row = torch.arange(n, device=w.device) // rows_per_scale(w_scale, weight_quant, n)

    def product(expert: int, rows: Sequence[Tensor], out: Tensor) -> None:
        scales = _row_scales(rows, a_scale, expert, num_experts).float()
        both = (rows[0], scales), (w[expert], groups[expert, w_row])
        out.copy_(_product(*both, weight_quant, batch_invariant))

    return product


def _product(
    x: tuple[Tensor, Tensor], w: tuple[Tensor, Tensor], quant: Quant, batch_invariant: bool
) -> Tensor:
    """``(R, K) @ (N, K).T`` with scales ``(R, groups)`` and ``(N, groups)``, in float32."""
    (a, a_scale), (b, b_scale) = x, w
    size = a.shape[1] if quant.group.cols == WHOLE else quant.group.cols
    a, b = _exact(a, quant.element, size), _exact(b, quant.element, size)
    acc = torch.zeros((a.shape[0], b.shape[0]), device=a.device)
    pieces = zip(a.split(size, 1), b.split(size, 1), strict=True)
    for group, (x_piece, w_piece) in enumerate(pieces):
        exact = torch.empty_like(acc, dtype=x_piece.dtype)
        multiply(x_piece, w_piece.t(), exact, batch_invariant)
        acc += exact.float() * a_scale[:, group, None] * b_scale[:, group]
    return acc


def _exact(data: Tensor, element: Element, count: int) -> Tensor:
    """Stored values in a dtype that can sum ``count`` of their products, exactly for int8."""
    value = data.float()  # of 8 bits: others are decoded
    largest_sum = element.largest**2 * min(count, data.shape[1])
    return value.double() if element.name == "int8" and largest_sum > 2**24 else value
