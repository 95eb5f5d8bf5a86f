"""Losses of routers, load balancing, adapters of experts, main gradients, and training over ranks.

`fused_experts`, `fused_moe`, `FusedMoE` and the top-k routers have gradients themselves; what is
here is used beside them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops import checks
from moe_ops.functional import count_expert_num_tokens
from moe_ops.layer.adapters import mark_rank_adapters
from moe_ops.layer.clipping import clip_grad_norm_
from moe_ops.layer.sharded import sharded_state_dict
from moe_ops.pipeline.lora import ExpertLora, expert_lora
from moe_ops.pipeline.main_grads import with_main_grad

__all__ = [
    "ExpertLora",
    "clip_grad_norm_",
    "expert_lora",
    "load_balance_loss",
    "mark_rank_adapters",
    "router_z_loss",
    "sharded_state_dict",
    "update_expert_bias",
    "with_main_grad",
]


def load_balance_loss(
    router_logits: Tensor, topk_ids: Tensor, *, is_padding: Tensor | None = None
) -> Tensor:
    """Auxiliary loss that is smallest if every expert gets equally many tokens.

    ``E * sum_e f[e] * P[e]``, with f the tokens that chose expert e, divided by the number of
    tokens, and P the mean softmax score of e: k for an even load. f has no gradient.

    Args:
        router_logits: ``(T, E)``, of one layer, or of several layers one after the other.
        topk_ids: ``(T, k)`` int32 or int64; ids outside of 0..E - 1 are not counted.
        is_padding: ``(T,)`` bool, True for tokens that are left out, whatever their logits are.

    Returns:
        A float32 scalar; 0 without tokens. Multiply it by a coefficient such as 0.01.

    Raises:
        TypeError, ValueError: wrong dtypes or shapes.

    Source:
        Switch Transformers (arXiv 2101.03961), equations 4 to 6; for k > 1 transformers'
        ``load_balancing_loss_func``, whose result this is.
    """
    _check_logits(router_logits, is_padding)
    checks.tensor("topk_ids", topk_ids, 2, checks.INDICES)
    checks.same_tokens("topk_ids", topk_ids, "router_logits", router_logits)
    checks.same_device("topk_ids", topk_ids, "router_logits", router_logits)
    experts = router_logits.shape[1]
    scores = _logits_without_padding(router_logits, is_padding).softmax(-1)
    if is_padding is not None:
        topk_ids = topk_ids.masked_fill(is_padding[:, None], -1)
        scores = scores.masked_fill(is_padding[:, None], 0.0)
    tokens = _num_tokens(router_logits, is_padding)
    counts = count_expert_num_tokens(topk_ids, experts)
    return experts * ((counts / tokens) * (scores.sum(0) / tokens)).sum()


def router_z_loss(router_logits: Tensor, *, is_padding: Tensor | None = None) -> Tensor:
    """Auxiliary loss that keeps logits small: the mean of ``logsumexp(logits) ** 2``.

    Args:
        router_logits: ``(T, E)``.
        is_padding: ``(T,)`` bool, True for tokens that are left out, whatever their logits are.

    Returns:
        A float32 scalar; 0 without tokens. Multiply it by a coefficient such as 0.001.

    Raises:
        TypeError, ValueError: wrong dtypes or shapes.

    Source:
        ST-MoE (arXiv 2202.08906), equation 5.
    """
    _check_logits(router_logits, is_padding)
    squares = _logits_without_padding(router_logits, is_padding).logsumexp(-1).square()
    if is_padding is not None:
        squares = squares.masked_fill(is_padding, 0.0)
    return squares.sum() / _num_tokens(router_logits, is_padding)


@torch.no_grad()
def update_expert_bias(
    e_score_correction_bias: Tensor, expert_num_tokens: Tensor, rate: float = 0.001
) -> None:
    """Balance the load without a loss: raise the bias of experts with few tokens, lower the others.

    ``bias += rate * sign(mean(n) - n)`` for the numbers of tokens n, in place. Call it after a step
    of the optimizer. With several ranks, sum the numbers over the ranks first.

    Args:
        e_score_correction_bias: ``(E,)`` float32, which `fused_topk` and `grouped_topk` add to
            scores to choose experts.
        expert_num_tokens: ``(E,)``: tokens of each expert in the last batch or batches, as
            `count_expert_num_tokens` returns them.
        rate: the size of a step.

    Raises:
        TypeError, ValueError: wrong dtypes or shapes.

    Source:
        Auxiliary-Loss-Free Load Balancing (arXiv 2408.15664), algorithm 1; DeepSeek-V3
        (arXiv 2412.19437), section 2.1.2.
    """
    checks.tensor("e_score_correction_bias", e_score_correction_bias, 1, (torch.float32,))
    numeric = (*checks.INDICES, *checks.FLOATS, torch.float64)
    checks.tensor("expert_num_tokens", expert_num_tokens, 1, numeric)
    bias = ("e_score_correction_bias", e_score_correction_bias)
    checks.same_device("expert_num_tokens", expert_num_tokens, *bias)
    checks.size(
        "expert_num_tokens.shape[0]",
        expert_num_tokens.shape[0],
        "the number of experts",
        e_score_correction_bias.shape[0],
    )
    checks.factor("rate", rate)
    numbers = expert_num_tokens.to(torch.float64)
    e_score_correction_bias.add_(torch.sign(numbers.mean() - numbers).float(), alpha=rate)


def _check_logits(router_logits: Tensor, is_padding: Tensor | None) -> None:
    checks.tensor("router_logits", router_logits, 2, checks.FLOATS)
    if is_padding is not None:
        checks.tensor("is_padding", is_padding, 1, (torch.bool,))
        checks.same_tokens("is_padding", is_padding, "router_logits", router_logits)
        checks.same_device("is_padding", is_padding, "router_logits", router_logits)


def _logits_without_padding(router_logits: Tensor, is_padding: Tensor | None) -> Tensor:
    """The logits in float32, zeros in rows of padding, which may hold NaN.

    The gradient of a row that a result leaves out is ``0 * NaN`` if the row itself holds NaN.
    """
    logits = router_logits.float()
    return logits if is_padding is None else logits.masked_fill(is_padding[:, None], 0.0)


def _num_tokens(router_logits: Tensor, is_padding: Tensor | None) -> Tensor:
    """The number of tokens that are no padding, at least 1, on the device."""
    if is_padding is None:
        count = router_logits.new_ones(router_logits.shape[0], dtype=torch.float32).sum()
    else:
        count = (~is_padding).sum().float()
    return count.clamp(min=1)
