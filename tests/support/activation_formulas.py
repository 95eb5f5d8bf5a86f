"""Every activation as a formula, written out once more: differentiable, in any float dtype."""

import math

import torch


def sigmoid(x):
    return 1 / (1 + torch.exp(-x))


def gelu(x):
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def gelu_tanh(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def clamp(x, least, most):
    """`torch.clamp` with the derivative 1 at bounds, where torch 2.14's has 0."""
    inside = (least <= x) & (x <= most)
    return torch.where(inside, x, x.detach().clamp(least, most))


def swiglu(g, u, limit=math.inf, alpha=1.0, beta=0.0):
    g, u = clamp(g, -math.inf, limit), clamp(u, -limit, limit)
    return g * sigmoid(alpha * g) * (u + beta)


def swiglustep(g, u, limit):
    return clamp(g * sigmoid(g), -math.inf, limit) * clamp(u, -limit, limit)


def situ(g, u, beta, linear_beta=None):
    up = u if linear_beta is None else linear_beta * torch.tanh(u / linear_beta)
    return beta * torch.tanh(g / beta) * sigmoid(g) * up


FORMULAS = {
    "silu": swiglu,
    "silu(clamp_limit=2.0)": lambda g, u: swiglu(g, u, 2.0),
    "silu(alpha=1.702,beta=1.0)": lambda g, u: swiglu(g, u, alpha=1.702, beta=1.0),
    "gelu": lambda g, u: gelu(g) * u,
    "gelu_tanh": lambda g, u: gelu_tanh(g) * u,
    "relu2": lambda g, u: g.clamp(min=0) ** 2 * u,
    "swigluoai": lambda g, u: swiglu(g, u, 7.0, 1.702, 1.0),
    "swigluoai(clamp_limit=1.5,alpha=1.1,beta=0.5)": lambda g, u: swiglu(g, u, 1.5, 1.1, 0.5),
    "swigluoai_uninterleave(clamp_limit=7.0,alpha=1.702,beta=1.0)": lambda g, u: swiglu(
        g, u, 7.0, 1.702, 1.0
    ),
    "swigluoai_uninterleave(clamp_limit=2.0)": lambda g, u: swiglu(g, u, 2.0),
    "swiglustep": lambda g, u: swiglustep(g, u, 7.0),
    "swiglustep(clamp_limit=0.5)": lambda g, u: swiglustep(g, u, 0.5),
    "situ(beta=1.5,linear_beta=2.0)": lambda g, u: situ(g, u, 1.5, 2.0),
    "situ(beta=3.0)": lambda g, u: situ(g, u, 3.0),
    "silu_no_mul": lambda g: g * sigmoid(g),
    "gelu_no_mul": gelu,
    "gelu_tanh_no_mul": gelu_tanh,
    "relu2_no_mul": lambda g: g.clamp(min=0) ** 2,
}


def halves(x, key):
    if key.split("(")[0].endswith("_no_mul"):
        return (x,)
    if key.startswith("swigluoai") and "uninterleave" not in key:
        return x[:, 0::2], x[:, 1::2]
    return x[:, : x.shape[1] // 2], x[:, x.shape[1] // 2 :]
