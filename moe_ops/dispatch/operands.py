"""The operands of an expert GEMM as a value, from which `problem_of` makes a problem.

There are two ways to one: `operands_of` describes the tensors of a call, and `layer_operands` the
tensors that a layer will have.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple, cast

import torch

from moe_ops.dispatch.hopper import operand_bytes
from moe_ops.dispatch.row_tiles import gemm_rule
from moe_ops.dispatch.tiles import TileRule
from moe_ops.scheme import UNQUANTIZED, Quant, Scheme
from moe_ops.scheme.packed import PACKED_DTYPE, groups_first, widens_rows
from moe_ops.tensors import ExpertWeight, TensorSpec

GEMMS = ("expert_product", "expert_product.out", "expert_product_sum")
"""The operators that are expert GEMMs of a layer's weights."""
SETTINGS = (
    "top_k", "scheme", "out_dtype", "activation", "expert_order", "batch_invariant",
)  # fmt: skip
"""The arguments of expert GEMMs that are not tensors; an operator may lack some."""
COLUMNS = ("first_column", "column_step")
"""What the operator that adds has beside `SETTINGS`."""


class OperandSpecs(NamedTuple):
    """All that the choice of a kernel reads of an expert GEMM's call: no data of tensors."""

    a: TensorSpec
    """The rows, stored or not quantized yet."""
    a_scale: TensorSpec | None
    """Scales of stored rows, or the static scale for quantizing rows."""
    w: TensorSpec
    """The weight, in the plain or the packed form."""
    w_scale: TensorSpec | None
    out_dtype: torch.dtype
    rule: TileRule
    """The rule by which the row tile of the plan was chosen."""
    scheme: str = UNQUANTIZED.key
    """Key of the scheme."""
    activation: str = ""
    """Key of the activation of the product; empty: the product is the result."""
    top_k: int = 1
    """Slots that read the same row."""
    num_tokens: int | None = None
    """Tokens of the routing; None: the GEMM gets a plan but no routing."""
    weighted: bool = False
    """Whether routing weights multiply the product."""
    summed: bool = False
    """Whether the weighted sum over the slots of a token follows in the same operator."""
    adds: int = 0
    """The step between the columns of rows to which products are added; 0: they are not added."""
    expert_order: bool = False
    """Whether permuted rows are written (with an activation) or read (without)."""
    gluon: bool = True
    """Whether Gluon kernels can run: there is no interpreter for Gluon in Triton."""


def operands_of(operator: str, arguments: Mapping[str, Any]) -> OperandSpecs:
    """The operands of an operator's call.

    Args:
        operator: one of `GEMMS`.
        arguments: by their names in the schema; those that have defaults may be missing.
    """
    a, weight, tiles = arguments["a"], ExpertWeight(*arguments["weight"]), arguments["tiles"]
    a_scale, w, w_scale = (
        None if x is None else TensorSpec.of(x)
        for x in (arguments.get("a_scale"), weight.data, weight.scale)
    )
    if weight.host is not None:  # in the slots one expert lies behind the other
        w, w_scale = (
            None if x is None else x._replace(strides=(prod(x.shape[1:]), *x.strides[1:]))
            for x in (w, w_scale)
        )
    scheme = arguments.get("scheme", UNQUANTIZED.key)
    return OperandSpecs(
        TensorSpec.of(a),
        a_scale,
        cast(TensorSpec, w),
        w_scale,
        arguments.get("out_dtype", a.dtype),
        gemm_rule(scheme, a, tiles, arguments.get("batch_invariant", False)),
        scheme,
        arguments.get("activation", ""),
        arguments.get("top_k", 1),
        None if tiles[1] is None else tiles[1].shape[0],
        weighted=arguments.get("topk_weights") is not None,
        summed=operator == "expert_product_sum",
        adds=arguments.get("column_step", 1) if operator == "expert_product.out" else 0,
        expert_order=arguments.get("expert_order", False),
        gluon=weight.data.device.type in ("cuda", "meta"),
    )


@lru_cache(maxsize=4096)
def layer_operands(
    weight: tuple[int, int, int],
    scheme: Scheme,
    dtype: torch.dtype,
    rule: TileRule,
    num_slots: int,
    *,
    num_tokens: int | None = None,
    top_k: int = 1,
    activation: str = "",
    fragments: bool = False,
) -> OperandSpecs:
    """The operands of a layer's GEMM: contiguous, aligned, on one GPU.

    Rows are quantized before the GEMM if all rows decide their scale, if they are grouped by
    expert, or if a kernel for a plain weight dequantizes them. Between two unquantized GEMMs they
    are in expert order.

    Args:
        weight: ``(E, rows, K)`` of the weight, in numbers.
        scheme: the layer's scheme.
        dtype: dtype of numbers that are not quantized.
        rule: the rule of the plan.
        num_slots: rows of the product.
        num_tokens: T if rows are the slots of a routing; None: rows are grouped by expert.
        top_k: k for GEMM 1; 1 for GEMM 2, whose rows are slots.
        activation: key of the activation that GEMM 1 applies to its product; empty: none.
        fragments: whether the weight is in the packed form.
    """
    widens = fragments and widens_rows(scheme)
    early = num_tokens is None or (scheme.dequantizes_both and not widens)
    second = num_tokens == 1 and not activation and top_k == 1
    return OperandSpecs(
        *_layer_rows(scheme.activation, dtype, num_slots // top_k, weight[2], early=early),
        *_layer_weight(scheme.weight, dtype, weight, fragments=fragments),
        out_dtype=dtype,
        rule=rule,
        scheme=scheme.key,
        activation=activation,
        top_k=top_k,
        num_tokens=num_tokens,
        summed=second and (fragments or sums_one_token(scheme)),
        expert_order=scheme.weight is None and (activation != "" or top_k == 1),
    )


def _layer_rows(
    quant: Quant | None, dtype: torch.dtype, rows: int, k: int, *, early: bool
) -> tuple[TensorSpec, TensorSpec | None]:
    """A layer's rows and their scales.

    ``early``: whether rows are quantized before the GEMM even if each has its own scales.
    """
    if quant is None:
        return TensorSpec.contiguous(dtype, rows, k), None
    early |= quant.of_all_rows
    scale = TensorSpec.contiguous(quant.scale_dtype, *quant.row_scale_shape(rows, k))
    data = (quant.dtype, rows, quant.data_width(k)) if early else (dtype, rows, k)
    return TensorSpec.contiguous(*data), scale if early or quant.per_tensor else None


def _layer_weight(
    quant: Quant | None, dtype: torch.dtype, weight: tuple[int, int, int], *, fragments: bool
) -> tuple[TensorSpec, TensorSpec | None]:
    """A layer's weight and its scales."""
    if quant is None:
        return TensorSpec.contiguous(dtype, *weight), None
    (experts, n, k), shape = weight, quant.weight_scale_shape(*weight)
    stored = PACKED_DTYPE if fragments else quant.dtype
    return (
        TensorSpec.contiguous(stored, experts, n, k // quant.numbers_per_entry(stored)),
        TensorSpec.contiguous(
            quant.dtype_of_scales(dtype),
            *(groups_first(shape) if fragments else shape),
        ),
    )


def sums_one_token(scheme: Scheme) -> bool:
    """Whether there are kernels that also sum the second GEMM of one token.

    For a weight in the plain form: kernels of packed weights always do.
    """
    return scheme.activation is None or operand_bytes(scheme) is not None
