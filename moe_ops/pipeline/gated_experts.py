"""The Standard-format pipeline with a Python function as the gate between the two GEMMs."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from moe_ops import checks
from moe_ops.activation import MoEActivation
from moe_ops.gradients import inference_only
from moe_ops.pipeline.forward import Pass, forward
from moe_ops.pipeline.fused_experts import NOT_QUANTIZED
from moe_ops.pipeline.gathering import Settings
from moe_ops.pipeline.gemms import expert_weights, quantized
from moe_ops.pipeline.layer_checks import check_layer
from moe_ops.pipeline.row_spaces import SlotRows, check_batch_invariant
from moe_ops.scheme import FusedMoEQuantConfig
from moe_ops.tensors import Routing, Rows


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
    width, dtype = w1.shape[1] // 2 if is_gated else w1.shape[1], hidden_states.dtype
    settings = Settings(scheme, "", False, batch_invariant, dtype, rounds_product=True)
    step = Pass(weights, settings, between=_Gate(gate, norm, width))
    out: Tensor = forward(step, hidden_states, routing)
    return out


class _Gate(NamedTuple):
    """The caller's functions of the rows of both GEMMs."""

    gate: Callable[[Tensor], Tensor]
    norm: Callable[[Tensor], Tensor] | None
    width: int
    """Columns that ``gate`` must return."""

    def activate(self, product: Tensor, space: SlotRows, step: Pass) -> Rows:
        """Pass the first GEMM's product to the gate."""
        h = self.gate(product)
        checks.tensor("gate(rows)", h, 2, checks.FLOATS)
        checks.size("gate(rows).shape[1]", h.shape[1], "the columns of w2", self.width)
        (scheme, *_), weights = step.settings, step.weights
        h = h.to(product.dtype).contiguous()
        return quantized(h, weights.a2_scale, weights.w2, space, scheme)

    def after(self, y: Tensor) -> Tensor:
        """Pass the experts' rows to the norm."""
        return y if self.norm is None else self.norm(y)
