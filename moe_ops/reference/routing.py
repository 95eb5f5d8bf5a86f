"""Reference of the routing operators."""

from __future__ import annotations

import torch
from torch import Tensor

LOWEST = torch.finfo(torch.float32).min


def scores(logits: Tensor, scoring_func: str) -> Tensor:
    """``(T, E)`` float32 scores; a logit that is not finite scores 0."""
    logits = logits.float()
    finite = logits.isfinite()
    if scoring_func == "sigmoid":
        return torch.where(finite, logits.sigmoid(), 0.0)
    shifted = logits.masked_fill(~finite, -torch.inf)
    peak = shifted.amax(-1, keepdim=True)
    peak = torch.where(peak.isfinite(), peak, 0.0)
    weight = torch.where(finite, (shifted - peak).exp(), 0.0)
    total = weight.sum(-1, keepdim=True)
    return weight / torch.where(total > 0, total, 1.0)


def fused_topk(
    gating_output: Tensor,
    e_score_correction_bias: Tensor | None,
    topk: int,
    renormalize: bool,
    scoring_func: str,
    routed_scaling_factor: float,
) -> tuple[Tensor, Tensor]:
    """Select on score (plus bias), ties to the lowest index; weights are the unbiased scores."""
    score = scores(gating_output, scoring_func)
    choice = score if e_score_correction_bias is None else score + e_score_correction_bias.float()
    choice = torch.where(choice.isfinite(), choice, LOWEST)
    ids = torch.sort(choice, dim=-1, descending=True, stable=True).indices[:, :topk]
    weights = score.gather(-1, ids)
    if renormalize:
        total = weights.sum(-1, keepdim=True)
        weights = weights / torch.where(total > 0, total, 1.0)
    return (weights * routed_scaling_factor).contiguous(), ids.to(torch.int32).contiguous()
