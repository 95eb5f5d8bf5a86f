"""Reference of the expert GEMMs with quantized weights only.

The weight of each expert that has rows is dequantized and rounded to the rows' dtype, as upstream
does; products are summed in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from moe_ops.activation import formula
from moe_ops.fake_impls.weight_only_gemm import weight_only_gemm as empty_rows
from moe_ops.fake_impls.weight_only_gemm import weight_only_gemm_act as empty_activated_rows
from moe_ops.reference.activation import apply, split
from moe_ops.reference.slots import multiply, planned_slots, runs
from moe_ops.scheme import dequantize_weight
from moe_ops.tensors import AnyTiles, QTensor


def weight_only_gemm(
    a: Tensor,
    w: Tensor,
    w_scale: Tensor | None,
    w_zero_point: Tensor | None,
    w_global_scale: Tensor | None,
    bias: Tensor | None,
    input_weights: Tensor | None,
    plan: Tensor | None,
    topk_ids: Tensor | None,
    expert_map: Tensor | None,
    row_tiles: Sequence[int],
    top_k: int,
    scheme: str,
) -> Tensor:
    """``out[s] = input_weights[s] * a[s // top_k] @ dequantized(w[e]).T + bias[e]``."""
    tiles = (plan, topk_ids, expert_map)
    stored = QTensor(w, w_scale, w_zero_point, w_global_scale)
    out = empty_rows(a, *stored, bias, input_weights, *tiles, row_tiles, top_k, scheme)

    def finish(rows: Tensor) -> Tensor:
        return rows

    return _grouped(out, a, stored, bias, input_weights, tiles, row_tiles, top_k, scheme, finish)


def weight_only_gemm_act(
    a: Tensor,
    w: Tensor,
    w_scale: Tensor | None,
    w_zero_point: Tensor | None,
    w_global_scale: Tensor | None,
    bias: Tensor | None,
    input_weights: Tensor | None,
    plan: Tensor | None,
    topk_ids: Tensor | None,
    expert_map: Tensor | None,
    row_tiles: Sequence[int],
    top_k: int,
    scheme: str,
    activation: str,
) -> Tensor:
    """The activation of the rows of `weight_only_gemm`, in float32, rounded once."""
    tiles = (plan, topk_ids, expert_map)
    stored = QTensor(w, w_scale, w_zero_point, w_global_scale)
    out = empty_activated_rows(
        a, *stored, bias, input_weights, *tiles, row_tiles, top_k, scheme, activation
    )
    rule = formula(activation)

    def finish(rows: Tensor) -> Tensor:
        return apply(*split(rows, rule), rule)

    return _grouped(out, a, stored, bias, input_weights, tiles, row_tiles, top_k, scheme, finish)


def _grouped(
    out: Tensor,
    a: Tensor,
    stored: QTensor,
    bias: Tensor | None,
    input_weights: Tensor | None,
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
    x = a[slots // top_k].float()
    rows = x.new_empty((len(slots), n))
    for expert, mine in runs(experts):
        weight = dequantize_weight(one_expert(stored, expert), scheme, a.dtype)[0].float()
        multiply(x[mine], weight, rows[mine], row_tiles)
    if input_weights is not None:
        rows *= input_weights.flatten()[slots, None].float()
    if bias is not None:
        rows += bias[experts].float()
    out[slots] = finish(rows).to(out.dtype)
    return out


def one_expert(stored: QTensor, expert: int) -> QTensor:
    """The stored weight of one expert, with its scales and zero points."""
    only = slice(expert, expert + 1)
    rest = (None if t is None else t[only] for t in stored[1:])
    return QTensor(stored.data[only], *rest)
