"""Outputs of the operators of the batched format."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops import sizes
from moe_ops.dispatch.tiles import MAX_PLAN_ENTRIES
from moe_ops.fake_impls.quantize import check_width
from moe_ops.scheme import parse_quant

MAX_FIRST_EXPERT = 2**30
"""Upper bound of expert ids, which kernels count in 32 bits."""


def check_room(x: Tensor, max_num_tokens: int, drops: bool) -> None:
    """ValueError if rows might be dropped although ``drops`` is False.

    Takes the largest possible load: the number of rows per expert depends on data.
    """
    if not drops and x.shape[0] > max_num_tokens:
        raise ValueError(
            f"hidden_states must have at most max_num_tokens = {max_num_tokens} tokens, "
            f"got {x.shape[0]}"
        )


def batched_dispatch(
    x: Tensor,
    scale: Tensor | None,
    topk_weights: Tensor | None,
    topk_ids: Tensor,
    first_expert: int,
    num_local_experts: int,
    max_num_tokens: int,
    quant: str,
    drops: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows, scales, the number of rows of each expert, and the number of dropped slots."""
    _check_places(topk_ids, first_expert, num_local_experts, max_num_tokens)
    sizes.shaped("x", x, topk_ids.shape[0], None)
    if topk_weights is not None:
        sizes.shaped("topk_weights", topk_weights, *topk_ids.shape)
    shape = (num_local_experts, max_num_tokens, x.shape[1])
    if quant:
        sizes.row_scale(scale, parse_quant(quant), max_num_tokens, num_local_experts)
    rows, row_scale = _batched_rows(x, shape, quant)
    counts = x.new_empty(num_local_experts, dtype=torch.int32)
    return rows, row_scale, counts, x.new_empty(1, dtype=torch.int32)


def batched_rows(
    topk_ids: Tensor, first_expert: int, num_local_experts: int, max_num_tokens: int
) -> Tensor:
    """``(T, k)`` int32."""
    _check_places(topk_ids, first_expert, num_local_experts, max_num_tokens)
    return topk_ids.new_empty((topk_ids.shape[0], topk_ids.shape[1]), dtype=torch.int32)


def batched_activation(x: Tensor, expert_num_tokens: Tensor, activation: str) -> Tensor:
    """``(E, MT, 2d)`` or ``(E, MT, d)`` -> ``(E, MT, d)``."""
    _check_rows(x, expert_num_tokens)
    return x.new_empty(_activated(x, activation))


def batched_quantize(
    x: Tensor, scale: Tensor | None, expert_num_tokens: Tensor, quant: str
) -> tuple[Tensor, Tensor]:
    """Quantized rows with the columns of ``x``, and their scales."""
    _check_rows(x, expert_num_tokens, scale, quant)
    return _batched_rows(x, (x.shape[0], x.shape[1], x.shape[2]), quant)


def batched_activation_quantize(
    x: Tensor, scale: Tensor | None, expert_num_tokens: Tensor, activation: str, quant: str
) -> tuple[Tensor, Tensor]:
    """Quantized rows of the activation's width, and their scales."""
    _check_rows(x, expert_num_tokens, scale, quant)
    return _batched_rows(x, _activated(x, activation), quant)


def _check_places(
    topk_ids: Tensor, first_expert: int, num_local_experts: int, max_num_tokens: int
) -> None:
    sizes.slots(topk_ids)
    sizes.num_experts("num_local_experts", num_local_experts)
    sizes.in_range("first_expert", first_expert, 0, MAX_FIRST_EXPERT)
    sizes.in_range("max_num_tokens", max_num_tokens, 0, MAX_PLAN_ENTRIES // num_local_experts)


def _check_rows(
    x: Tensor, expert_num_tokens: Tensor, scale: Tensor | None = None, quant: str = ""
) -> None:
    sizes.axes("x", x, 3)
    experts, rows, _ = x.shape
    sizes.shaped("expert_num_tokens", expert_num_tokens, experts)
    if quant:
        sizes.row_scale(scale, parse_quant(quant), rows, experts)


def _activated(x: Tensor, activation: str) -> tuple[int, int, int]:
    experts, rows, width = x.shape
    return experts, rows, sizes.activated_width("x", width, activation)


def _batched_rows(x: Tensor, shape: tuple[int, int, int], quant: str) -> tuple[Tensor, Tensor]:
    if not quant:
        return x.new_empty(shape), x.new_empty(0, dtype=torch.float32)
    rule = parse_quant(quant)
    experts, rows, width = shape
    check_width(width, rule)
    scale = x.new_empty(rule.batched_scale_shape(*shape), dtype=rule.scale_dtype)
    return x.new_empty((experts, rows, rule.data_width(width)), dtype=rule.dtype), scale
