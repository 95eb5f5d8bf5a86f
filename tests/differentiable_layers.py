"""The layer in plain PyTorch with autograd: exact in float64, or rounded where ours rounds."""

from __future__ import annotations

from typing import Any

import torch
from activation_formulas import FORMULAS, halves
from torch import Tensor

from moe_ops.testing import Inputs, Problem, assert_matches_reference

FLOAT_INPUTS = ("hidden_states", "w1", "w2", "topk_weights", "w1_bias", "w2_bias")
"""Inputs of a layer that have gradients."""


class Rounding(torch.autograd.Function):
    """Round to a dtype, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = dtype
        return x.to(dtype).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.to(ctx.dtype).to(grad.dtype), None


def chosen(inputs: Inputs) -> Tensor:
    """The local expert of each slot, -1 if skipped, in plain Python."""
    local = list(range(len(inputs.w1)))
    if inputs.expert_map is not None:
        local = inputs.expert_map.tolist()
    ids = inputs.topk_ids.flatten().tolist()
    found = [local[i] if 0 <= i < len(local) else -1 for i in ids]
    return torch.tensor(found).view(inputs.topk_ids.shape)


def layer(problem: Problem, inputs: Inputs, dtype: torch.dtype) -> Tensor:
    """The layer in the dtype of ``inputs``, rounded to ``dtype`` where ours rounds."""
    x, w1, w2, weights, _, _, b1, b2 = inputs
    expert = chosen(inputs)

    def rounded(value: Tensor) -> Tensor:
        return value if dtype == value.dtype else Rounding.apply(value, dtype)

    out = torch.zeros_like(x)
    for e in range(len(w1)):
        token, slot = (expert == e).nonzero(as_tuple=True)
        weight, rows = weights[token, slot, None], rounded(x[token])
        product = rows @ w1[e].t() * (weight if problem.on_input else 1)
        product = rounded(product if b1 is None else product + b1[e])
        h = FORMULAS[problem.activation](*halves(product, problem.activation))
        y = rounded(h) @ w2[e].t()
        y = rounded(y if b2 is None else y + b2[e])
        out = out.index_add(0, token, y if problem.on_input else y * weight)
    return rounded(out)


def leaves(inputs: Inputs, names: Any = FLOAT_INPUTS) -> Inputs:
    """The same values, of which the named ones require grad."""
    given = {n: getattr(inputs, n) for n in FLOAT_INPUTS if getattr(inputs, n) is not None}
    return inputs._replace(
        **{n: x.detach().clone().requires_grad_(n in names) for n, x in given.items()}
    )


def gradients(out: Tensor, inputs: Inputs, grad: Tensor) -> dict[str, Tensor]:
    """Gradients of what requires grad; zeros of what ``out`` does not depend on."""
    asked = [n for n in FLOAT_INPUTS if getattr(inputs, n) is not None]
    asked = [n for n in asked if getattr(inputs, n).requires_grad]
    tensors = [getattr(inputs, n) for n in asked]
    found = torch.autograd.grad(out, tensors, grad.to(out.dtype), allow_unused=True)
    zeros = (torch.zeros_like(x) if g is None else g for g, x in zip(found, tensors, strict=True))
    return dict(zip(asked, zeros, strict=True))


def in_dtype(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """Float inputs on the CPU in another dtype."""
    inputs = inputs.cpu()
    given = {n: getattr(inputs, n) for n in FLOAT_INPUTS if getattr(inputs, n) is not None}
    return inputs._replace(**{n: x.to(dtype) for n, x in given.items()})


def assert_gradients(
    problem: Problem, inputs: Inputs, found: dict[str, Tensor], grad: Tensor
) -> None:
    """Every gradient is as close to float64's as the roundings of ours allow.

    Budgets are per token, per expert, and for router weights for all of them.
    """
    both = []
    for dtype in (torch.float64, torch.float32):
        given = leaves(in_dtype(inputs, dtype), found)
        out = layer(problem, given, dtype if dtype == torch.float64 else problem.dtype)
        both.append(gradients(out, given, grad.cpu()))
    exact, reference = both
    for name, actual in found.items():
        groups = {"w1": len(actual), "w2": len(actual), "topk_weights": 1}.get(name)
        if not actual.numel():
            assert actual.shape == exact[name].shape
            continue
        rows = (groups, -1) if groups else actual.shape
        assert actual.dtype == getattr(inputs, name).dtype
        near = reference[name].to(actual.dtype)
        assert_matches_reference(
            actual.cpu().contiguous().view(rows), exact[name].reshape(rows), near.reshape(rows)
        )
