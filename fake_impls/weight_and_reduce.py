"""Output of the weighted sum."""

from __future__ import annotations

from torch import Tensor

from moe_ops import sizes


def moe_fused_mul_sum(
    inputs: Tensor,
    topk_weights: Tensor | None,
    topk_ids: Tensor | None,
    expert_map: Tensor | None,
    num_valid_tokens: Tensor | None,
    num_local_experts: int,
) -> Tensor:
    """``(T, H)`` for ``(T, k, H)``, or with ``topk_ids`` for ``(T * k, H)``; same dtype."""
    tokens, width = _check(inputs, topk_weights, topk_ids, expert_map, num_valid_tokens)
    return inputs.new_empty(tokens, width)


def moe_fused_mul_sum_out(
    inputs: Tensor,
    topk_weights: Tensor | None,
    topk_ids: Tensor | None,
    expert_map: Tensor | None,
    num_valid_tokens: Tensor | None,
    num_local_experts: int,
    *,
    out: Tensor,
) -> None:
    """Check ``out``, which is written: its rows must be contiguous and must not overlap."""
    tokens, width = _check(inputs, topk_weights, topk_ids, expert_map, num_valid_tokens)
    sizes.shaped("out", out, tokens, width)
    sizes.rows_apart("out", out)


def _check(
    inputs: Tensor,
    topk_weights: Tensor | None,
    topk_ids: Tensor | None,
    expert_map: Tensor | None,
    num_valid_tokens: Tensor | None,
) -> tuple[int, int]:
    """The tokens and the columns of the result; ValueError if sizes disagree."""
    *rows, width = inputs.shape
    if topk_ids is not None:
        tokens, k = sizes.slots(topk_ids, expert_map)
        sizes.entries("inputs", inputs, tokens * k * width)
    elif len(rows) == 2:
        tokens, k = rows
    else:
        raise ValueError(f"inputs must have 3 axes without ids, got shape {tuple(inputs.shape)}")
    sizes.weights(topk_weights, tokens, k)
    sizes.entries("num_valid_tokens", num_valid_tokens, 1)
    return tokens, width
