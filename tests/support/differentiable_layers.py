"""The layer in plain PyTorch with autograd: exact in float64, or rounded where ours rounds."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from activation_formulas import FORMULAS, halves
from torch import Tensor

from moe_ops.reference.quantize import quantize_rows
from moe_ops.scheme import FusedMoEQuantConfig, Quant, dequantize_rows
from moe_ops.testing import Inputs, Problem, assert_matches_reference

FLOAT_INPUTS = ("hidden_states", "w1", "w2", "topk_weights", "w1_bias", "w2_bias")
"""Inputs of a layer that have gradients."""


class Rounding(torch.autograd.Function):
    """Round to a dtype, forward and backward, or the gradient only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, gradient_only: bool = False) -> Tensor:
        ctx.dtype = dtype
        return x.clone() if gradient_only else x.to(dtype).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.to(ctx.dtype).to(grad.dtype), None, None


def chosen(inputs: Inputs) -> Tensor:
    """The local expert of each slot, -1 if skipped, in plain Python."""
    local = list(range(len(inputs.w1)))
    if inputs.expert_map is not None:
        local = inputs.expert_map.tolist()
    ids = inputs.topk_ids.flatten().tolist()
    found = [local[i] if 0 <= i < len(local) else -1 for i in ids]
    return torch.tensor(found, dtype=torch.int64).view(inputs.topk_ids.shape)


class Stored(torch.autograd.Function):
    """Quantize and dequantize rows; the gradient passes as if nothing had happened."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, scale: Tensor | None, quant: Quant) -> Tensor:
        q, each = quantize_rows(rows[None].float(), scale, torch.ones(1, len(rows)) > 0, quant)
        rows = dequantize_rows(q, each, quant)[0].to(rows.dtype)
        return rows * scale.float() if quant.global_scale and scale is not None else rows

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None, None


class Weighted(torch.autograd.Function):
    """Rows times router weights, whose gradients read the rows before they were rounded."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, unrounded: Tensor) -> Tensor:
        ctx.save_for_backward(weights, unrounded)
        return rows * weights

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        weights, unrounded = ctx.saved_tensors
        return grad * weights, (grad * unrounded).sum(1, keepdim=True), None


class Stages(NamedTuple):
    """What happens to the rows of slots, which have one expert each."""

    dtype: torch.dtype
    expert: Tensor
    config: FusedMoEQuantConfig | None

    @property
    def quant(self) -> Quant | None:
        return None if self.config is None else self.config.scheme.activation

    def rounded(self, value: Tensor) -> Tensor:
        return value if self.dtype == value.dtype else Rounding.apply(value, self.dtype)

    def stored(self, rows: Tensor, gemm: int) -> Tensor:
        """The input rows of a GEMM, 0 or 1, as they are stored."""
        if self.quant is None:
            return rows
        return Stored.apply(rows, self.config.input_scales[gemm], self.quant)

    def product(self, rows: Tensor, w: Tensor, which: Tensor | None = None) -> Tensor:
        which = self.expert if which is None else which
        out = rows.new_zeros(len(rows), w.shape[1])
        for e in range(len(w)):
            mine = (which == e).nonzero().flatten()
            out = out.index_add(0, mine, rows[mine] @ w[e].t())
        return out

    def multiplied(self, rows: Tensor, w: Tensor) -> Tensor:
        """The product of rows that may be stored, with weights that may be dequantized."""
        if self.config is None:
            return self.product(rows, w)
        out = self.product(rows, w.detach().to(self.dtype).to(w.dtype))
        return out if self.quant is None else out + (self.product(rows, w) - out).detach()

    def biased(self, rows: Tensor, bias: Tensor | None, weight: Any = 1.0) -> Tensor:
        return rows if bias is None else rows + bias[self.expert] * weight


