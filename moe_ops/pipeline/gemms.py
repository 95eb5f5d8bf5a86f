"""The two expert GEMMs of a layer in any scheme, over rows that lie in any space."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops import ops
from moe_ops.dispatch.hopper import operand_bytes, packs
from moe_ops.dispatch.portable import quantizes_slots
from moe_ops.dispatch.tiles import direct_slots
from moe_ops.dispatch.tuned import name_and_arch
from moe_ops.pipeline.row_spaces import BatchedRows, SlotRows, always, depends_on_batch, sure
from moe_ops.scheme import FusedMoEQuantConfig, Scheme
from moe_ops.tensors import ExpertWeight, ExpertWeights, Rows


def expert_weights(
    w1: Tensor,
    w2: Tensor,
    config: FusedMoEQuantConfig,
    w1_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
) -> ExpertWeights:
    """Weights together with what a configuration says of them."""
    b1, b2 = config.biases(w1_bias, w2_bias)
    if config.scheme.weight is None:
        return ExpertWeights(ExpertWeight(w1, b1), ExpertWeight(w2, b2))
    a1, a2 = config.input_scales
    q1, q2 = config.weights(w1, w2)
    first, second = q1.global_scale, q2.global_scale
    quant = config.scheme.activation
    if quant is not None and quant.global_scale:
        first, second = _factor(first, a1), _factor(second, a2)
    return ExpertWeights(
        ExpertWeight(w1, b1, q1.scale, q1.zero_point, first),
        ExpertWeight(w2, b2, q2.scale, q2.zero_point, second),
        a1,
        a2,
    )


def _factor(global_scale: Tensor | None, of_rows: Tensor | None) -> Tensor | None:
    """What multiplies a product: the global scales of both operands."""
    if global_scale is None or of_rows is None:
        return global_scale
    return global_scale.float() * of_rows.float().reshape(())


def stored(
    rows: Rows, weights: ExpertWeights, space: SlotRows | BatchedRows, scheme: Scheme
) -> Rows:
    """The input of the first GEMM; rows whose quantization was left to the experts have it now."""
    return rows if rows.scale is not None else quantized(rows.data, weights.a1_scale, space, scheme)


def quantized(
    x: Tensor, scale: Tensor | None, space: SlotRows | BatchedRows, scheme: Scheme
) -> Rows:
    """Rows as a GEMM takes them: as they are where the scheme or the GEMM says so.

    ``scale``: the given one.
    """
    if scheme.activation is None:
        return Rows(x)
    if isinstance(space, SlotRows) and _on_the_way(x, space, scheme):
        return Rows(x, scale)
    return space.quantize(x, scale, scheme.activation)


def _on_the_way(x: Tensor, space: SlotRows, scheme: Scheme) -> bool:
    """Whether the operator of a GEMM quantizes its rows, which saves a pass.

    Where slots are known to be few: if its kernel of few slots does so. Where they are known to be
    many: if it packs rows that are its alone (not a token's, which several slots read). Else rows
    are quantized before, so that they are not held in both forms. Where their number is a symbol,
    nobody may ask, and the operator decides: it takes such rows in any number.
    """
    quant, (_, ids, _) = scheme.activation, space.tiles
    one_tile = len(space.row_tiles) == 1
    if quant is None or scheme.decoded or depends_on_batch(quant) or one_tile or ids is None:
        return False
    tokens, top_k = ids.shape
    slots, experts = tokens * top_k, space.num_local_experts
    few = direct_slots(experts)
    if always(slots <= few):
        # Hopper's kernels of one token quantize, and the operator does where they do not serve.
        alone = always(tokens == 1) and operand_bytes(scheme) == 1
        hoppers = alone and name_and_arch(x.device)[1] == 90
        return hoppers or quantizes_slots(quant, x.shape[-1], space.row_tiles)
    if not always(sure(tokens) * top_k > few):
        return True
    # Not asked of a compiler, for which numbers may be symbols.
    own = not torch.compiler.is_compiling() and x.shape[0] == slots
    return own and packs(scheme, slots, experts)


def gemm(
    rows: Rows,
    weight: ExpertWeight,
    space: SlotRows | BatchedRows,
    top_k: int,
    scheme: Scheme,
    dtype: torch.dtype,
) -> Tensor:
    """``rows[s // top_k] @ w[e].T + bias[e]`` for every row s of the plan, in ``dtype``."""
    tiles = space.tiles
    if scheme.weight is None:
        return ops.expert_gemm(
            rows.data,
            weight.data,
            weight.bias,
            None,
            None,
            *tiles,
            space.row_tiles,
            top_k,
            space.expert_order,
        )
    if scheme.activation is None:
        return ops.weight_only_gemm(
            rows.data,
            weight.data,
            weight.scale,
            weight.zero_point,
            weight.global_scale,
            weight.bias,
            None,
            *tiles,
            space.row_tiles,
            top_k,
            scheme.name,
        )
    multiply = ops.decoded_gemm if scheme.decoded else ops.scaled_gemm
    return multiply(*_scaled(rows, weight, space, top_k, scheme, dtype))


def sums_at_once(space: SlotRows, scheme: Scheme) -> bool:
    """Whether the second GEMM and the sum are one operator: where there may be one token only.

    Else they are two, and the rows in are gone before the tokens are allocated.
    """
    _, ids, _ = space.tiles
    return (
        operand_bytes(scheme) is not None and ids is not None and not always(sure(ids.shape[0]) > 1)
    )


def gemm_sum(
    rows: Rows,
    weight: ExpertWeight,
    space: SlotRows,
    topk_weights: Tensor | None,
    scheme: Scheme,
    dtype: torch.dtype,
) -> Tensor:
    """`gemm` with each token's weighted sum."""
    return ops.gemm_sum(
        *rows,
        weight.data,
        weight.scale,
        weight.bias,
        topk_weights,
        *space.tiles,
        space.row_tiles,
        scheme.name,
        None if weight.scale is None else dtype,
        space.expert_order,
    )


def gemm_act(
    rows: Rows,
    weights: ExpertWeights,
    space: SlotRows | BatchedRows,
    top_k: int,
    scheme: Scheme,
    dtype: torch.dtype,
    activation: str,
    input_weights: Tensor | None = None,
) -> Rows:
    """The first GEMM with its activation, as the second GEMM takes it.

    ``input_weights`` (one a slot, of unquantized activations only) scale the product's rows in
    float32.
    """
    h = activated_product(rows, weights.w1, space, top_k, scheme, dtype, activation, input_weights)
    return quantized(h, weights.a2_scale, space, scheme)


def activated_product(
    rows: Rows,
    weight: ExpertWeight,
    space: SlotRows | BatchedRows,
    top_k: int,
    scheme: Scheme,
    dtype: torch.dtype,
    activation: str,
    input_weights: Tensor | None = None,
) -> Tensor:
    """The first GEMM with its activation, rounded to ``dtype`` once."""
    tiles = space.tiles
    if scheme.weight is None:
        return ops.expert_gemm_act(
            rows.data,
            weight.data,
            weight.bias,
            input_weights,
            *tiles,
            space.row_tiles,
            top_k,
            activation,
            space.expert_order,
        )
    if scheme.activation is None:
        return ops.weight_only_gemm_act(
            rows.data,
            weight.data,
            weight.scale,
            weight.zero_point,
            weight.global_scale,
            weight.bias,
            input_weights,
            *tiles,
            space.row_tiles,
            top_k,
            scheme.name,
            activation,
        )
    multiply = ops.decoded_gemm_act if scheme.decoded else ops.scaled_gemm_act
    return multiply(*_scaled(rows, weight, space, top_k, scheme, dtype), activation)


def activated(
    product: Tensor,
    weights: ExpertWeights,
    space: SlotRows | BatchedRows,
    scheme: Scheme,
    activation: str,
) -> Rows:
    """The activation as a step of its own, on the rounded product of the first GEMM."""
    if scheme.activation is None:
        return Rows(space.activate(product, activation))
    return space.activate_quantize(product, weights.a2_scale, activation, scheme.activation)


def _scaled(
    rows: Rows,
    weight: ExpertWeight,
    space: SlotRows | BatchedRows,
    top_k: int,
    scheme: Scheme,
    dtype: torch.dtype,
) -> tuple:
    """The arguments that the operators of quantized operands share."""
    return (
        rows.data,
        rows.scale,
        weight.data,
        weight.scale,
        *((weight.global_scale,) if scheme.decoded else ()),
        weight.bias,
        *space.tiles,
        space.row_tiles,
        top_k,
        scheme.name,
        dtype,
    )
