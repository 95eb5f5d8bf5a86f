"""The layer in float64, and problems whose weights are stored in a scheme."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_ops.activation import formula
from moe_ops.reference import activation as activations
from moe_ops.reference.slots import local_experts
from moe_ops.scheme import (
    FLOAT8_E4M3_MAX,
    FusedMoEQuantConfig,
    dequantize_weight,
    get_scheme,
    quantize_weight,
)
from moe_ops.testing.problems import Inputs, Problem


def _exact_rows(problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """What both GEMMs of the oracle take, of all slots that are not skipped."""
    parts = list(_experts(problem, inputs.cpu()))
    empty = torch.zeros(0, dtype=torch.float64)
    rows, activated = (torch.cat([empty, *(p[i].flatten() for p in parts)]) for i in (2, 3))
    return rows, activated


def _experts(problem: Problem, inputs: Inputs) -> Iterator[tuple[Tensor, ...]]:
    """Expert by expert in float64: tokens, weights, rows, activated rows, results."""
    x, w1, w2, weights, ids, expert_map, b1, b2 = inputs
    rule = formula(problem.activation)
    expert = local_experts(ids, expert_map, w1.shape[0]).view(ids.shape)
    for e in range(w1.shape[0]):
        token, slot = (expert == e).nonzero(as_tuple=True)
        weight = weights[token, slot, None].double()
        rows = x[token].double() * (weight if problem.on_input else 1)
        product = rows @ w1[e].double().t()
        product = product if b1 is None else product + b1[e].double()
        h = activations.apply(*activations.split(product, rule), rule)
        y = h @ w2[e].double().t()
        yield token, weight, rows, h, y if b2 is None else y + b2[e].double()


def oracle(problem: Problem, inputs: Inputs) -> Tensor:
    """The layer in float64, expert by expert, on the CPU; activations are not quantized.

    Of a quantized problem, ``inputs`` are `Quantized.exact`.
    """
    inputs = inputs.cpu()
    out = inputs.hidden_states.new_zeros(inputs.hidden_states.shape, dtype=torch.float64)
    for token, weight, _, _, y in _experts(problem, inputs):
        out.index_add_(0, token, y if problem.on_input else y * weight)
    return out


class Quantized(NamedTuple):
    """A problem whose weights are stored as its scheme says."""

    inputs: Inputs
    """``w1`` and ``w2`` as they are stored; the biases are in ``config``."""
    config: FusedMoEQuantConfig
    exact: Inputs
    """The numbers that the stored weights stand for (float32): what the oracle is given."""


def quantize_inputs(problem: Problem, inputs: Inputs) -> Quantized:
    """Inputs in the scheme of the problem; static scales are calibrated on these very tokens."""
    scheme = get_scheme(problem.scheme)
    stored = [quantize_weight(w, scheme) for w in (inputs.w1, inputs.w2)]
    exact = inputs
    if scheme.weight is not None:
        w1, w2 = (dequantize_weight(q, scheme) for q in stored)
        exact = inputs._replace(w1=w1, w2=w2)
    rest: dict[str, Any] = {"w1_bias": inputs.w1_bias, "w2_bias": inputs.w2_bias}
    quant = scheme.activation
    if quant is not None and (quant.static or quant.global_scale):
        kind = "gscale" if quant.global_scale else "scale"
        largest = quant.element.largest * (FLOAT8_E4M3_MAX if quant.global_scale else 1)
        for i, rows in enumerate(_exact_rows(problem, exact), 1):
            amax = torch.cat([rows.flatten().abs(), rows.new_full((1,), 0.01)]).amax()
            rest[f"a{i}_{kind}"] = (amax / largest).float().view(1).to(inputs.w1.device)
    config = FusedMoEQuantConfig.from_weights(scheme, *stored, **rest)
    bare = inputs._replace(w1=stored[0].data, w2=stored[1].data, w1_bias=None, w2_bias=None)
    return Quantized(bare, config, exact)
