"""Reference of the routing operators.

Scores are computed in float64 and rounded once to float32, so that the kernels' exponentials, which
differ from the CPU's, lead to the same scores and the same experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops.reference.activation import sigmoid

LOWEST = torch.finfo(torch.float32).min


def scores(logits: Tensor, scoring_func: str) -> Tensor:
    """``(T, E)`` float32 scores; a logit that is not finite scores 0."""
    logits = logits.double()
    finite = logits.isfinite()
    if scoring_func == "sigmoid":
        score = sigmoid(logits)
    elif scoring_func == "sqrtsoftplus":
        decayed = torch.exp(-logits.abs())  # `softplus` rounds the last elements differently
        score = torch.where(logits > 20, logits, logits.clamp(min=0) + decayed.log1p()).sqrt()
    else:
        score = logits.masked_fill(~finite, -torch.inf).softmax(-1)
    return torch.where(finite, score, 0.0).float()


def biased(score: Tensor, bias: Tensor | None) -> Tensor:
    """The score plus the bias, by which experts are chosen; a sum that is not finite comes last."""
    if bias is None:
        return score
    choice = score + bias.float()
    return torch.where(choice.isfinite(), choice, LOWEST)


def largest(choice: Tensor, count: int) -> Tensor:
    """Positions of the ``count`` largest entries of each row, ties to the lowest position."""
    return torch.sort(choice, dim=-1, descending=True, stable=True).indices[:, :count]


def weigh(weights: Tensor, renormalize: bool, factor: float) -> Tensor:
    """Divide weights by their sum (in float64, rounded to float32), then multiply by ``factor``."""
    if renormalize:
        total = weights.double().sum(-1, keepdim=True).float()
        weights = weights / torch.where(total > 0, total, 1.0)
    return (weights * factor).contiguous()


def fused_topk(
    gating_output: Tensor,
    e_score_correction_bias: Tensor | None,
    topk: int,
    renormalize: bool,
    scoring_func: str,
    routed_scaling_factor: float,
) -> tuple[Tensor, Tensor]:
    """Select on score (plus bias); weights are the unbiased scores."""
    score = scores(gating_output, scoring_func)
    ids = largest(biased(score, e_score_correction_bias), topk)
    weights = weigh(score.gather(-1, ids), renormalize, routed_scaling_factor)
    return weights, ids.to(torch.int32).contiguous()


def grouped_topk(
    gating_output: Tensor,
    e_score_correction_bias: Tensor | None,
    topk: int,
    renormalize: bool,
    scoring_func: str,
    routed_scaling_factor: float,
    num_expert_group: int,
    topk_group: int,
) -> tuple[Tensor, Tensor]:
    """`fused_topk` among the experts of the best groups."""
    score = scores(gating_output, scoring_func)
    choice = biased(score, e_score_correction_bias)
    members = choice.unflatten(-1, (num_expert_group, -1))
    best = 1 if e_score_correction_bias is None else min(2, members.shape[-1])
    group_score = members.topk(best, dim=-1).values.sum(-1).clamp(min=LOWEST)
    kept = torch.zeros_like(group_score, dtype=torch.bool)
    kept = kept.scatter(-1, largest(group_score, topk_group), value=True)
    ids = largest(members.masked_fill(~kept[..., None], -torch.inf).flatten(-2), topk)
    weights = weigh(score.gather(-1, ids), renormalize, routed_scaling_factor)
    return weights, ids.to(torch.int32).contiguous()


def hash_topk(
    gating_output: Tensor,
    input_ids: Tensor,
    table: Tensor,
    renormalize: bool,
    scoring_func: str,
    routed_scaling_factor: float,
) -> tuple[Tensor, Tensor]:
    """Experts from a table by token id; weights are their scores."""
    valid = (input_ids >= 0) & (input_ids < table.shape[0])
    if table.shape[0] == 0:
        table = table.new_full((1, table.shape[1]), -1)
    ids = table[torch.where(valid, input_ids, 0)].long()
    valid = valid[:, None] & (ids >= 0) & (ids < gating_output.shape[1])
    weights = scores(gating_output, scoring_func).gather(-1, torch.where(valid, ids, 0))
    weights = weigh(torch.where(valid, weights, 0.0), renormalize, routed_scaling_factor)
    return weights, torch.where(valid, ids, -1).to(torch.int32).contiguous()


def sparsemixer(gating_output: Tensor, jitter_eps: float) -> tuple[Tensor, Tensor]:
    """The two largest logits; each weight is a softmax over the logits left that are close to it.

    The first choice takes no part in the second softmax.
    """
    logits = gating_output.float()
    finite = logits.isfinite()
    choice = torch.where(finite, logits, LOWEST)
    left = finite  # experts that take part in the softmax
    weights, ids = [], []
    for _ in range(2):
        chosen = largest(choice, 1)
        peak = choice.gather(-1, chosen)
        far = (peak - logits) / logits.abs().clamp(min=peak) > 2 * jitter_eps
        share = (logits.double() - peak.double()).exp()
        total = torch.where(left & ~far, share, 0.0).sum(-1, keepdim=True)
        weights.append(torch.where(total > 0, 1 / total, 0.0))
        ids.append(chosen)
        choice = choice.scatter(-1, chosen, -torch.inf)
        left = left.scatter(-1, chosen, value=False)
    return torch.cat(weights, -1).float(), torch.cat(ids, -1).to(torch.int32)


def topk_backward(
    grad: Tensor,
    gating_output: Tensor,
    topk_ids: Tensor,
    renormalize: bool,
    scoring_func: str,
    routed_scaling_factor: float,
) -> Tensor:
    """The gradient of logits through the weights of the chosen experts, in float64, rounded once.

    The choice has no gradient, whatever bias or groups it was made with. A logit that is not finite
    and a slot without an expert have none either.
    """
    logits, num_experts = gating_output.double(), gating_output.shape[1]
    finite, ids = logits.isfinite(), topk_ids.long()
    valid = (ids >= 0) & (ids < num_experts)
    ids = torch.where(valid, ids, 0)
    score = scores(gating_output, scoring_func).double()
    chosen = score.gather(1, ids).masked_fill(~valid, 0.0)
    grad = grad.double().masked_fill(~valid, 0.0) * routed_scaling_factor
    if renormalize:
        total = chosen.sum(1, keepdim=True)
        total = total.masked_fill(total == 0, 1.0)
        share = chosen / total  # without a positive score all shares are zero
        grad = (grad - (grad * share).sum(1, keepdim=True)) / total
        grad = grad.masked_fill(~valid, 0.0)
    slopes = torch.zeros_like(logits).scatter_add_(1, ids, grad)
    x = logits.masked_fill(~finite, 0.0)
    if scoring_func == "softmax":
        inner = (slopes * score).sum(1, keepdim=True)
        result = score * (slopes - inner)
    elif scoring_func == "sigmoid":
        result = slopes * sigmoid(x) * sigmoid(-x)
    else:
        slope = torch.where(x > 20, 1.0, sigmoid(x))
        result = torch.where(score > 0, slopes * slope / (2 * score), 0.0)
    return result.masked_fill(~finite, 0.0).to(gating_output.dtype)
