"""The rows of the first GEMM, and how rows lie between the GEMMs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe_ops import checks, ops
from moe_ops.pipeline.formats import ExpertTokensMetadata
from moe_ops.pipeline.row_spaces import BatchedRows, SlotRows, permuted_rows
from moe_ops.scheme import Scheme
from moe_ops.tensors import ExpertWeights, Permutation, Routing, Rows


class Settings(NamedTuple):
    """What a call of the experts is given beside tensors."""

    scheme: Scheme
    activation: str
    """Key of the activation."""
    on_input: bool
    """Whether router weights multiply the rows of the first GEMM."""
    batch_invariant: bool
    dtype: torch.dtype
    """Dtype of rows that are not quantized, and of the result."""
    summed: bool = True
    """Whether each token's rows are weighted and summed; else the result has the slots' rows."""
    rounds_product: bool = False
    """Whether the activation is a step of its own, which reads the rounded product."""


class Gathered(NamedTuple):
    """The first GEMM's rows, and the space of the rows that it returns."""

    rows: Rows
    space: SlotRows | BatchedRows
    top_k: int = 1
    """Slots per row."""
    on_input: Tensor | None = None
    """Router weights that multiply the product of the first GEMM."""


def by_slot(
    rows: Rows,
    routing: Routing,
    weights: ExpertWeights,
    settings: Settings,
    meta: ExpertTokensMetadata | None,
) -> Gathered:
    """Rows in slot order; the first GEMM gathers the tokens' rows by the plan.

    With router weights on the input, quantized rows (one per slot) contain the weights already.
    Rows that are not quantized are tokens, and the GEMM multiplies its product by the weights.
    """
    scheme, on_input = settings.scheme, settings.on_input
    quant, num_experts, top_k = scheme.activation, weights.w1.data.shape[0], routing[1].shape[1]
    if on_input and quant is not None:
        if rows.scale is None:
            x_TH, slots = rows.data, (*routing, num_experts, quant.key)
            rows = Rows(*ops.moe_quantize(x_TH, weights.a1_scale, *slots))
        on_input, top_k = False, 1
    space = SlotRows.of(
        routing,
        num_experts,
        scheme,
        settings.dtype,
        settings.batch_invariant,
        # Only the GEMMs touch rows between them, unless the activation is a step of its own.
        expert_order=scheme.weight is None and not settings.rounds_product,
    )
    return Gathered(rows, space, top_k, routing.topk_weights if on_input else None)


def by_permutation(
    rows: Rows,
    routing: Routing,
    weights: ExpertWeights,
    settings: Settings,
    meta: ExpertTokensMetadata | None,
) -> Gathered:
    """Permuted rows: copied to the order of their experts before the first GEMM.

    Router weights on the input are applied where `by_slot` applies them.
    """
    scheme, (weights_Tk, ids_Tk, expert_map) = settings.scheme, routing
    order = Permutation(*ops.moe_permutation(ids_Tk, expert_map, weights.w1.data.shape[0]))
    of_slots = settings.on_input and scheme.activation is not None
    top_k = 1 if of_slots else ids_Tk.shape[1]
    data, scale = _permuted(rows.data, order, top_k), rows.scale
    if scale is not None and scheme.activation is not None and not scheme.activation.per_tensor:
        scale = _permuted(scale, order, top_k)
    space = permuted_rows(order, ids_Tk.numel(), scheme, settings.batch_invariant)
    by_gemm = settings.on_input and not of_slots
    on_input = weights_Tk.flatten()[order.permuted_idx] if by_gemm else None
    return Gathered(Rows(data, scale), space, on_input=on_input)


def rows_by_expert(
    rows: Rows,
    routing: Routing,
    weights: ExpertWeights,
    settings: Settings,
    meta: ExpertTokensMetadata | None,
) -> Gathered:
    """Rows ``(El, M, H)`` that prepare has copied to their experts, flattened.

    Raises:
        ValueError: no ``meta``, not three axes, or rows of other experts.
    """
    counts_E = counts_of(meta)
    x_EMH, scale = rows
    num_local_experts, counted = weights.w1.data.shape[0], counts_E.shape[0]
    checks.tensor("hidden_states", x_EMH, 3, (x_EMH.dtype,))
    checks.size("hidden_states.shape[0]", x_EMH.shape[0], "w1.shape[0]", num_local_experts)
    checks.size("expert_num_tokens.shape[0]", counted, "w1.shape[0]", num_local_experts)
    space = BatchedRows.of(counts_E, x_EMH.shape[1], settings.scheme, settings.batch_invariant)
    flat = Rows(x_EMH.flatten(0, 1), None if scale is None else scale.flatten(0, 1))
    return Gathered(flat, space)


def counts_of(meta: ExpertTokensMetadata | None) -> Tensor:
    """The number of rows of each expert, int32 ``(El,)``; ValueError without ``meta``."""
    if meta is None:
        raise ValueError("expert_tokens_meta must be given in the Batched format, got None")
    return meta.expert_num_tokens


def _permuted(x: Tensor, order: Permutation, top_k: int) -> Tensor:
    """Each slot's row (the row of token ``slot // top_k``), permuted by expert."""
    rows = x.view(torch.uint8) if x.element_size() == 1 else x
    rows = ops.gather_rows(rows, order.permuted_idx, order.expert_first_token_offset, top_k)
    return rows.view(x.dtype)
