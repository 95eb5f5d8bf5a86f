"""The Standard-format pipeline with a norm of every expert's row before the weighted sum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from moe_ops import checks, ops
from moe_ops.activation import Activation, MoEActivation
from moe_ops.gradients import check_transforms, once
from moe_ops.pipeline.fused_experts import expert_rows
from moe_ops.pipeline.lora import ExpertLora, pairs_of
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

    Args:
        hidden_states: as in `fused_experts`, like every argument not named here.
        w1: see `fused_experts`.
        w2: see `fused_experts`.
        routing: the tokens' routing.
        norm: ``(T * k, H) -> (T * k, H)``, row by row: row ``t * k + j`` is slot ``j`` of token
            ``t``. Rows of skipped slots are zeros with gradients, else undefined (also NaN); what
            it returns for them is not read.
        activation: see `fused_experts`.
        w1_bias: see `fused_experts`.
        w2_bias: see `fused_experts`.
        quant_config: see `fused_experts`.
        lora: see `fused_experts`.

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
        rows = rows.masked_fill(_skipped(routing, num_experts).view(-1, 1), 0.0)
    rows = norm(rows)
    checks.tensor("norm(rows)", rows, 2, checks.FLOATS)
    checks.size("norm(rows).shape[1]", rows.shape[1], "the rows of w2", width)
    check_transforms("normed_experts")
    out: Tensor = _WeightedSum.apply(rows, *routing, num_experts)
    return out


def _skipped(routing: Routing, num_experts: int) -> Tensor:
    """Which slots have no local expert, ``(T, k)``."""
    return pairs_of(routing, num_experts, None, 0) < 0


class _WeightedSum(Function):
    """`ops.moe_fused_mul_sum` over the slots' rows, with gradients of rows and router weights."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        expert_map: Tensor | None,
        num_experts: int,
    ) -> Tensor:
        """Sum each token's rows, times router weights."""
        ctx.num_experts = num_experts
        ctx.save_for_backward(rows, topk_weights, topk_ids, expert_map)
        return ops.moe_fused_mul_sum(
            rows.contiguous(), topk_weights, topk_ids, expert_map, None, num_experts
        )

    @staticmethod
    @once("normed_experts")
    def backward(ctx: Any, saved: tuple[Any, ...], grad: Tensor) -> Any:
        """Give every slot its token's gradient, times its router weight."""
        rows, *routed = saved
        weights, ids, expert_map = routing = Routing(*routed)
        drows = dweights = None
        if ctx.needs_input_grad[0]:
            used = weights.float().masked_fill(_skipped(routing, ctx.num_experts), 0.0)
            drows = (grad[:, None] * used[:, :, None]).to(rows.dtype).flatten(0, 1)
        if ctx.needs_input_grad[1]:
            slots = (ids, expert_map, ctx.num_experts)
            dweights = ops.slot_products(grad.contiguous(), rows.contiguous(), *slots, False)
            dweights = dweights.to(weights.dtype)
        return drows, dweights, None, None, None
