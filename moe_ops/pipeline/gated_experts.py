"""The Standard-format pipeline with a Python function as the gate between the two GEMMs."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from moe_ops import checks, ops
from moe_ops.activation import MoEActivation
from moe_ops.gradients import inference_only
from moe_ops.pipeline.fused_experts import NOT_QUANTIZED
from moe_ops.pipeline.gemms import expert_weights, gemm, quantized
from moe_ops.pipeline.layer_checks import check_layer
from moe_ops.pipeline.row_spaces import SlotRows, check_batch_invariant
from moe_ops.scheme import FusedMoEQuantConfig
from moe_ops.tensors import Routing


@inference_only
def gated_experts(
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    gate: Callable[[Tensor], Tensor],
    *,
    is_gated: bool = True,
    norm: Callable[[Tensor], Tensor] | None = None,
    expert_map: Tensor | None = None,
    w1_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    quant_config: FusedMoEQuantConfig | None = None,
    batch_invariant: bool = False,
) -> Tensor:
    """`fused_experts` for an activation that this library does not have.

    ``out[t] = sum_j w[t, j] * (gate(x[t] @ w1[e].T + b1[e]) @ w2[e].T + b2[e])``. Unlike in
    `fused_experts`, the first product is rounded to the dtype of ``hidden_states`` before it is
    passed to ``gate``, which computes in any precision.

    Args:
        hidden_states: as in `fused_experts`, like every argument not named here.
        w1: ``(El, 2I, H)``, with rows in any order that ``gate`` expects; ``(El, I, H)`` if not
            ``is_gated``.
        w2: see `fused_experts`.
        topk_weights: see `fused_experts`.
        topk_ids: see `fused_experts`.
        gate: ``(T * k, w1.shape[1]) -> (T * k, I)``, row by row: row ``t * k + j`` is slot ``j`` of
            token ``t``. The rows of skipped slots are undefined (also NaN) and not read again.
        is_gated: whether ``w1`` has twice the rows that ``w2`` has columns.
        norm: a function of the experts' rows ``(T * k, H)`` before the weighted sum; None: none.
        expert_map: see `fused_experts`.
        w1_bias: see `fused_experts`.
        w2_bias: see `fused_experts`.
        quant_config: see `fused_experts`.
        batch_invariant: see `fused_experts`; ``gate`` must then be batch-invariant, too.

    Returns:
        ``(T, H)``, contiguous, dtype of ``hidden_states``.

    Raises:
        TypeError, ValueError, NotImplementedError: as `fused_experts`; ValueError when ``gate``
            returns another shape.
    """
    checks.flags(is_gated=is_gated, batch_invariant=batch_invariant)
    kind = MoEActivation.SILU if is_gated else MoEActivation.SILU_NO_MUL
    config = NOT_QUANTIZED if quant_config is None else quant_config
    scheme = config.scheme
    biases = config.biases(w1_bias, w2_bias)
    routing = Routing(topk_weights, topk_ids, expert_map)
    quantization = () if scheme.weight is None else config.tensors
    check_layer(*routing, -1, hidden_states, w1, w2, *biases, kind, scheme, *quantization)
    weights = expert_weights(w1, w2, config, biases)

    if batch_invariant:
        check_batch_invariant(scheme)
    num_local_experts, dtype = w1.shape[0], hidden_states.dtype
    space = SlotRows.of(routing, num_local_experts, scheme, dtype, batch_invariant)
    top_k = topk_ids.shape[1]
    rows = quantized(hidden_states, weights.a1_scale, weights.w1, space, scheme, top_k)
    h = gate(gemm(rows, weights.w1, space, top_k, scheme, dtype))
    checks.tensor("gate(rows)", h, 2, checks.FLOATS)
    width = w1.shape[1] // 2 if is_gated else w1.shape[1]
    checks.size("gate(rows).shape[1]", h.shape[1], "the columns of w2", width)
    h = h.to(dtype).contiguous()
    rows = quantized(h, weights.a2_scale, weights.w2, space, scheme)
    y = gemm(rows, weights.w2, space, 1, scheme, dtype)
    y = y if norm is None else norm(y)
    return ops.moe_fused_mul_sum(y, topk_weights, topk_ids, expert_map, None, num_local_experts)
