"""Names of routing methods, by which kernels are selected."""

from __future__ import annotations

from enum import IntEnum

from moe_ops import checks
from moe_ops.checks import SCORING_FUNCS


class RoutingMethodType(IntEnum):
    """How ids and weights are computed from logits.

    Source:
        vLLM ``RoutingMethodType``; values below 100 come from FlashInfer's TensorRT-LLM kernels.
    """

    Default = 0
    """softmax, then top-k."""
    Renormalize = 1
    """top-k, then softmax of the chosen logits."""
    DeepSeekV3 = 2
    """sigmoid plus a correction bias, top-k within the best groups, renormalized."""
    Llama4 = 3
    """top-1, then sigmoid."""
    RenormalizeNaive = 4
    """softmax, then top-k, then renormalized: equal to ``Renormalize`` in exact arithmetic."""
    TopK = 5
    """top-k of the logits, with the logits as weights."""
    SigmoidRenorm = 6
    """sigmoid, then top-k, then renormalized."""
    MiniMax2 = 7
    """sigmoid plus a correction bias, top-k without groups, renormalized."""
    Sigmoid = 8
    """sigmoid, then top-k."""
    Unspecified = 9
    """Any other method."""
    DeepseekV4 = 100
    """sqrt(softplus), plus a correction bias, top-k, renormalized."""
    Custom = 101
    """A function or a hash table given by the caller."""
    Simulated = 102
    """Ids that do not depend on the logits, for benchmarks."""


def get_routing_method_type(
    scoring_func: str,
    top_k: int,
    renormalize: bool,
    num_expert_group: int | None,
    has_e_score_bias: bool,
) -> RoutingMethodType:
    """Name the method that :func:`moe_ops.select_experts` uses for these settings.

    Args:
        scoring_func: one of `SCORING_FUNCS`.
        top_k: k; no method depends on it, but vLLM's interface has it.
        renormalize: whether a token's weights are divided by their sum.
        num_expert_group: number of groups of grouped top-k; None or 0 without groups.
        has_e_score_bias: whether a correction bias is added for the choice.

    Returns:
        The method; ``Unspecified`` if no named method does exactly this.

    Raises:
        ValueError: an unknown ``scoring_func``.

    Source:
        vLLM 0.33 ``get_routing_method_type``.
    """
    checks.one_of("scoring_func", scoring_func, SCORING_FUNCS)
    checks.flags(renormalize=renormalize, has_e_score_bias=has_e_score_bias)
    method = RoutingMethodType
    if scoring_func == "sqrtsoftplus":
        return method.DeepseekV4 if renormalize else method.Unspecified
    if scoring_func == "sigmoid":
        if not has_e_score_bias:
            return method.SigmoidRenorm if renormalize else method.Sigmoid
        if not renormalize:
            return method.Unspecified
        return method.DeepSeekV3 if num_expert_group else method.MiniMax2
    if scoring_func != "softmax" or has_e_score_bias:
        return method.Unspecified
    return method.RenormalizeNaive if renormalize else method.Default
