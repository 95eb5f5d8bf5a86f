"""The Standard-format pipeline with a gate that is a Python function, between the two GEMMs."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from moe_ops import checks, ops
from moe_ops.activation import MoEActivation
from moe_ops.pipeline.layer_checks import check_layer
from moe_ops.pipeline.row_spaces import SlotRows
from moe_ops.tiles import ROW_TILES


def gated_experts(
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    gate: Callable[[Tensor], Tensor],
    *,
    is_gated: bool = True,
    expert_map: Tensor | None = None,
    w1_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
) -> Tensor:
    """`fused_experts` for an activation that this library does not have.

    ``out[t] = sum_j w[t, j] * (gate(x[t] @ w1[e].T + b1[e]) @ w2[e].T + b2[e])``. Unlike there, the
    first product is rounded to the dtype of ``hidden_states`` before the gate sees it, and the gate
    computes in whatever precision it chooses.

    Args:
        hidden_states: as in `fused_experts`, like every argument not named here.
        w1: ``(El, 2I, H)`` in whatever order of rows ``gate`` reads; ``(El, I, H)`` when not
            ``is_gated``.
        w2: see `fused_experts`.
        topk_weights: see `fused_experts`.
        topk_ids: see `fused_experts`.
        gate: ``(T * k, w1.shape[1]) -> (T * k, I)``, row by row: row ``t * k + j`` is slot ``j`` of
            token ``t``. The rows of skipped slots hold anything, NaN too, and are not read again.
        is_gated: whether ``w1`` has twice the rows that ``w2`` has columns.
        expert_map: see `fused_experts`.
        w1_bias: see `fused_experts`.
        w2_bias: see `fused_experts`.

    Returns:
        ``(T, H)``, contiguous, dtype of ``hidden_states``.

    Raises:
        TypeError, ValueError, NotImplementedError: as `fused_experts`; ValueError when ``gate``
            returns another shape.
    """
    kind = MoEActivation.SILU if is_gated else MoEActivation.SILU_NO_MUL
    check_layer(
        hidden_states, w1, w2, w1_bias, w2_bias, kind, topk_weights, topk_ids, -1, expert_map
    )

    num_local_experts = w1.shape[0]
    tokens, k = topk_ids.shape
    plan = SlotRows.of(topk_ids, expert_map, num_local_experts).plan
    h = gate(ops.expert_gemm(hidden_states, w1, w1_bias, None, None, *plan, ROW_TILES, k))
    checks.tensor("gate(rows)", h, 2, checks.FLOATS)
    checks.size("gate(rows).shape[1]", h.shape[1], "w2.shape[2]", w2.shape[2])
    h = h.to(hidden_states.dtype).contiguous()
    y = ops.expert_gemm(h, w2, w2_bias, None, None, *plan, ROW_TILES, 1)
    y = y.view(tokens, k, hidden_states.shape[1])
    return ops.moe_fused_mul_sum(y, topk_weights, topk_ids, expert_map, None, num_local_experts)