def layer(
    problem: Problem,
    inputs: Inputs,
    dtype: torch.dtype,
    config: FusedMoEQuantConfig | None = None,
    lora: tuple[list[Tensor], Tensor] | None = None,
    batched: bool = False,
    rounds_product: bool = True,
) -> Tensor:
    """The layer in the dtype of ``inputs``, rounded to ``dtype`` where our backward pass rounds.

    With a ``config`` weights are given dequantized, and rows are quantized: these are multiplied by
    the weights as they are, gradients and rows that are not quantized by rounded ones. ``lora``:
    scaled factors ``(L, E, ..)`` of both weights, and each token's adapter. ``batched``: the rows
    of experts and their gradients are rounded, as they are in the Batched format, where gradients
    of router weights read these rows. ``rounds_product``: whether they are those of the rounded
    product.
    """
    x, w1, w2, weights, _, _, b1, b2 = inputs
    expert = chosen(inputs)
    token, slot = (expert >= 0).nonzero(as_tuple=True)
    expert, weight = expert[token, slot], weights[token, slot, None]
    stages = Stages(dtype, expert, config)
    rounded, stored, multiplied, biased = (
        stages.rounded, stages.stored, stages.multiplied, stages.biased,
    )  # fmt: skip

    def low(rows: Tensor, at: int) -> Tensor:
        if lora is None:
            return rows.new_zeros(())
        a, b = (rounded(f.flatten(0, 1)) for f in lora[0][at : at + 2])
        adapter, count = lora[1][token], len(lora[0][0])
        pair = torch.where((adapter >= 0) & (adapter < count), adapter * len(w1) + expert, -1)
        rows = Rounding.apply(rows, dtype, True)
        return stages.product(rounded(stages.product(rows, a, pair)), b, pair)

    on_input, on_output = (weight, 1.0) if problem.on_input else (1.0, weight)
    rows = Rounding.apply(x[token] * on_input, dtype, True)
    rows = rounded(rows) if batched else rows
    sums = biased(multiplied(stored(Rounding.apply(rows, dtype, True), 0), w1), b1)
    f = FORMULAS[problem.activation]
    unrounded = rounded(f(*halves(sums, problem.activation)))
    h = rounded(rounded(sums) + low(x[token], 0) * on_input)
    activated = f(*halves(h, problem.activation))
    h = activated + (rounded(activated) - activated).detach()  # its gradient is not rounded
    if batched:
        y = multiplied(rounded(stored(h, 1)), w2)
        if not rounds_product:
            y = y + (multiplied(rounded(stored(unrounded, 1)), w2) - y).detach()
        y = rounded(biased(y, b2)) * on_output
        return rounded(torch.zeros_like(x).index_add(0, token, y))
    # The gradient of this product is that of rows without router weights, and is rounded as such.
    z = stored(h, 1)
    z = rounded(z if problem.on_input else Weighted.apply(z, weight, activated))
    y = biased(multiplied(rounded(z), w2) + low(z, 2), b2, on_output)
    if lora is not None:  # the second product is rounded before and after it is added to
        own = rounded(biased(multiplied(stored(h, 1), w2), b2))
        y = y + (rounded(own + low(h, 2)) * on_output - y).detach()
    return rounded(torch.zeros_like(x).index_add(0, token, y))


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
    problem: Problem,
    inputs: Inputs,
    found: dict[str, Tensor],
    grad: Tensor,
    config: FusedMoEQuantConfig | None = None,
    **rounding: bool,
) -> None:
    """Every gradient is as close to float64's as the roundings of ours allow.

    Budgets are per token, per expert, and for router weights for all of them. With a ``config``
    weights are given dequantized, and the reference quantizes rows.
    ``rounding``: see `layer`.
    """
    both = []
    for dtype in (torch.float64, torch.float32):
        given = leaves(in_dtype(inputs, dtype), found)
        if dtype == torch.float64:
            out = layer(problem, given, dtype)
        else:
            out = layer(problem, given, problem.dtype, config, **rounding)
        both.append(gradients(out, given, grad.cpu()))
    exact, reference = both
    for name, actual in found.items():
        assert actual.dtype == getattr(inputs, name).dtype
        assert_near_exact(actual, exact[name], reference[name], name)


def assert_near_exact(actual: Tensor, exact: Tensor, reference: Tensor, name: str) -> None:
    """Compare one gradient: by rows of tokens, by expert, or router weights as a whole."""
    assert actual.shape == exact.shape
    if not actual.numel():
        return
    lora = name.startswith("lora")
    groups = {"w1": len(actual), "w2": len(actual), "topk_weights": 1}.get(name, lora and 1)
    rows = (groups, -1) if groups else actual.shape
    near = reference.to(actual.dtype)
    assert_matches_reference(
        actual.cpu().contiguous().view(rows), exact.reshape(rows), near.reshape(rows)
    )
