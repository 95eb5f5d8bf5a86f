"""Reference of the expert GEMMs: one matrix product for each expert that has rows.

With ``expert_order`` the rows between the two GEMMs, which `expert_gemm_act` writes and
`expert_gemm` reads, are permuted: sorted by expert as in the plan, without its padding. Batched and
permuted rows, which are grouped by expert already, keep their places. Rows past the rows in use are
undefined. Everything else stays in slot order: ``out`` of `expert_gemm`, and router weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from moe_ops.activation import formula
from moe_ops.fake_impls.expert_gemm import expert_gemm as empty_rows
from moe_ops.fake_impls.expert_gemm import expert_gemm_act as empty_activated_rows
from moe_ops.reference.activation import apply, split
from moe_ops.reference.slots import multiply, planned_slots, rows_between, runs
from moe_ops.tensors import AnyTiles


def _grouped(
    out: Tensor,
    a: Tensor,
    w: Tensor,
    bias: Tensor | None,
    input_weights: Tensor | None,
    tiles: AnyTiles,
    row_tiles: Sequence[int],
    top_k: int,
    ordered: str | None,
    finish: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """``out[slot] = finish(rows @ w[e].T, slots)`` in float32, zeros in all other rows.

    ``ordered``: which of ``"a"`` and ``"out"`` has permuted rows, if any.
    """
    out.zero_()
    num_slots = out.shape[0]
    if num_slots == 0:
        return out
    slots, experts = planned_slots(tiles, row_tiles, num_slots, w.shape[0])
    between = slots
    if ordered is not None:
        between = rows_between(tiles, row_tiles, num_slots, w.shape[0])
    x = a[between if ordered == "a" else slots // top_k].float()
    rows = x.new_empty((len(slots), w.shape[1]))
    for expert, mine in runs(experts):
        multiply(x[mine], w[expert].float(), rows[mine], row_tiles)
    if input_weights is not None:
        rows *= input_weights.flatten()[slots, None].float()
    if bias is not None:
        rows += bias[experts].float()
    out[between if ordered == "out" else slots] = finish(rows, slots).to(out.dtype)
    return out


def expert_gemm(
    a: Tensor,
    w: Tensor,
    bias: Tensor | None,
    input_weights: Tensor | None,
    output_weights: Tensor | None,
    plan: Tensor | None,
    topk_ids: Tensor | None,
    expert_map: Tensor | None,
    row_tiles: Sequence[int],
    top_k: int,
    expert_order: bool = False,
) -> Tensor:
    """``out[s] = (input_weights[s] * a[s // top_k] @ w[e].T + bias[e]) * output_weights[s]``."""
    tiles = (plan, topk_ids, expert_map)
    out = empty_rows(a, w, bias, input_weights, output_weights, *tiles, row_tiles, top_k)
    ordered = "a" if expert_order else None

    def finish(rows: Tensor, slots: Tensor) -> Tensor:
        if output_weights is None:
            return rows
        return rows * output_weights.flatten()[slots, None].float()

    return _grouped(out, a, w, bias, input_weights, tiles, row_tiles, top_k, ordered, finish)


def expert_gemm_act(
    a: Tensor,
    w: Tensor,
    bias: Tensor | None,
    input_weights: Tensor | None,
    plan: Tensor | None,
    topk_ids: Tensor | None,
    expert_map: Tensor | None,
    row_tiles: Sequence[int],
    top_k: int,
    activation: str,
    expert_order: bool = False,
) -> Tensor:
    """``out[s] = act(input_weights[s] * a[s // top_k] @ w[e].T + bias[e])``."""
    tiles = (plan, topk_ids, expert_map)
    out = empty_activated_rows(a, w, bias, input_weights, *tiles, row_tiles, top_k, activation)
    rule, ordered = formula(activation), "out" if expert_order else None

    def finish(rows: Tensor, slots: Tensor) -> Tensor:
        return apply(*split(rows, rule), rule)

    return _grouped(out, a, w, bias, input_weights, tiles, row_tiles, top_k, ordered, finish)
