"""Reference of the activations and their derivatives, in float32 (in float64 for the oracle)."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from moe_ops.activation import Formula, formula
from moe_ops.reference.slots import local_experts


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


def gelu_argument(x: Tensor) -> Tensor:
    """The argument of the tanh of ``gelu_tanh``."""
    return math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)


def gelu_bend(x: Tensor, rule: Formula) -> Tensor:
    """The t of ``gelu(x) = x / 2 * (1 + t)``; `F.gelu` rounds the last elements differently."""
    if rule.function == "gelu_tanh":
        return torch.tanh(gelu_argument(x))
    return torch.erf(x * math.sqrt(0.5))


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
        value = gelu_bend(g, rule).add_(1).mul_(0.5).mul_(g)
    return value if u is None else value * u


def activation(x: Tensor, activation: str) -> Tensor:
    """``(R, 2d)`` or ``(R, d)`` -> ``(R, d)``, computed in float32 and rounded once."""
    rule = formula(activation)
    return apply(*split(x.float(), rule), rule).to(x.dtype).contiguous()


def gate_derivative(g: Tensor, rule: Formula) -> tuple[Tensor, Tensor]:
    """The function of the gate, and its derivative; a clamped gate has the derivative 0."""
    if rule.function == "swiglu":
        x = g if rule.limit is None else g.clamp(max=rule.limit)
        s = sigmoid(rule.alpha * x)
        slope = s + rule.alpha * x * s * sigmoid(-rule.alpha * x)
        return x * s, slope if rule.limit is None else slope.masked_fill(g > rule.limit, 0.0)
    if rule.function == "swiglustep":
        s = sigmoid(g)
        value = g * s
        limit = math.inf if rule.limit is None else rule.limit
        slope = (s + value * sigmoid(-g)).masked_fill(value > limit, 0.0)
        return value.clamp(max=rule.limit), slope
    if rule.function == "situ":
        t, s = torch.tanh(g / rule.beta), sigmoid(g)
        return rule.beta * t * s, s * (1 - t * t) + rule.beta * t * s * sigmoid(-g)
    if rule.function == "relu2":
        x = F.relu(g)
        return x * x, 2 * x
    t = gelu_bend(g, rule)
    half = 0.5 * (1 + t)
    if rule.function == "gelu_tanh":
        # (1 + tanh(z / 2)) / 2 is sigmoid(z), in whose tail nothing cancels.
        z, inner = 2 * gelu_argument(g), math.sqrt(8 / math.pi) * (1 + 3 * 0.044715 * g * g)
        s = sigmoid(z)
        return g * half, s + g * s * sigmoid(-z) * inner
    return g * half, half + g * torch.exp(-0.5 * g * g) / math.sqrt(2 * math.pi)


def up_derivative(u: Tensor, rule: Formula) -> tuple[Tensor, Tensor]:
    """The factor that up makes, and its derivative; up at a bound has the derivative 1."""
    value, slope = u, torch.ones_like(u)
    if rule.limit is not None:
        value = u.clamp(min=-rule.limit, max=rule.limit)
        slope = slope.masked_fill(u.abs() > rule.limit, 0.0)
    if rule.function == "swiglu":
        value = value + rule.beta
    if rule.linear_beta is not None:
        t = torch.tanh(u / rule.linear_beta)
        value, slope = rule.linear_beta * t, 1 - t * t
    return value, slope


def derivative(x: Tensor, grad: Tensor, rule: Formula) -> tuple[Tensor, Tensor]:
    """The activation of ``x``, and ``grad`` times its derivative, laid out as ``x`` is."""
    g, u = split(x, rule)
    value, slope = gate_derivative(g, rule)
    if u is None:
        return value, grad * slope
    factor, up_slope = up_derivative(u, rule)
    halves = (grad * factor * slope, grad * value * up_slope)
    joined = torch.stack(halves, -1).flatten(-2) if rule.interleaved else torch.cat(halves, -1)
    return value * factor, joined


def moe_activation_backward(
    grad: Tensor,
    x: Tensor,
    topk_weights: Tensor | None,
    topk_ids: Tensor,
    expert_map: Tensor | None,
    num_local_experts: int,
    activation: str,
    activated: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """``w * grad * f'(x)``, ``w * f(x)`` and ``<grad, f(x)>`` of every row, rounded once.

    Rows of skipped slots: zeros.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    skipped = local_experts(topk_ids, expert_map, num_local_experts)[:, None] < 0
    grad, rows = grad.to(wide), x.to(wide)
    value, slopes = derivative(rows, grad, formula(activation))
    products = (value * grad).masked_fill(skipped, 0.0).sum(-1)
    if topk_weights is not None:
        weight = topk_weights.flatten()[:, None].to(wide)
        value, slopes = value * weight, slopes * weight
    value = value.masked_fill(skipped, 0.0) if activated else value[:0]
    slopes = slopes.masked_fill(skipped, 0.0)
    return slopes.to(x.dtype), value.to(x.dtype), products.view(topk_ids.shape)
