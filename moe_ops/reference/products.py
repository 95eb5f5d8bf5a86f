"""Products of one expert's rows and weight, by what the scheme quantizes.

Numbers that are not multiplied as they are stored are dequantized first: a weight alone is rounded
to the rows' dtype, as in vLLM; if both operands are, in float32. Products are summed in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from moe_ops.reference.cached import plain_product
from moe_ops.reference.grouped import Product
from moe_ops.reference.slots import multiply
from moe_ops.scheme import Element, Quant, Scheme, dequantize_rows, dequantize_weight
from moe_ops.scheme.rounding import scale_value
from moe_ops.scheme.weights import rows_per_scale
from moe_ops.tensors import ExpertWeight, QTensor


def product_of(
    a: Tensor,
    a_scale: Tensor | None,
    weight: ExpertWeight,
    scheme: Scheme,
    dtype: torch.dtype,
    batch_invariant: bool,
) -> Product:
    """The product of an expert's rows, which are stored as the scheme says.

    If the scheme multiplies stored values, the products within a scale group along K are summed
    first (exactly for int8), then scaled, then added up, all in float32. (Hopper's fp8 tensor cores
    keep about 14 bits of the sum within a group.) Otherwise numbers are multiplied.
    """
    if scheme.activation is not None and not scheme.dequantizes_both:
        return _scaled(cast(Tensor, a_scale), weight, scheme, batch_invariant)
    if scheme.weight is None:
        return plain_product(weight.data, dtype, batch_invariant)
    stored = weight.stored
    quant, num_experts = scheme.activation, len(stored.data)
    rounds_to = a.dtype if quant is None else torch.float32

    def product(expert: int, rows: Sequence[Tensor], out: Tensor) -> None:
        if quant is None:
            x = rows[0].float()
        else:
            scale = _row_scales(rows, cast(Tensor, a_scale), expert, num_experts)
            x = dequantize_rows(rows[0], scale, quant)
        w = dequantize_weight(one_expert(stored, expert), scheme, rounds_to)[0]
        multiply(x, w.float().t(), out, batch_invariant)

    return product


def one_expert(stored: QTensor, expert: int) -> QTensor:
    """The stored weight of one expert, with its scales and zero points."""
    only = slice(expert, expert + 1)
    rest = (None if t is None else t[only] for t in stored[1:])
    return QTensor(stored.data[only], *rest)


def _row_scales(rows: Sequence[Tensor], a_scale: Tensor, expert: int, num_experts: int) -> Tensor:
    """``(R, groups)``: the scales of an expert's rows; of all rows or the expert if per tensor."""
    if len(rows) == 1:
        return a_scale.flatten().expand(num_experts)[expert].expand(len(rows[0]), 1)
    return rows[1]


def _scaled(
    a_scale: Tensor, stored: ExpertWeight, scheme: Scheme, batch_invariant: bool
) -> Product:
    """Products of stored values, scaled group by group."""
    w, (num_experts, n, k) = stored.data, stored.data.shape
    weight_quant = cast(Quant, scheme.weight)
    cols = -(-k // (weight_quant.shared_cols or k))
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
    size = quant.shared_cols or a.shape[1]
    a, b = _exact(a, quant.element, size), _exact(b, quant.element, size)
    acc = torch.zeros((a.shape[0], b.shape[0]), dtype=torch.float32, device=a.device)
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
