"""Outputs of the operators of the batched format."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops.activation import formula
from moe_ops.fake_impls.quantize import check_width
from moe_ops.scheme import parse_quant


def check_room(x: Tensor, max_num_tokens: int, drops: bool) -> None:
    """ValueError where rows may be dropped and must not be. A fake does not know how many come."""
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
    """Rows, scales, the rows of each expert, and how many found no place."""
    rows, row_scale = _rows(x, (num_local_experts, max_num_tokens, x.shape[1]), quant)
    counts = x.new_empty(num_local_experts, dtype=torch.int32)
    return rows, row_scale, counts, x.new_empty(1, dtype=torch.int32)


def batched_rows(
    topk_ids: Tensor, first_expert: int, num_local_experts: int, max_num_tokens: int
) -> Tensor:
    """``(T, k)`` int32."""
    return topk_ids.new_empty((topk_ids.shape[0], topk_ids.shape[1]), dtype=torch.int32)


def batched_activation(x: Tensor, expert_num_tokens: Tensor, activation: str) -> Tensor:
    """``(E, MT, 2d)`` or ``(E, MT, d)`` -> ``(E, MT, d)``."""
    return x.new_empty(_activated(x, activation))


def batched_quantize(
    x: Tensor, scale: Tensor | None, expert_num_tokens: Tensor, quant: str
) -> tuple[Tensor, Tensor]:
    """Rows like those of ``x``, and their scales."""
    return _rows(x, (x.shape[0], x.shape[1], x.shape[2]), quant)


def batched_activation_quantize(
    x: Tensor, scale: Tensor | None, expert_num_tokens: Tensor, activation: str, quant: str
) -> tuple[Tensor, Tensor]:
    """Rows of the activation's width, and their scales."""
    return _rows(x, _activated(x, activation), quant)


def _activated(x: Tensor, activation: str) -> tuple[int, int, int]:
    width = x.shape[2] // 2 if formula(activation).gated else x.shape[2]
    return x.shape[0], x.shape[1], width


def _rows(x: Tensor, shape: tuple[int, int, int], quant: str) -> tuple[Tensor, Tensor]:
    if not quant:
        return x.new_empty(shape), x.new_empty(0, dtype=torch.float32)
    rule = parse_quant(quant)
    experts, rows, width = shape
    check_width(width, rule)
    scale = x.new_empty(rule.batched_scale_shape(*shape), dtype=rule.scale_dtype)
    return x.new_empty((experts, rows, rule.data_width(width)), dtype=rule.dtype), scale
