"""Reference of the expert GEMM of which both operands are quantized."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_ops.fake_impls.scaled_gemm import scaled_matmul as empty_rows
from moe_ops.reference.grouped import Product, grouped
from moe_ops.reference.quantize import moe_quantize
from moe_ops.reference.slots import multiply
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
from moe_ops.scheme.rounding import decode, scale_value
from moe_ops.scheme.weights import rows_per_scale
from moe_ops.tensors import QTensor, Rows


def scaled_matmul(
    a: Tensor,
    a_scale: Tensor | None,
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
    activation: str = "",
) -> Tensor:
    """``out[s] = f(a_scale * w_scale * (a[s // top_k] @ w[e].T) + bias[e])``, rounded once.

    Rows that are not quantized yet are so first, with a scale that is given or with their own.

    A scheme whose stored values are multiplied: the products of a group of columns that shares
    scales are summed first (exactly for int8), then scaled, then added up, all in float32; Hopper's
    tensor cores keep about 14 bits of the first sum of 8-bit floats. A scheme that is `decoded`:
    both operands become numbers (times ``w_global_scale``), whose products are summed in float32.

    Args:
        a: ``(R, K)``; or as the scheme stores activations, 4-bit numbers packed, ``(R, K / 2)``.
        a_scale: ``(R, groups)``; one a tensor: one element, or one for each expert. Of rows that
            are not quantized: the given one, or None.
        w: as the scheme stores weights, like ``w_scale``.
        w_scale: scales of groups.
        w_global_scale: a float32 factor on the product of ``(E,)``, ``(E, 2)`` (gate, up) or
            ``(E, N)``; that of rows is in it.
        bias: ``(E, N)``, added in float32.
        plan: of tiles; with the next two a `Tiles`.
        topk_ids: see there.
        expert_map: see there.
        row_tiles: what the plan was made with.
        top_k: slots of a row of ``a``.
        scheme: its key.
        out_dtype: of the result.
        activation: key of f; empty: there is none.
    """
    tiles = (plan, topk_ids, expert_map)
    weight, rest = (w, w_scale, w_global_scale), (row_tiles, top_k, scheme, out_dtype, activation)
    out = empty_rows(a, a_scale, *weight, bias, *tiles, *rest)
    known, stored = get_scheme(scheme), QTensor(w, w_scale, None, w_global_scale)
    quant = known.activation
    if a.dtype != quant.dtype:
        a, a_scale = moe_quantize(a, a_scale, None, topk_ids, expert_map, w.shape[0], quant.key)
    make = _decoded if known.decoded else _scaled
    product = make(Rows(a, a_scale), stored, known, row_tiles)
    return grouped(
        out, product, *w.shape[:2], tiles, row_tiles, top_k, bias=bias, activation=activation
    )


def _row_scales(rows: Rows, quant: Quant, expert: int, source: Tensor, num_experts: int) -> Tensor:
    """``(R, groups)``: the scales of some rows, which may share one, or have one of the expert."""
    if quant.per_tensor:
        return rows.scale.flatten().expand(num_experts)[expert].expand(len(source), 1)
    return rows.scale.view(len(rows.data), -1)[source]


def _decoded(rows: Rows, stored: QTensor, scheme: Scheme, row_tiles: Sequence[int]) -> Product:
    """Products of the numbers that stored values stand for."""
    num_experts = len(stored.data)

    def product(expert: int, source: Tensor, out: Tensor) -> None:
        scales = _row_scales(rows, scheme.activation, expert, source, num_experts)
        x = dequantize_rows(rows.data[source], scales, scheme.activation)
        weight = dequantize_weight(one_expert(stored, expert), scheme)[0]
        multiply(x, weight, out, row_tiles)

    return product


def _scaled(rows: Rows, stored: QTensor, scheme: Scheme, row_tiles: Sequence[int]) -> Product:
    """Products of stored values, scaled group by group."""
    w, w_scale, _, _ = stored
    num_experts, n, k = w.shape
    quant = scheme.weight
    cols = 1 if quant.group.cols == WHOLE else -(-k // quant.group.cols)
    groups = w_scale.view(num_experts, -1, cols)
    w_row = torch.arange(n, device=w.device) // rows_per_scale(w_scale, quant, n)

    def product(expert: int, source: Tensor, out: Tensor) -> None:
        a_scales = _row_scales(rows, scheme.activation, expert, source, num_experts).float()
        w_scales = scale_value(groups[expert, w_row])
        both = (rows.data[source], a_scales), (w[expert], w_scales)
        out.copy_(_product(*both, quant, row_tiles))

    return product


def _product(
    x: tuple[Tensor, Tensor], w: tuple[Tensor, Tensor], quant: Quant, row_tiles: Sequence[int]
) -> Tensor:
    """``(R, K) @ (N, K).T`` with scales ``(R, groups)`` and ``(N, groups)``, in float32."""
    (a, a_scale), (b, b_scale) = x, w
    size = a.shape[1] if quant.group.cols == WHOLE else quant.group.cols
    acc = torch.zeros((a.shape[0], b.shape[0]), device=a.device)
    pieces = zip(a.split(size, 1), b.split(size, 1), strict=True)
    for group, piece in enumerate(pieces):
        x_piece, w_piece = (_exact(part, quant.element) for part in piece)
        exact = torch.empty_like(acc, dtype=x_piece.dtype)
        multiply(x_piece, w_piece, exact, row_tiles)
        acc += exact.float() * a_scale[:, group, None] * b_scale[:, group]
    return acc


def _exact(data: Tensor, element: Element) -> Tensor:
    """Stored values in a dtype that sums their products: those of int8 exactly."""
    value = decode(data, element)
    largest_sum = element.largest**2 * data.shape[1]
    return value.double() if element.name == "int8" and largest_sum > 2**24 else value
