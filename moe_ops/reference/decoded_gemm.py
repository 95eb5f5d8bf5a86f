"""Reference of the expert GEMMs that dequantize both operands, in float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moe_ops.activation import formula
from moe_ops.fake_impls.decoded_gemm import decoded_gemm as empty_rows
from moe_ops.fake_impls.decoded_gemm import decoded_gemm_act as empty_activated_rows
from moe_ops.reference.activation import apply, split
from moe_ops.reference.slots import multiply, planned_slots, runs
from moe_ops.reference.weight_only_gemm import one_expert
from moe_ops.scheme import Quant, dequantize_rows, dequantize_weight, get_scheme
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
    """``out[s] = dequantized(a[s // top_k]) @ dequantized(w[e]).T + bias[e]``, rounded once.

    Args:
        a: ``(R, K)`` as the scheme stores activations; 4-bit numbers packed, ``(R, K / 2)``.
        a_scale: ``(R, groups)``; per-tensor scales: one element, or one per expert.
        w: weights as the scheme stores them.
        w_scale: scales of the weights' groups, as the scheme stores them.
        w_global_scale: a float32 factor on the product, ``(E,)``, ``(E, 2)`` (gate, up) or
            ``(E, N)``, that includes the global scale of the rows.
        bias: added in float32.
        plan: the plan of tiles; a field of `Tiles`, as are ``topk_ids`` and ``expert_map``.
        topk_ids: see `Tiles`.
        expert_map: see `Tiles`.
        row_tiles: the row tiles that the plan was made with.
        top_k: slots per row of ``a``.
        scheme: name of the scheme.
        out_dtype: dtype of the result.
    """
    tiles = (plan, topk_ids, expert_map)
    rest = (bias, *tiles, row_tiles, top_k, scheme, out_dtype)
    out = empty_rows(a, a_scale, w, w_scale, w_global_scale, *rest)
    stored = QTensor(w, w_scale, None, w_global_scale)
    return _grouped(out, (a, a_scale), stored, bias, tiles, row_tiles, top_k, scheme, lambda y: y)


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
    """The activation of the rows of `decoded_gemm`, in float32, rounded once."""
    tiles = (plan, topk_ids, expert_map)
    rest = (bias, *tiles, row_tiles, top_k, scheme, out_dtype, activation)
    out = empty_activated_rows(a, a_scale, w, w_scale, w_global_scale, *rest)
    stored, rule = QTensor(w, w_scale, None, w_global_scale), formula(activation)

    def finish(rows: Tensor) -> Tensor:
        return apply(*split(rows, rule), rule)

    return _grouped(out, (a, a_scale), stored, bias, tiles, row_tiles, top_k, scheme, finish)


def _grouped(
    out: Tensor,
    a: tuple[Tensor, Tensor],
    stored: QTensor,
    bias: Tensor | None,
    tiles: AnyTiles,
    row_tiles: Sequence[int],
    top_k: int,
    scheme: str,
    finish: Callable[[Tensor], Tensor],
) -> Tensor:
    """``out[slot] = finish(product of the slot's row)``, zeros for skipped slots."""
    out.zero_()
    if out.shape[0] == 0:
        return out
    num_experts, n, _ = stored.data.shape
    slots, experts = planned_slots(tiles, row_tiles, out.shape[0], num_experts)
    quant = get_scheme(scheme).activation
    x = _numbers(*a, quant, slots // top_k, experts, num_experts)
    rows = x.new_empty((len(slots), n))
    for expert, mine in runs(experts):
        weight = dequantize_weight(one_expert(stored, expert), scheme)[0]
        multiply(x[mine], weight, rows[mine], row_tiles)
    if bias is not None:
        rows += bias[experts].float()
    out[slots] = finish(rows).to(out.dtype)
    return out


def _numbers(
    q: Tensor, scale: Tensor, quant: Quant | None, row: Tensor, experts: Tensor, num_experts: int
) -> Tensor:
    """The dequantized rows ``row``, one per slot, in float32."""
    if quant is None:
        return q[row].float()
    if quant.per_tensor:  # one scale, or one per expert
        return dequantize_rows(q[row], scale.flatten().expand(num_experts)[experts, None], quant)
    return dequantize_rows(q[row], scale.view(len(q), -1)[row], quant)
