"""A reference of the layer in float32 with the roundings of an implementation."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe_ops.activation import Formula, formula
from moe_ops.reference import activation as activations
from moe_ops.reference import weight_and_reduce
from moe_ops.reference.quantize import quantize_rows
from moe_ops.reference.slots import local_experts
from moe_ops.scheme import FusedMoEQuantConfig, Quant, as_scheme, dequantize_rows, dequantize_weight
from moe_ops.testing.problems import Inputs, Problem


class Roundings(NamedTuple):
    """Where an implementation rounds, and which rows share a dynamic per-tensor scale.

    The defaults are as in `moe_ops.fused_experts`.
    """

    before_activation: bool = False
    """Whether the product of GEMM 1 is rounded before the activation."""
    weighted_rows: bool = False
    """Whether rows times router weights are rounded, also if they are not quantized."""
    per_expert: bool = False
    """Whether each expert has its own per-tensor scale (Batched format); else all rows share it."""
    chunk_size: int | None = None
    """Number of tokens that share a scale of the intermediate; None: all."""


def reference_experts(
    problem: Problem,
    inputs: Inputs,
    config: FusedMoEQuantConfig | None = None,
    roundings: Roundings = Roundings(),  # noqa: B008 (immutable)
) -> Tensor:
    """The layer in float32 with the roundings of an implementation, row by row.

    The reference shares no step with the pipelines: rows are quantized and dequantized, and each
    expert's product is one `matmul`. It runs on the device of the inputs, so that sums have that
    device's order.

    Args:
        problem: the problem of the inputs.
        inputs: as passed to the layer; for a quantized problem `Quantized.inputs`.
        config: the configuration of a quantized problem.
        roundings: the implementation's roundings.

    Returns:
        ``(T, H)`` in the dtype of the tokens, on their device.

    Raises:
        ValueError, NotImplementedError: not a scheme, as `get_scheme`.
    """
    scheme = as_scheme(problem.scheme)
    config = FusedMoEQuantConfig(scheme) if config is None else config
    quant, rule = scheme.activation, formula(problem.activation)
    x, _, _, weights, ids, expert_map, b1, b2 = inputs
    w1, w2 = _rounded_weights(inputs, config)
    b1, b2 = (config.w1_bias if b1 is None else b1), (config.w2_bias if b2 is None else b2)
    (tokens, k), dtype = ids.shape, x.dtype
    expert = local_experts(ids, expert_map, w1.shape[0])
    token = torch.arange(tokens, device=x.device).repeat_interleave(k)
    used = expert >= 0
    weight = weights.flatten()[:, None].float()
    sharing = expert if roundings.per_expert else torch.zeros_like(expert)
    rows = torch.where(used[:, None], x[token].float(), 0)
    late = problem.on_input and quant is None and not roundings.weighted_rows
    if problem.on_input and not late:
        rows = torch.where(used[:, None], rows * weight, 0)
        rows = rows.to(dtype).float() if quant is None else rows
    a1_scale, a2_scale = config.input_scales
    rows = _as_stored(rows, a1_scale, quant, sharing, used)
    product = _products(rows, w1, expert)
    product = product * weight if late else product
    product = product if b1 is None else product + b1.float()[expert]
    if roundings.before_activation:
        product = product.to(dtype).float()
    h = _apply_activation(product, rule).to(dtype).float()
    if roundings.chunk_size is not None:
        sharing = token // roundings.chunk_size
    h = _as_stored(h, a2_scale, quant, sharing, used)
    y = _products(h, w2, expert)
    y = (y if b2 is None else y + b2.float()[expert]).to(dtype).view(tokens, k, x.shape[1])
    on_output = None if problem.on_input else weights
    return weight_and_reduce.moe_fused_mul_sum(y, on_output, ids, expert_map, None, w1.shape[0])


def _rounded_weights(inputs: Inputs, config: FusedMoEQuantConfig) -> tuple[Tensor, Tensor]:
    """The dequantized weights in float32, rounded as the implementation rounds them."""
    stored, scheme = config.weights(inputs.w1, inputs.w2), config.scheme
    # Quantized rows take dequantized weights exactly; else weights are rounded to the rows' dtype.
    dtype = torch.float32 if scheme.activation is not None else inputs.hidden_states.dtype
    w1, w2 = (dequantize_weight(q, scheme, dtype).float() for q in stored)
    return w1, w2


def _apply_activation(product: Tensor, rule: Formula) -> Tensor:
    return activations.apply(*activations.split(product, rule), rule)


def _products(rows: Tensor, w: Tensor, expert: Tensor) -> Tensor:
    """Each row times the weight of its expert; zeros without an expert."""
    out = rows.new_zeros(len(rows), w.shape[1])
    for e in range(w.shape[0]):
        mine = expert == e
        out[mine] = rows[mine] @ w[e].t()
    return out


def _as_stored(
    rows: Tensor, scale: Tensor | None, quant: Quant | None, sharing: Tensor, used: Tensor
) -> Tensor:
    """Rows quantized and dequantized."""
    if quant is None:
        return rows
    out = torch.zeros_like(rows)
    shares = sharing if quant.per_tensor and scale is None else torch.zeros_like(sharing)
    for share in shares[used].unique():
        mine = used & (shares == share)
        part = rows[mine][None]
        q, each = quantize_rows(part, scale, used[mine][None], quant)
        out[mine] = dequantize_rows(q, each, quant)[0]
    return out * scale.float() if quant.global_scale and scale is not None else out
