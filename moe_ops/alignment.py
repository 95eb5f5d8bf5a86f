"""Public functions of the stages around the GEMMs: alignment, permutation, combination."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_ops import checks, ops, sizes
from moe_ops.activation import Activation, MoEActivation, kind_and_key
from moe_ops.dispatch.tiles import MAX_ROW_TILE
from moe_ops.gradients import inference_only
from moe_ops.tensors import Permutation, TilePlan

_ANY_NUMBER = 2**31 - 1
"""As a number of experts: every id that is not negative is an expert."""


def moe_align_block_size(
    topk_ids: Tensor,
    block_size: int,
    num_experts: int,
    expert_map: Tensor | None = None,
    pad_sorted_ids: bool = False,
    ignore_invalid_experts: bool = False,
) -> TilePlan:
    """Sort slots by expert and pad each group to whole tiles of ``block_size`` rows.

    The sort is stable (slots of an expert stay in slot order). Out-of-range ids are dropped.

    Args:
        topk_ids: ``(T, k)`` int32 or int64.
        block_size: rows of a tile, a power of two up to 4096.
        num_experts: E, up to 4096; need not be a power of two.
        expert_map: ``(E,)``, the local expert of each global one or -1. Without
            ``ignore_invalid_experts`` all slots are kept in the order of their global experts, and
            ``expert_ids`` is mapped afterwards (-1: a tile of another rank).
        pad_sorted_ids: round the length of ``sorted_token_ids`` up to a multiple of ``block_size``.
        ignore_invalid_experts: drop slots of experts that are not local before sorting, and sort
            the rest by local expert.

    Returns:
        A `TilePlan` of int32 tensors of lengths ``L = min(T k block, T k + E (block - 1))``,
        ``ceil(L / block)`` and 1.

    Raises:
        TypeError: a wrong dtype.
        ValueError: ``block_size`` not such a power of two, ``num_experts`` not in 1..4096, an
            ``expert_map`` of another length.

    Source:
        vLLM ``moe_align_block_size``, whose kernel stops at 1024 experts.
    """
    checks.tensor("topk_ids", topk_ids, 2, checks.INDICES)
    checks.flags(pad_sorted_ids=pad_sorted_ids, ignore_invalid_experts=ignore_invalid_experts)
    checks.integer("block_size", block_size)
    if not 1 <= block_size <= MAX_ROW_TILE or block_size & (block_size - 1):
        raise ValueError(
            f"block_size must be a power of two up to {MAX_ROW_TILE}, got {block_size}"
        )
    checks.between(1, checks.MAX_EXPERTS, num_experts=num_experts)
    checks.expert_map(expert_map, topk_ids, num_experts)
    return TilePlan(
        *ops.moe_align_block_size(
            topk_ids, expert_map, [block_size], num_experts, pad_sorted_ids, ignore_invalid_experts
        )
    )


def count_expert_num_tokens(
    topk_ids: Tensor, num_local_experts: int, expert_map: Tensor | None = None
) -> Tensor:
    """How many slots each local expert has: int32 ``(El,)``; skipped slots count nowhere.

    Args:
        topk_ids: ``(T, k)`` int32 or int64.
        num_local_experts: El.
        expert_map: ``(E,)`` or None.

    Raises:
        TypeError, ValueError: a wrong dtype or shape, ``num_local_experts`` not in 1..4096.

    Source:
        vLLM ``count_expert_num_tokens``.
    """
    checks.tensor("topk_ids", topk_ids, 2, checks.INDICES)
    checks.expert_map(expert_map, topk_ids)
    checks.between(1, checks.MAX_EXPERTS, num_local_experts=num_local_experts)
    return ops.count_expert_num_tokens(topk_ids, expert_map, num_local_experts)


@inference_only
def moe_permute(
    hidden_states: Tensor,
    a1q_scale: Tensor | None,
    topk_ids: Tensor,
    n_expert: int,
    n_local_expert: int = -1,
    expert_map: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]:
    """Copy each slot's row into the order of the experts, skipped slots last (as zeros).

    Args:
        hidden_states: ``(T, H)`` of any dtype.
        a1q_scale: ``(T, G)`` per-token scales, permuted alike; one element: returned as it is.
        topk_ids: ``(T, k)`` int32 or int64.
        n_expert: E.
        n_local_expert: El; -1 means E.
        expert_map: ``(E,)`` or None.

    Returns:
        ``(rows (T*k, H), scale, expert_first_token_offset int64 (El+1,), inv_permuted_idx int32
        (T, k), permuted_idx int32 (T*k,))``; the order within an expert is that of the slots.

    Raises:
        TypeError, ValueError: a wrong dtype or shape.

    Source:
        vLLM ``moe_permute``.
    """
    checks.tensor("topk_ids", topk_ids, 2, checks.INDICES)
    checks.tensor("hidden_states", hidden_states, 2, None)
    checks.between(1, checks.MAX_EXPERTS, n_expert=n_expert)
    num_local_experts = n_expert
    if n_local_expert != -1:
        checks.between(1, checks.MAX_EXPERTS, n_local_expert=n_local_expert)
        num_local_experts = n_local_expert
    checks.same_tokens("hidden_states", hidden_states, "topk_ids", topk_ids)
    checks.same_device("hidden_states", hidden_states, "topk_ids", topk_ids)
    checks.expert_map(expert_map, topk_ids, n_expert)
    order = Permutation(*ops.moe_permutation(topk_ids, expert_map, num_local_experts))

    def permute(x: Tensor) -> Tensor:
        return ops.gather_rows(
            x, order.permuted_idx, order.expert_first_token_offset, topk_ids.shape[1]
        )

    scale = a1q_scale
    if scale is not None:
        checks.tensor("a1q_scale", scale, None, None)
    if scale is not None and scale.numel() != 1:
        checks.tensor("a1q_scale", scale, 2, None)
        checks.same_tokens("a1q_scale", scale, "hidden_states", hidden_states)
        checks.same_device("a1q_scale", scale, "hidden_states", hidden_states)
        scale = permute(scale)
    return permute(hidden_states), scale, *order


@inference_only
def moe_unpermute(
    permuted_hidden_states: Tensor,
    topk_weights: Tensor | None,
    inv_permuted_idx: Tensor,
    expert_first_token_offset: Tensor | None = None,
) -> Tensor:
    """The inverse of `moe_permute`, weighted and summed over each token's slots.

    Accumulated in float32 for j = 0..k-1 in that order and rounded once.

    Args:
        permuted_hidden_states: ``(T*k, H)`` bf16, fp16 or fp32.
        topk_weights: ``(T, k)``, or None for weight 1.
        inv_permuted_idx: int32 ``(T, k)``, the row of each slot; rows outside are skipped.
        expert_first_token_offset: int64 ``(El+1,)``; rows from its last entry on belong to skipped
            slots and are not read. Without it every row counts.

    Returns:
        ``(T, H)``, contiguous, dtype of the rows.

    Raises:
        TypeError, ValueError: a wrong dtype or shape.

    Source:
        vLLM ``moe_unpermute``.
    """
    checks.tensor("permuted_hidden_states", permuted_hidden_states, 2, checks.FLOATS)
    checks.tensor("inv_permuted_idx", inv_permuted_idx, 2, (torch.int32,))
    rows = ("permuted_hidden_states", permuted_hidden_states)
    checks.same_device("inv_permuted_idx", inv_permuted_idx, *rows)
    if topk_weights is not None:
        checks.topk_pair(topk_weights, inv_permuted_idx, "inv_permuted_idx")
    if expert_first_token_offset is not None:
        checks.tensor("expert_first_token_offset", expert_first_token_offset, 1, (torch.int64,))
        offsets = expert_first_token_offset.shape[0]
        if offsets < 2:
            raise ValueError(
                f"expert_first_token_offset must have at least 2 entries, got {offsets}"
            )
        checks.same_device("expert_first_token_offset", expert_first_token_offset, *rows)
    return ops.moe_unpermute(
        permuted_hidden_states, topk_weights, inv_permuted_idx, expert_first_token_offset
    )


def moe_fused_mul_sum(
    inputs: Tensor,
    topk_weights: Tensor,
    outputs: Tensor | None = None,
    topk_ids: Tensor | None = None,
    expert_map: Tensor | None = None,
    num_valid_tokens: Tensor | None = None,
) -> Tensor:
    """Combine each token's expert rows with its routing weights.

    ``out[t] = sum_j topk_weights[t, j] * inputs[t, j]``, accumulated in float32 for j = 0..k-1 in
    that order and rounded once to the output dtype. Skipped slots (a negative id, an id past
    ``expert_map``, or one it maps to -1) are not read; a token without slots gets zeros.

    Args:
        inputs: ``(T, k, H)`` bf16, fp16 or fp32, contiguous.
        topk_weights: ``(T, k)`` bf16, fp16 or fp32, contiguous; need not sum to one.
        outputs: ``(T, H)`` to write into, rows contiguous and apart; a fresh tensor without it.
        topk_ids: ``(T, k)`` int32 or int64; needed with ``expert_map``.
        expert_map: ``(E,)`` or None.
        num_valid_tokens: int32 or int64 ``[1]`` on the device; rows past it are zeros.

    Returns:
        ``(T, H)``: ``outputs``, or a contiguous tensor with the dtype of ``inputs``.

    Raises:
        TypeError, ValueError: a wrong dtype, shape, device or layout; ``expert_map`` without ids.
        NotImplementedError: a backward pass through the result; ``outputs`` together with inputs
            that require grad, in grad mode.

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
    arguments = (inputs, topk_weights, topk_ids, expert_map, num_valid_tokens, _ANY_NUMBER)
    if outputs is None:
        return _mul_sum(*arguments)
    checks.tensor("outputs", outputs, 2, checks.FLOATS)
    checks.same_tokens("outputs", outputs, "inputs", inputs)
    checks.same_device("outputs", outputs, "inputs", inputs)
    checks.size("outputs.shape[1]", outputs.shape[1], "inputs.shape[2]", inputs.shape[2])
    sizes.rows_apart("outputs", outputs)
    ops.moe_fused_mul_sum_out(*arguments, out=outputs)
    return outputs


@inference_only
def _mul_sum(*arguments: Any) -> Tensor:
    return ops.moe_fused_mul_sum(*arguments)


@inference_only
def apply_moe_activation(activation: MoEActivation | Activation | str, x: Tensor) -> Tensor:
    """An activation by itself: ``(R, 2d)`` with a gate, ``(R, d)`` without, to ``(R, d)``.

    Computed in float32 and rounded once; formulas in `moe_ops.activation`.

    Raises:
        TypeError: a dtype other than bf16, fp16 and fp32.
        ValueError: not 2-D, an odd width with a gate, an unknown activation.
    """
    kind, key = kind_and_key(activation)
    checks.tensor("x", x, 2, checks.FLOATS)
    if kind.is_gated and x.shape[1] % 2:
        raise ValueError(f"x must have an even width for activation {kind.value}, got {x.shape[1]}")
    return ops.activation(x, key)
