"""Top-k routers: over all experts, over the best groups of experts, or from a hash table."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops import checks, ops
from moe_ops.routing.arguments import (
    check_indices_type,
    check_logits,
    check_scoring,
    check_weighing,
    expert_groups,
)
from moe_ops.routing.backward import differentiable_hash_topk, differentiable_topk

Weighing = tuple[bool, str, float]
"""``renormalize``, ``scoring_func`` and ``routed_scaling_factor``."""


@checks.remembered
def _check_topk(
    hidden_states: Tensor,
    gating_output: Tensor,
    topk: int,
    renormalize: bool,
    indices_type: torch.dtype | None,
    scoring_func: str,
    e_score_correction_bias: Tensor | None,
    routed_scaling_factor: float,
) -> None:
    check_logits(hidden_states, gating_output, topk)
    check_scoring(gating_output, scoring_func, e_score_correction_bias)
    check_weighing(renormalize, routed_scaling_factor)
    check_indices_type(indices_type)


def fused_topk(
    hidden_states: Tensor,
    gating_output: Tensor,
    topk: int,
    renormalize: bool,
    indices_type: torch.dtype | None = None,
    scoring_func: str = "softmax",
    e_score_correction_bias: Tensor | None = None,
    routed_scaling_factor: float = 1,  # not 1.0: Dynamo turns float defaults into graph inputs
) -> tuple[Tensor, Tensor]:
    """Choose each token's ``topk`` experts by score.

    Scores ``s = f(logits)`` over all E experts are computed in float64 and rounded once to float32.
    The experts with the ``topk`` largest ``s + bias`` (a float32 sum) are chosen, ties to the
    lowest index. Their weights are ``s``, in descending order of ``s + bias``, divided by their sum
    with ``renormalize`` (by 1 if the sum is 0), then multiplied by ``routed_scaling_factor``. A
    logit that is not finite scores 0. The ids of a token are distinct. The logits have gradients
    through the weights; the choice and the bias have none.

    Args:
        hidden_states: ``(T, H)``; only its number of tokens matters.
        gating_output: ``(T, E)`` logits, bf16, fp16 or fp32. E up to 4096.
        topk: k, between 1 and E.
        renormalize: see above.
        indices_type: dtype of the ids, int32 (the default) or int64.
        scoring_func: ``softmax``, ``sigmoid`` or ``sqrtsoftplus`` (``sqrt(log(1 + exp(x)))``, with
            ``sqrt(x)`` above 20).
        e_score_correction_bias: ``(E,)`` float32, used only to choose experts, not for weights.
        routed_scaling_factor: multiplier of the weights.

    Returns:
        ``topk_weights (T, k)`` float32 and ``topk_ids (T, k)``.

    Raises:
        TypeError: a wrong dtype.
        ValueError: k not in 1..E, an unknown ``scoring_func``, shapes or devices that disagree.
        NotImplementedError: more than 4096 experts; forward-mode derivatives and transforms of
            ``torch.func``.

    Source:
        vLLM ``FusedTopKRouter``, which does not apply ``routed_scaling_factor``, and
        ``FusedTopKBiasRouter``.
    """
    _check_topk(
        hidden_states,
        gating_output,
        topk,
        renormalize,
        indices_type,
        scoring_func,
        e_score_correction_bias,
        routed_scaling_factor,
    )
    logits, bias = gating_output, e_score_correction_bias
    if torch.is_grad_enabled() and logits.requires_grad:
        settings = (topk, renormalize, scoring_func, routed_scaling_factor)
        routed = differentiable_topk("fused_topk", logits, bias, settings)
    else:
        routed = ops.fused_topk(
            logits, bias, topk, renormalize, scoring_func, routed_scaling_factor
        )
    weights, ids = routed
    return weights, ids if indices_type is None else ids.to(indices_type)


def grouped_topk(
    hidden_states: Tensor,
    gating_output: Tensor,
    topk: int,
    renormalize: bool,
    num_expert_group: int | None,
    topk_group: int | None,
    scoring_func: str = "softmax",
    routed_scaling_factor: float = 1,
    e_score_correction_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose each token's best groups of experts, then ``topk`` experts in them.

    A group is ``E / num_expert_group`` consecutive experts. The score of a group is the largest
    ``s`` of its experts or, with a bias, the float32 sum of its two largest ``s + bias``. The
    ``topk_group`` best groups are kept, ties to the lowest index, and `fused_topk` chooses among
    their experts. With one group (or 0, and ``topk_group`` 1 or 0) this is `fused_topk`.

    Args:
        hidden_states: as in `fused_topk`, like every argument not named here.
        gating_output: see `fused_topk`.
        topk: k; at most the number of experts in ``topk_group`` groups.
        renormalize: see `fused_topk`.
        num_expert_group: number of groups; must divide E.
        topk_group: number of groups to keep.
        scoring_func: see `fused_topk`.
        routed_scaling_factor: see `fused_topk`.
        e_score_correction_bias: see `fused_topk`.

    Returns:
        ``topk_weights (T, k)`` float32 and ``topk_ids (T, k)`` int32.

    Raises:
        TypeError: a wrong dtype.
        ValueError: groups that are None, do not divide E or hold too few experts; and as
            `fused_topk`.
        NotImplementedError: as `fused_topk`.

    Source:
        vLLM ``GroupedTopKRouter``, whose fused kernel has at most 32 groups and k <= 32.
    """
    num_experts = check_logits(hidden_states, gating_output, topk)
    check_scoring(gating_output, scoring_func, e_score_correction_bias)
    check_weighing(renormalize, routed_scaling_factor)
    settings = (topk, renormalize, scoring_func, routed_scaling_factor)
    groups = expert_groups(num_experts, num_expert_group, topk_group, topk=topk)
    logits, bias, scale = gating_output, e_score_correction_bias, routed_scaling_factor
    trained = torch.is_grad_enabled() and logits.requires_grad
    if groups is None:
        if trained:
            return differentiable_topk("grouped_topk", logits, bias, settings)
        return ops.fused_topk(logits, bias, topk, renormalize, scoring_func, scale)
    if trained:
        return differentiable_topk("grouped_topk", logits, bias, settings, groups)
    return ops.grouped_topk(logits, bias, topk, renormalize, scoring_func, scale, *groups)


