"""Elementwise stages between and after the GEMMs: the activation, and the weighted sum."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from moe_ops import checks, ops, sizes
from moe_ops.activation import Activation, MoEActivation, kind_and_key
from moe_ops.gradients import inference_only, refuse, wanted

_ANY_NUMBER = 2**31 - 1
"""A number of experts with which every id that is not negative is an expert."""


def moe_fused_mul_sum(
    inputs: Tensor,
    topk_weights: Tensor,
    outputs: Tensor | None = None,
    topk_ids: Tensor | None = None,
    expert_map: Tensor | None = None,
    num_valid_tokens: Tensor | None = None,
) -> Tensor:
    """Sum each token's expert rows with its routing weights.

    ``out[t] = sum_j topk_weights[t, j] * inputs[t, j]``, accumulated in float32 for j = 0..k-1 in
    that order and rounded once to the output dtype. Skipped slots (a negative id, an id past
    ``expert_map``, or one that it maps to -1) are not read; a token without slots gets zeros.

    Args:
        inputs: ``(T, k, H)`` bf16, fp16 or fp32, contiguous.
        topk_weights: ``(T, k)`` bf16, fp16 or fp32, contiguous; need not sum to one.
        outputs: ``(T, H)`` to write to, with contiguous rows that overlap neither each other nor
            ``inputs``; None: a fresh tensor.
        topk_ids: ``(T, k)`` int32 or int64; required with ``expert_map``.
        expert_map: ``(E,)`` or None.
        num_valid_tokens: int32 or int64 ``[1]`` on the device; rows from this index on are zeros.

    Returns:
        ``(T, H)``: ``outputs``, or a contiguous tensor with the dtype of ``inputs``.

    Raises:
        TypeError, ValueError: a wrong dtype, shape, device or layout; ``expert_map`` without ids.
        NotImplementedError: a backward pass through the result; in grad mode, ``outputs`` together
            with inputs that require grad.

    Source:
        vLLM ``moe_fused_mul_sum``, which leaves rows without slots untouched and whose output
        offset overflows past 2**31 elements.
    """
    checks.tensor("inputs", inputs, 3, checks.FLOATS)
    checks.tensor("topk_weights", topk_weights, 2, checks.FLOATS)
    checks.same_tokens("topk_weights", topk_weights, "inputs", inputs)
    checks.size("topk_weights.shape[1]", topk_weights.shape[1], "inputs.shape[1]", inputs.shape[1])
    checks.same_device("topk_weights", topk_weights, "inputs", inputs)
    for name, x in (("inputs", inputs), ("topk_weights", topk_weights)):
        if not x.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {x.stride()}")
    if topk_ids is not None:
        checks.topk_pair(topk_weights, topk_ids)
    elif expert_map is not None:
        raise ValueError("topk_ids must be given to interpret expert_map, got None")
    checks.expert_map(expert_map, inputs)
    checks.device_scalar("num_valid_tokens", num_valid_tokens, checks.INDICES, "inputs", inputs)
    if outputs is None:
        asked = wanted(inputs, topk_weights)
        with torch.no_grad():
            result = ops.moe_fused_mul_sum(
                inputs, topk_weights, topk_ids, expert_map, num_valid_tokens, _ANY_NUMBER
            )
        return cast(Tensor, refuse(result, asked, "moe_fused_mul_sum"))
    checks.tensor("outputs", outputs, 2, checks.FLOATS)
    checks.same_tokens("outputs", outputs, "inputs", inputs)
    checks.same_device("outputs", outputs, "inputs", inputs)
    checks.size("outputs.shape[1]", outputs.shape[1], "inputs.shape[2]", inputs.shape[2])
    sizes.rows_apart("outputs", outputs)
    ops.moe_fused_mul_sum_out(
        inputs, topk_weights, topk_ids, expert_map, num_valid_tokens, _ANY_NUMBER, out=outputs
    )
    return outputs


@inference_only
def apply_moe_activation(activation: MoEActivation | Activation | str, x: Tensor) -> Tensor:
    """Apply an activation by itself: ``(R, 2d)`` with a gate, or ``(R, d)`` without, to ``(R, d)``.

    Computed in float32 and rounded once; `moe_ops.activation` has the formulas.

    Returns:
        ``(R, d)`` in the dtype of ``x``.

    Raises:
        TypeError: a dtype other than bf16, fp16 and fp32.
        ValueError: ``x`` is not 2-D, has an odd width with a gate, or the activation is unknown.
    """
    kind, key = kind_and_key(activation)
    checks.tensor("x", x, 2, checks.FLOATS)
    if kind.is_gated and x.shape[1] % 2:
        raise ValueError(f"x must have an even width for activation {kind.value}, got {x.shape[1]}")
    return ops.activation(x, key)
