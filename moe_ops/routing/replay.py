"""Routing replay: the weights of experts that were chosen before."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_ops import checks
from moe_ops.routing.topk import look_up


def given_topk(
    hidden_states: Tensor,
    gating_output: Tensor,
    topk_ids: Tensor,
    renormalize: bool,
    scoring_func: str = "softmax",
    routed_scaling_factor: float = 1,
) -> tuple[Tensor, Tensor]:
    """Weights of given experts: their scores, renormalized and scaled as in `fused_topk`.

    This is `hash_topk` with a table that has a row for each token. For the ids that `fused_topk` or
    `grouped_topk` chose, the weights have the bits of theirs, whatever bias or groups took part in
    the choice. An id out of range gives a skipped slot: id -1, weight 0. The logits have gradients
    through the weights.

    Args:
        hidden_states: ``(T, H)``; only its number of tokens matters.
        gating_output: ``(T, E)`` logits, bf16, fp16 or fp32. E up to 4096.
        topk_ids: ``(T, k)`` int32 or int64; the experts of a token are distinct.
        renormalize: whether a token's weights are divided by their sum.
        scoring_func: as in `fused_topk`.
        routed_scaling_factor: multiplier of the weights.

    Returns:
        ``topk_weights (T, k)`` float32 and ``topk_ids (T, k)`` int32, in the given order.

    Raises:
        TypeError: a wrong dtype.
        ValueError: an unknown ``scoring_func``, shapes or devices that disagree.
        NotImplementedError: as `fused_topk`.

    Source:
        Rollout routing replay (arXiv 2510.11370).
    """
    check_topk_ids(topk_ids, hidden_states)
    checks.tensor("gating_output", gating_output, 2, checks.FLOATS)
    checks.same_device("topk_ids", topk_ids, "gating_output", gating_output)
    rows = torch.arange(topk_ids.shape[0], device=topk_ids.device)
    weighing = (renormalize, scoring_func, routed_scaling_factor)
    return look_up(hidden_states, gating_output, topk_ids, rows, weighing)


def check_topk_ids(topk_ids: Tensor, hidden_states: Tensor, top_k: int | None = None) -> None:
    """Check the experts that a caller gives: ``(T, k)`` ids where the tokens are."""
    checks.tensor("topk_ids", topk_ids, 2, checks.INDICES)
    checks.tensor("hidden_states", hidden_states, 2, None)
    if top_k is not None:
        checks.size("topk_ids.shape[1]", topk_ids.shape[1], "top_k", top_k)
    checks.same_tokens("topk_ids", topk_ids, "hidden_states", hidden_states)


def check_replays(custom_routing_function: Callable[..., Any]) -> None:
    """Raise for a caller's routing function that cannot weight given experts.

    A compiler does not read signatures; there Python's own error says what is wrong.
    """
    if torch.compiler.is_compiling() or not callable(custom_routing_function):
        return
    parameters = inspect.signature(custom_routing_function).parameters.values()
    if not any(p.name == "topk_ids" or p.kind is p.VAR_KEYWORD for p in parameters):
        raise NotImplementedError(
            "custom_routing_function must have a parameter topk_ids to weight given experts, got "
            f"{custom_routing_function}"
        )
