"""Top-k of softmax or sigmoid scores."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops import checks, ops

SCORING_FUNCS = ("softmax", "sigmoid")


def fused_topk(
    hidden_states: Tensor,
    gating_output: Tensor,
    topk: int,
    renormalize: bool,
    indices_type: torch.dtype | None = None,
    scoring_func: str = "softmax",
    e_score_correction_bias: Tensor | None = None,
    routed_scaling_factor: float = 1,  # no 1.0: Dynamo makes inputs of the graph of float defaults
) -> tuple[Tensor, Tensor]:
    """Choose each token's ``topk`` experts by score.

    ``s = f(logits)`` in float32 over all E experts; the ``topk`` largest ``s + bias`` are chosen,
    ties to the lowest index; weights are ``s`` of the chosen, in descending order of ``s + bias``,
    divided by their sum with ``renormalize`` (a sum of 0 divides by 1), then multiplied by
    ``routed_scaling_factor``. A logit that is not finite scores 0. Ids of a token are distinct.

    Args:
        hidden_states: ``(T, H)``; only its number of tokens matters.
        gating_output: ``(T, E)`` logits, bf16, fp16 or fp32. E up to 4096.
        topk: k, between 1 and E.
        renormalize: see above.
        indices_type: dtype of the ids, int32 (the default) or int64.
        scoring_func: ``softmax`` or ``sigmoid``.
        e_score_correction_bias: ``(E,)`` float32, used in the choice only.
        routed_scaling_factor: multiplier of the weights.

    Returns:
        ``topk_weights (T, k)`` float32 and ``topk_ids (T, k)``.

    Raises:
        TypeError: a wrong dtype.
        ValueError: k not in 1..E, an unknown ``scoring_func``, shapes or devices that disagree.
        NotImplementedError: logits that require grad while grad mode is on.

    Source:
        vLLM ``FusedTopKRouter`` and ``FusedTopKBiasRouter``; upstream leaves
        ``routed_scaling_factor`` out of the former.
    """
    checks.tensor("gating_output", gating_output, 2, checks.FLOATS)
    checks.inference_only(gating_output=gating_output)
    checks.same_tokens("gating_output", gating_output, "hidden_states", hidden_states)
    num_experts = gating_output.shape[1]
    checks.topk("topk", topk, num_experts)
    if num_experts > checks.MAX_EXPERTS:
        raise NotImplementedError(
            f"gating_output must have at most {checks.MAX_EXPERTS} experts, got {num_experts}"
        )
    checks.one_of("scoring_func", scoring_func, SCORING_FUNCS)
    if indices_type not in (None, *checks.INDICES):
        raise TypeError(f"indices_type must be one of {list(checks.INDICES)}, got {indices_type}")
    if e_score_correction_bias is not None:
        checks.tensor("e_score_correction_bias", e_score_correction_bias, 1, (torch.float32,))
        checks.same_device(
            "e_score_correction_bias", e_score_correction_bias, "gating_output", gating_output
        )
        rows = e_score_correction_bias.shape[0]
        checks.size("e_score_correction_bias.shape[0]", rows, "the number of experts", num_experts)
    weights, ids = ops.fused_topk(
        gating_output,
        e_score_correction_bias,
        topk,
        renormalize,
        scoring_func,
        routed_scaling_factor,
    )
    return weights, ids if indices_type is None else ids.to(indices_type)