def hash_topk(
    hidden_states: Tensor,
    gating_output: Tensor,
    input_ids: Tensor,
    hash_indices_table: Tensor,
    renormalize: bool,
    scoring_func: str = "sqrtsoftplus",
    routed_scaling_factor: float = 1,
) -> tuple[Tensor, Tensor]:
    """Look up each token's experts in a table by its token id; logits only give the weights.

    ``ids = table[input_ids]``. The weights are the scores ``s`` of these experts, renormalized and
    scaled as in `fused_topk`. A token id outside of the table, or an entry that is not an expert,
    gives a skipped slot: id -1, weight 0. The logits have gradients through the weights.

    Args:
        hidden_states: ``(T, H)``; only its number of tokens matters.
        gating_output: ``(T, E)`` logits, bf16, fp16 or fp32. E up to 4096.
        input_ids: ``(T,)`` int32 or int64.
        hash_indices_table: ``(vocabulary, k)`` int32 or int64; the experts of a row are distinct.
        renormalize: whether a token's weights are divided by their sum.
        scoring_func: as in `fused_topk`.
        routed_scaling_factor: multiplier of the weights.

    Returns:
        ``topk_weights (T, k)`` float32 and ``topk_ids (T, k)`` int32, in the table's order.

    Raises:
        TypeError: a wrong dtype.
        ValueError: an empty table, an unknown ``scoring_func``, shapes or devices that disagree.
        NotImplementedError: as `fused_topk`.

    Source:
        DeepSeek-V4's first ``num_hash_layers`` layers; vLLM ``FusedTopKBiasRouter``.
    """
    checks.tensor("hash_indices_table", hash_indices_table, 2, checks.INDICES)
    if hash_indices_table.shape[0] == 0:
        raise ValueError("hash_indices_table must have a row for each token id, got no rows")
    weighing = (renormalize, scoring_func, routed_scaling_factor)
    return look_up(hidden_states, gating_output, hash_indices_table, input_ids, weighing)


def look_up(
    tokens: Tensor, gating_output: Tensor, table: Tensor, input_ids: Tensor, weighing: Weighing
) -> tuple[Tensor, Tensor]:
    """`hash_topk`, also with a table without rows."""
    renormalize, scoring_func, routed_scaling_factor = weighing
    check_logits(tokens, gating_output, table.shape[1])
    check_scoring(gating_output, scoring_func, None)
    check_weighing(renormalize, routed_scaling_factor)
    checks.tensor("input_ids", input_ids, 1, checks.INDICES)
    checks.same_tokens("input_ids", input_ids, "gating_output", gating_output)
    for name, x in (("input_ids", input_ids), ("hash_indices_table", table)):
        checks.same_device(name, x, "gating_output", gating_output)
    if torch.is_grad_enabled() and gating_output.requires_grad:
        return differentiable_hash_topk(gating_output, input_ids, table, weighing)
    return ops.hash_topk(gating_output, input_ids, table, *weighing)
