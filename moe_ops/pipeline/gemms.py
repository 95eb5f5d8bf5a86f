"""The two expert GEMMs of a layer, for any scheme and any row space."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_ops import ops
from moe_ops.dispatch import tuned
from moe_ops.dispatch.device import Device, device_facts, row_tile_facts
from moe_ops.dispatch.early import EARLY
from moe_ops.dispatch.gemm_plan import plan_gemm
from moe_ops.dispatch.operands import layer_operands, sums_one_token
from moe_ops.dispatch.problem import problem_of
from moe_ops.dispatch.row_tiles import routed_among, row_tile_rule
from moe_ops.dispatch.tiles import direct_slots
from moe_ops.pipeline.row_spaces import BatchedRows, SlotRows, always, sure
from moe_ops.scheme import FusedMoEQuantConfig, Scheme, get_scheme, is_packed
from moe_ops.scheme.packed import widens_rows
from moe_ops.tensors import ExpertWeight, ExpertWeights, Rows


def expert_weights(
    w1: Tensor,
    w2: Tensor,
    config: FusedMoEQuantConfig,
    biases: tuple[Tensor | None, Tensor | None] | None = None,
) -> ExpertWeights:
    """Collect the weights with the scales and biases of ``config``, or with ``biases``."""
    if config.on_host is not None:
        return config.on_host
    b1, b2 = (config.w1_bias, config.w2_bias) if biases is None else biases
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
    """The factor of a product: the global scales of both operands, multiplied."""
    if global_scale is None or of_rows is None:
        return global_scale
    return global_scale.float() * of_rows.float().reshape(())


def quantized(
    x: Tensor,
    scale: Tensor | None,
    weight: ExpertWeight,
    space: SlotRows | BatchedRows,
    scheme: Scheme,
    top_k: int = 1,
    activation: str = "",
) -> Rows:
    """Quantize rows unless the scheme keeps them or the GEMM op quantizes them itself.

    The GEMM's plan says whether the op does, which saves a pass. If the op would gather the rows,
    each row must belong to one slot, not to a token whose row several slots read. Rows that are
    dequantized are left to a kernel for a packed weight only, which wants them in bf16. Under a
    compiler sizes may be symbolic and there is no plan to ask, so the op decides when it runs,
    unless there are certainly many slots. (With many slots, the rows before and after quantization
    would be held at the same time.)

    Args:
        x: rows that are not quantized.
        scale: the static scale, or None.
        weight: the weight of the GEMM.
        space: the row space.
        scheme: the layer's scheme.
        top_k: slots that read the same row.
        activation: key of the activation of the product.
    """
    quant, ids = scheme.activation, space.tiles.topk_ids
    if quant is None:
        return Rows(x)
    # Not on a CPU: references have no plan.
    widens = not x.is_cpu and is_packed(weight.data) and widens_rows(scheme)
    if (
        ids is None
        or not isinstance(space, SlotRows)
        or space.batch_invariant
        or quant.of_all_rows
        or (scheme.dequantizes_both and not widens)
    ):
        return space.quantize(x, scale, quant)
    tokens, k = ids.shape
    if torch.compiler.is_compiling() or type(tokens * k) is not int:
        # Rows that are dequantized are quantized into bf16 in one pass at any load.
        each_slot = scheme.dequantizes_both and top_k == 1
        in_gemm = each_slot or not always(sure(tokens) * k > direct_slots(space.num_local_experts))
    else:
        asked = _Asked(
            (*weight.data.shape[:2], x.shape[1]),
            scheme.key,
            x.dtype,
            (tokens, k),
            None if space.tiles.expert_map is None else space.tiles.expert_map.shape[0],
            top_k=top_k,
            activation=activation,
            fragments=widens,
            each_slot=len(x) == tokens * k,
        )
        in_gemm = _quantizes(asked, row_tile_facts(x.device), device_facts(x.device), tuned.TABLES)
    return Rows(x, scale) if in_gemm else space.quantize(x, scale, quant)


class _Asked(NamedTuple):
    """A GEMM of a routing whose rows are not quantized yet; see `layer_operands`."""

    weight: tuple[int, int, int]
    scheme: str
    dtype: torch.dtype
    routed: tuple[int, int]
    """Tokens and their slots."""
    routed_experts: int | None
    """The length of the map; None: without one."""
    top_k: int
    activation: str
    fragments: bool
    each_slot: bool
    """Whether each row belongs to one slot."""


@lru_cache(maxsize=8192)
def _quantizes(
    asked: _Asked, row_tile: tuple[int, int | None], device: Device, _: tuned.Tables
) -> bool:
    """Whether the plan of a GEMM quantizes its rows, on a device with these tuned tables."""
    tokens, k = asked.routed
    rule = row_tile_rule(asked.scheme, asked.dtype.itemsize, *row_tile, False)
    operands = layer_operands(
        asked.weight,
        get_scheme(asked.scheme),
        asked.dtype,
        routed_among(rule, asked.routed_experts),
        tokens * k,
        num_tokens=tokens,
        fragments=asked.fragments,
        activation=asked.activation,
        top_k=asked.top_k,
    )
    plan = plan_gemm(problem_of(operands), device)
    return plan.quantizes_rows and (not plan.gathered_rows or asked.each_slot)


def gemm(
    rows: Rows,
    weight: ExpertWeight,
    space: SlotRows | BatchedRows,
    top_k: int,
    scheme: Scheme,
    dtype: torch.dtype,
    activation: str = "",
    topk_weights: Tensor | None = None,
    operator: Any = None,
) -> Any:
    """``f(topk_weights[s] * rows[s // top_k] @ w[e].T + bias[e])`` for every row s of the plan.

    The result is rounded to ``dtype`` once. ``topk_weights`` (only with rows that are not
    quantized) multiply the product in float32; ``activation`` is the key of f. The ``operator``
    is `expert_product`, or `activated_product`, which also returns the product before f: in slot
    order, rounded to ``dtype``.
    """
    return (operator or ops.expert_product)(
        rows.data,
        rows.scale,
        [*weight],
        topk_weights,
        [*space.tiles],
        top_k,
        scheme.key,
        dtype,
        activation,
        space.expert_order and scheme.weight is None,
        space.batch_invariant,
    )


def sums_at_once(space: SlotRows | BatchedRows, weight: ExpertWeight, scheme: Scheme) -> bool:
    """Whether the second GEMM and the weighted sum are one operator: if T may be 1.

    Otherwise they are two operators, which frees the input rows before allocating the output.
    """
    _, ids, _ = space.tiles
    if ids is None:
        return False
    tokens = ids.shape[0]
    many = always(sure(tokens) > 1) if torch.compiler.is_compiling() else tokens > 1
    return not many and (sums_one_token(scheme) or is_packed(weight.data))


_APART: ContextVar[bool] = ContextVar("apart", default=False)


@contextmanager
def apart() -> Iterator[None]:
    """Context manager: call the operator of `gemm_then_sum` as compiled graphs do."""
    token = _APART.set(True)
    try:
        yield
    finally:
        _APART.reset(token)


def gemm_then_sum(
    rows: Rows,
    weight: ExpertWeight,
    space: SlotRows | BatchedRows,
    topk_weights: Tensor | None,
    scheme: Scheme,
    dtype: torch.dtype,
    *,
    early: bool = False,
) -> Tensor:
    """`gemm`, followed by the weighted sum over each token's slots.

    ``early``: all that the operator reads, except its rows, was written before the first GEMM was
    called. The operator is told (see `EARLY`) unless the call is traced: a compiler may run other
    kernels between the two.
    """
    product = partial(
        ops.expert_product_sum,
        rows.data,
        rows.scale,
        [*weight],
        topk_weights,
        [*space.tiles],
        scheme.key,
        dtype,
        space.expert_order,
        space.batch_invariant,
    )
    if not early or torch.compiler.is_compiling() or _APART.get():
        return product()
    token = EARLY.set(True)
    try:
        return product()
    finally:
        EARLY.reset(token)


def activated(
    product: Tensor,
    weights: ExpertWeights,
    space: SlotRows | BatchedRows,
    scheme: Scheme,
    activation: str,
) -> Rows:
    """Apply the activation in a separate step, to the rounded product of the first GEMM."""
    if scheme.activation is None:
        return Rows(space.activate(product, activation))
    return space.activate_quantize(product, weights.a2_scale, activation, scheme.activation)
