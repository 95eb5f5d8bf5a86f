"""The layer in float64 (the oracle), and problems with quantized weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_ops.activation import formula
from moe_ops.reference import activation as activations
from moe_ops.scheme import (
    FusedMoEQuantConfig,
    as_scheme,
    dequantize_weight,
    quantize_weight,
)
from moe_ops.testing.bounds import Bounded
from moe_ops.testing.problems import Inputs, Problem
from moe_ops.testing.references import Roundings


def _exact_rows(problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """The inputs of both GEMMs in the oracle, for all slots that are not skipped."""
    parts = list(_experts(problem, inputs.cpu()))
    empty = torch.zeros(0, dtype=torch.float64, device="cpu")
    rows, activated = (torch.cat([empty, *(p[i].flatten() for p in parts)]) for i in (2, 3))
    return rows, activated


def _experts(problem: Problem, inputs: Inputs) -> Iterator[tuple[Tensor, ...]]:
    """Per expert in float64: tokens, router weights, rows, activated rows, results."""
    x, w1, w2, weights, ids, expert_map, b1, b2 = inputs
    rule = formula(problem.activation)
    expert = _chosen(ids, expert_map, len(w1))
    for e in range(w1.shape[0]):
        token, slot = (expert == e).nonzero(as_tuple=True)
        weight = weights[token, slot, None].double()
        rows = x[token].double() * (weight if problem.on_input else 1)
        product = rows @ w1[e].double().t()
        product = product if b1 is None else product + b1[e].double()
        h = activations.apply(*activations.split(product, rule), rule)
        y = h @ w2[e].double().t()
        yield token, weight, rows, h, y if b2 is None else y + b2[e].double()


def _chosen(ids: Tensor, expert_map: Tensor | None, num_local_experts: int) -> Tensor:
    """The local expert of each slot, -1 if skipped; in plain Python, independent of the library."""
    local = list(range(num_local_experts)) if expert_map is None else expert_map.tolist()

    def place(i: int) -> int:
        e = local[i] if 0 <= i < len(local) else -1
        return e if 0 <= e < num_local_experts else -1

    chosen = [place(i) for i in ids.flatten().tolist()]
    return torch.tensor(chosen, dtype=torch.int64, device=ids.device).view(ids.shape)


def oracle(problem: Problem, inputs: Inputs) -> Tensor:
    """The layer in float64, expert by expert, on the CPU; activations are not quantized.

    For a quantized problem pass `Quantized.exact` as ``inputs``.

    Returns:
        float64 ``(T, H)`` on the CPU.
    """
    inputs = inputs.cpu()
    out = inputs.hidden_states.new_zeros(inputs.hidden_states.shape, dtype=torch.float64)
    for token, weight, _, _, y in _experts(problem, inputs):
        out.index_add_(0, token, y if problem.on_input else y * weight)
    return out


def bounded_oracle(
    problem: Problem,
    inputs: Inputs,
    config: FusedMoEQuantConfig | None = None,
    roundings: Roundings = Roundings(),  # noqa: B008 (immutable)
) -> Bounded:
    """The oracle, with a bound on the error of an implementation with the given ``roundings``.

    Use it instead of `oracle` if the reference may share a bug with the tested implementation: a
    reference outside of the bound is rejected.

    Args:
        problem: the problem of the inputs.
        inputs: as for `oracle`; for a quantized problem `Quantized.exact`.
        config: the configuration, for problems with static or global activation scales.
        roundings: the implementation's roundings, as in `reference_experts`.

    Returns:
        ``(T, H)`` on the CPU; its ``value`` equals the oracle's.

    Raises:
        ValueError, NotImplementedError: not a scheme, as `get_scheme`.
    """
    scheme, rule = as_scheme(problem.scheme), formula(problem.activation)
    quant = scheme.activation
    x, w1, w2, weights, ids, expert_map, b1, b2 = inputs.cpu()
    (tokens, k), dtype = ids.shape, x.dtype
    input_scales = (None, None) if config is None else config.input_scales
    stored = dtype if scheme.weight is not None and quant is None else None
    expert = _chosen(ids, expert_map, len(w1)).flatten()
    used = (expert >= 0)[:, None]
    weight = torch.where(used, weights.view(-1, 1), 0)
    rows = Bounded.exactly(torch.where(used, x.repeat_interleave(k, 0), 0))
    late = problem.on_input and quant is None and not roundings.weighted_rows
    if problem.on_input and not late:
        rows = rows.times(weight)
        rows = rows.rounded(dtype) if quant is None else rows
    product = rows.quantized(quant, input_scales[0]).products(w1, expert, stored)
    product = product.times(weight) if late else product
    product = product if b1 is None else product.plus(b1[expert])
    product = product.rounded(dtype) if roundings.before_activation else product
    h = product.activated(rule).rounded(dtype).quantized(quant, input_scales[1])
    y = h.products(w2, expert, stored)
    y = (y if b2 is None else y.plus(b2[expert])).rounded(dtype).unflatten(tokens, k)
    weight = used.double() if problem.on_input else weight
    return y.weighted_sum(weight.view(tokens, k)).rounded(dtype)


class Quantized(NamedTuple):
    """A problem with weights quantized to its scheme."""

    inputs: Inputs
    """The inputs with stored ``w1`` and ``w2``; the biases are in ``config``."""
    config: FusedMoEQuantConfig
    exact: Inputs
    """The inputs with dequantized weights (float32), for the oracle."""


def quantize_inputs(problem: Problem, inputs: Inputs) -> Quantized:
    """Quantize inputs to the problem's scheme; static scales are calibrated on the same tokens.

    Returns:
        The stored inputs, their configuration, and the exact numbers that they stand for.

    Raises:
        ValueError, NotImplementedError: not a scheme, as `get_scheme`.
    """
    scheme = as_scheme(problem.scheme)
    stored = [quantize_weight(w, scheme) for w in (inputs.w1, inputs.w2)]
    exact = inputs
    if scheme.weight is not None:
        w1, w2 = (dequantize_weight(q, scheme) for q in stored)
        exact = inputs._replace(w1=w1, w2=w2)
    rest: dict[str, Any] = {"w1_bias": inputs.w1_bias, "w2_bias": inputs.w2_bias}
    if names := scheme.input_scale_names:
        for name, rows in zip(names, _exact_rows(problem, exact), strict=True):
            amax = torch.cat([rows.flatten().abs(), rows.new_full((1,), 0.01)]).amax()
            scale = amax / scheme.quants[0].largest
            rest[name] = scale.float().view(1).to(inputs.w1.device)
    config = FusedMoEQuantConfig.from_weights(scheme, *stored, **rest)
    bare = inputs._replace(w1=stored[0].data, w2=stored[1].data, w1_bias=None, w2_bias=None)
    return Quantized(bare, config, exact)
