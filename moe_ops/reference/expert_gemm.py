"""Reference of the expert GEMMs: one matrix product for each expert that has rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from moe_ops.activation import formula
from moe_ops.fake_impls.expert_gemm import expert_gemm as empty_rows
from moe_ops.fake_impls.expert_gemm import expert_gemm_act as empty_activated_rows
from moe_ops.reference.activation import apply, split
from moe_ops.reference.slots import multiply, planned_slots, runs


def _grouped(
    out: Tensor,
    a: Tensor,
    w: Tensor,
    bias: Tensor | None,
    input_weights: Tensor | None,
    plan: Tensor,
    row_tiles: Sequence[int],
    top_k: int,
    finish: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """``out[slot] = finish(rows @ w[e].T, slots)`` in float32, with zeros in skipped slots."""
    out.zero_()
    num_slots = out.shape[0]
    if num_slots == 0:
        return out
    slots, experts = planned_slots(plan, row_tiles, num_slots, w.shape[0])
    x = a[slots // top_k].float()
    rows = x.new_empty((len(slots), w.shape[1]))
    for expert, mine in runs(experts):
        multiply(x[mine], w[expert].float(), rows[mine], row_tiles)
    if input_weights is not None:
        rows *= input_weights.flatten()[slots, None].float()
    if bias is not None:
        rows += bias[experts].float()
    out[slots] = finish(rows, slots).to(out.dtype)
    return out


def expert_gemm(
    a: Tensor,
    w: Tensor,
    bias: Tensor | None,
    input_weights: Tensor | None,
    output_weights: Tensor | None,
    plan: Tensor,
    topk_ids: Tensor | None,
    expert_map: Tensor | None,
    row_tiles: Sequence[int],
    top_k: int,
) -> Tensor:
    """``out[s] = (input_weights[s] * a[s // top_k] @ w[e].T + bias[e]) * output_weights[s]``."""
    tiles = (plan, topk_ids, expert_map)
    out = empty_rows(a, w, bias, input_weights, output_weights, *tiles, row_tiles, top_k)

    def finish(rows: Tensor, slots: Tensor) -> Tensor:
        if output_weights is None:
            return rows
        return rows * output_weights.flatten()[slots, None].float()

    return _grouped(out, a, w, bias, input_weights, plan, row_tiles, top_k, finish)


def expert_gemm_act(
    a: Tensor,
    w: Tensor,
    bias: Tensor | None,
    input_weights: Tensor | None,
    plan: Tensor,
    topk_ids: Tensor | None,
    expert_map: Tensor | None,
    row_tiles: Sequence[int],
    top_k: int,
    activation: str,
) -> Tensor:
    """``out[s] = act(input_weights[s] * a[s // top_k] @ w[e].T + bias[e])``."""
    tiles = (plan, topk_ids, expert_map)
    out = empty_activated_rows(a, w, bias, input_weights, *tiles, row_tiles, top_k, activation)
    rule = formula(activation)

    def finish(rows: Tensor, slots: Tensor) -> Tensor:
        return apply(*split(rows, rule), rule)

    return _grouped(out, a, w, bias, input_weights, plan, row_tiles, top_k, finish)
