"""Reference of the activations, in float32 (in float64 for the oracle)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from moe_ops.activation import Formula, formula


def split(x: Tensor, rule: Formula) -> tuple[Tensor, Tensor | None]:
    """Split the last axis into gate and up; ``(x, None)`` if the formula is not gated."""
    if not rule.gated:
        return x, None
    if rule.interleaved:
        return x[..., 0::2], x[..., 1::2]
    return x.chunk(2, dim=-1)  # type: ignore[return-value]


def sigmoid(x: Tensor) -> Tensor:
    """``1 / (1 + exp(-x))``; `torch.sigmoid` rounds the last elements of a tensor differently."""
    return x.neg().exp_().add_(1).reciprocal_()


def apply(g: Tensor, u: Tensor | None, rule: Formula) -> Tensor:
    """Apply the formula to gate and up, in their dtype."""
    if rule.limit is not None:
        if rule.function == "swiglu":
            g = g.clamp(max=rule.limit)
        u = None if u is None else u.clamp(-rule.limit, rule.limit)
    if rule.function == "swiglu":
        value = g / torch.mul(g, -rule.alpha).exp_().add_(1)
        return value if u is None else value.mul_(u + rule.beta if rule.beta else u)
    if rule.function == "swiglustep":
        value = (g * sigmoid(g)).clamp(max=rule.limit)
    elif rule.function == "situ":
        value = rule.beta * torch.tanh(g / rule.beta) * sigmoid(g)
        if u is not None and rule.linear_beta is not None:
            u = rule.linear_beta * torch.tanh(u / rule.linear_beta)
    elif rule.function == "relu2":
        value = F.relu(g).square()
    else:
        value = F.gelu(g, approximate="tanh" if rule.function == "gelu_tanh" else "none")
    return value if u is None else value * u


def activation(x: Tensor, activation: str) -> Tensor:
    """``(R, 2d)`` or ``(R, d)`` -> ``(R, d)``, computed in float32 and rounded once."""
    rule = formula(activation)
    return apply(*split(x.float(), rule), rule).to(x.dtype).contiguous()
