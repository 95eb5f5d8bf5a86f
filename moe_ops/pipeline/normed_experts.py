"""The Standard-format pipeline with a norm of every expert's row before the weighted sum."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moe_ops import checks
from moe_ops.activation import Activation, MoEActivation
from moe_ops.pipeline.fused_experts import expert_rows
from moe_ops.pipeline.lora import ExpertLora
from moe_ops.pipeline.slot_gradients import skipped_slots, sum_of_slots
from moe_ops.scheme import FusedMoEQuantConfig
from moe_ops.tensors import Routing


def normed_experts(
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    routing: Routing,
    norm: Callable[[Tensor], Tensor],
    *,
    activation: MoEActivation | Activation | str = "silu",
    w1_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    quant_config: FusedMoEQuantConfig | None = None,
    lora: ExpertLora | None = None,
) -> Tensor:
    """`fused_experts` with a norm of each expert's output.

    ``out[t] = sum_j w[t, j] * norm(act(x[t] @ w1[e].T + b1[e]) @ w2[e].T + b2[e])``. The experts'
    rows are rounded to the dtype of ``hidden_states`` before the norm, which computes in any
    precision. Gradients are as in `fused_experts`, with the norm's own.

    ``norm`` is ``(T * k, H) -> (T * k, H)``, row by row: row ``t * k + j`` is slot ``j`` of token
    ``t``. Rows of skipped slots are zeros with gradients, else undefined (also NaN); what it
    returns for them is not read. All other arguments are as in `fused_experts`.

    Returns:
        ``(T, H)``, contiguous, of the dtype that ``norm`` returns.

    Raises:
        TypeError, ValueError, NotImplementedError: as `fused_experts`; ValueError when ``norm``
            returns another shape.

    Source:
        transformers ``use_experts_implementation(has_post_expert_norm=True)``.
    """
    rows = expert_rows(
        hidden_states,
        w1,
        w2,
        routing,
        activation=activation,
        w1_bias=w1_bias,
        w2_bias=w2_bias,
        quant_config=quant_config,
        lora=lora,
    )
    num_experts, width = w1.shape[0], rows.shape[1]
    if torch.is_grad_enabled():
        rows = rows.masked_fill(skipped_slots(routing, num_experts).view(-1, 1), 0.0)
    rows = norm(rows)
    checks.tensor("norm(rows)", rows, 2, checks.FLOATS)
    checks.size("norm(rows).shape[1]", rows.shape[1], "the rows of w2", width)
    return sum_of_slots(rows, routing, num_experts, "normed_experts")
