"""Reference of the expert GEMMs with two quantized operands.

One matrix product for each expert that has rows and each scale group along K.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moe_ops.activation import formula
from moe_ops.fake_impls.scaled_gemm import quants, stored_rows
from moe_ops.fake_impls.scaled_gemm import scaled_gemm as empty_rows
from moe_ops.fake_impls.scaled_gemm import scaled_gemm_act as empty_activated_rows
from moe_ops.reference.activation import apply, split
from moe_ops.reference.quantize import moe_quantize
from moe_ops.reference.slots import multiply, planned_slots, runs
from moe_ops.scheme import WHOLE, Element, Quant
from moe_ops.scheme.rounding import decode, scale_value
from moe_ops.scheme.weights import rows_per_scale
from moe_ops.tensors import AnyTiles


class _Operands(NamedTuple):
    """The operands: stored values, their scales and the bias."""

    a: Tensor
    a_scale: Tensor
    w: Tensor
    w_scale: Tensor
    bias: Tensor | None
    scheme: str


def scaled_gemm(
    a: Tensor,
    a_scale: Tensor | None,
    w: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    plan: Tensor | None,
    topk_ids: Tensor | None,
    expert_map: Tensor | None,
    row_tiles: Sequence[int],
    top_k: int,
    scheme: str,
    out_dtype: torch.dtype,
) -> Tensor:
    """``out[s] = a_scale * w_scale * (a[s // top_k] @ w[e].T) + bias[e]``, rounded once.

    Rows that are not quantized yet are quantized first, with ``a_scale`` or scales from the data.

    The products within a scale group along K are summed (exactly for int8), then scaled, then added
    up, all in float32. (Hopper's fp8 tensor cores keep about 14 bits of the sum within a group.)
    """
    tiles = (plan, topk_ids, expert_map)
    out = empty_rows(a, a_scale, w, w_scale, bias, *tiles, row_tiles, top_k, scheme, out_dtype)
    rows = _quantized(a, a_scale, w, scheme, tiles)
    operands = _Operands(*rows, w, w_scale, bias, scheme)
    return _grouped(out, operands, tiles, row_tiles, top_k, lambda rows: rows)


def scaled_gemm_act(
    a: Tensor,
    a_scale: Tensor | None,
    w: Tensor,
    w_scale: Tensor,
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
    """The activation of the rows of `scaled_gemm`, in float32, rounded once."""
    tiles = (plan, topk_ids, expert_map)
    rest = (bias, *tiles, row_tiles, top_k, scheme, out_dtype, activation)
    out = empty_activated_rows(a, a_scale, w, w_scale, *rest)
    rule = formula(activation)

    def finish(rows: Tensor) -> Tensor:
        return apply(*split(rows, rule), rule)

    rows = _quantized(a, a_scale, w, scheme, tiles)
    return _grouped(
        out, _Operands(*rows, w, w_scale, bias, scheme), tiles, row_tiles, top_k, finish
    )


def _quantized(
    a: Tensor, a_scale: Tensor | None, w: Tensor, scheme: str, tiles: AnyTiles
) -> tuple[Tensor, Tensor]:
    """The quantized rows and their scales; rows that are not quantized yet are quantized here.

    Rows whose slots are all skipped are left out: they are zeros.
    """
    quant, _ = quants(scheme)
    slots = (*tiles[1:], w.shape[0])
    return stored_rows(a, a_scale, quant) or moe_quantize(a, a_scale, None, *slots, quant.key)


def _grouped(
    out: Tensor,
    operands: _Operands,
    tiles: AnyTiles,
    row_tiles: Sequence[int],
    top_k: int,
    finish: Callable[[Tensor], Tensor],
) -> Tensor:
    """``out[slot] = finish(product of the slot's row)``, zeros for skipped slots."""
    a, a_scale, w, w_scale, bias, scheme = operands
    out.zero_()
    num_experts, n, _ = w.shape
    a_quant, quant = quants(scheme)
    if out.shape[0] == 0:
        return out
    slots, experts = planned_slots(tiles, row_tiles, out.shape[0], num_experts)
    x = a[slots // top_k]
    if not a_quant.per_tensor:
        x_scale = a_scale.view(a.shape[0], -1)[slots // top_k].float()
    else:  # one scale, or one per expert
        x_scale = a_scale.flatten().expand(num_experts)[experts, None].float()
    groups = w_scale.view(num_experts, -1, 1 if quant.group.cols == WHOLE else x_scale.shape[1])
    w_row = torch.arange(n, device=w.device) // rows_per_scale(w_scale, quant, n)
    rows = torch.empty((len(slots), n), device=w.device)
    for expert, mine in runs(experts):
        scales = scale_value(groups[expert, w_row])
        both = (x[mine], x_scale[mine]), (w[expert], scales)
        rows[mine] = _product(*both, quant, row_tiles)
    if bias is not None:
        rows += bias[experts].float()
    out[slots] = finish(rows).to(out.dtype)
    return out


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
    """Stored values in a dtype that can sum their products, exactly for int8."""
    value = decode(data, element)
    largest_sum = element.largest**2 * data.shape[1]
    return value.double() if element.name == "int8" and largest_sum > 2**24 else value
