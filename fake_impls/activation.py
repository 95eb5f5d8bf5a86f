"""Outputs of the activation and of its derivative."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops import sizes


def activation(x: Tensor, activation: str) -> Tensor:
    """``(R, d)`` for ``(R, 2d)`` with a gate, ``(R, d)`` for ``(R, d)`` without."""
    sizes.axes("x", x, 2)
    rows, width = x.shape
    return x.new_empty((rows, sizes.activated_width("x", width, activation)))


def moe_activation_backward(
    grad: Tensor,
    x: Tensor,
    topk_weights: Tensor | None,
    topk_ids: Tensor,
    expert_map: Tensor | None,
    num_local_experts: int,
    activation: str,
    activated: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """``x``'s shape, ``(T * k, d)`` (no row unless ``activated``) and float32 ``(T, k)``."""
    sizes.axes("x", x, 2)
    rows, columns = x.shape
    width = sizes.activated_width("x", columns, activation)
    tokens, k = sizes.slots(topk_ids, expert_map)
    sizes.num_experts("num_local_experts", num_local_experts)
    sizes.equal("x.shape[0]", rows, tokens * k)
    sizes.shaped("grad", grad, rows, width)
    sizes.entries("topk_weights", topk_weights, tokens * k)
    return (
        x.new_empty(x.shape),
        x.new_empty((rows if activated else 0, width)),
        x.new_empty((tokens, k), dtype=torch.promote_types(x.dtype, torch.float32)),
    )
