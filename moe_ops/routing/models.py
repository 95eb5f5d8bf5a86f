"""Routers of particular models, each usable as a ``custom_routing_function``."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops import checks, ops
from moe_ops.routing.adjust import adjust_routing
from moe_ops.routing.arguments import check_logits
from moe_ops.routing.backward import differentiable_sparsemixer
from moe_ops.routing.replay import check_topk_ids, given_topk
from moe_ops.routing.topk import fused_topk


def _topk(
    hidden_states: Tensor,
    gating_output: Tensor,
    topk: int,
    renormalize: bool,
    topk_ids: Tensor | None,
    scoring_func: str = "softmax",
) -> tuple[Tensor, Tensor]:
    """`fused_topk`, or the weights of given experts."""
    if topk_ids is None:
        return fused_topk(
            hidden_states, gating_output, topk, renormalize, scoring_func=scoring_func
        )
    check_topk_ids(topk_ids, hidden_states, topk)
    return given_topk(hidden_states, gating_output, topk_ids, renormalize, scoring_func)


def topk_softmax(
    hidden_states: Tensor,
    gating_output: Tensor,
    topk: int,
    renormalize: bool,
    topk_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax of the ``topk`` largest logits: Mixtral, gpt-oss.

    Equal to, and computed as, the renormalized top-k of a softmax over all experts; ``renormalize``
    has no effect. Given ``topk_ids (T, k)`` replace the choice, as in `select_experts`. Other
    arguments, results and errors as `fused_topk`.

    Returns:
        As `fused_topk`.

    Source:
        ``RoutingMethodType.Renormalize``; transformers ``GptOssTopKRouter``.
    """
    return _topk(hidden_states, gating_output, topk, True, topk_ids)


def llama4_routing(
    hidden_states: Tensor,
    gating_output: Tensor,
    topk: int,
    renormalize: bool,
    topk_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The sigmoid of the largest logits: Llama 4, with k = 1 and ``renormalize`` False.

    The layer applies these weights to its input (``apply_router_weight_on_input``). Given
    ``topk_ids (T, k)`` replace the choice, as in `select_experts`. Other arguments, results and
    errors as `fused_topk`.

    Returns:
        As `fused_topk`.

    Source:
        ``RoutingMethodType.Llama4``; vLLM ``Llama4MoE.custom_routing_function``, transformers
        ``Llama4Router``. These choose by logits. Here experts whose scores are equal in float32
        (for logits above 17 the score is 1) are chosen by lowest index.
    """
    return _topk(hidden_states, gating_output, topk, renormalize, topk_ids, "sigmoid")


def gemma4_routing(
    hidden_states: Tensor,
    gating_output: Tensor,
    topk: int,
    renormalize: bool,
    per_expert_scale: Tensor,
    topk_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Renormalized top-k of a softmax, times a scale per expert: Gemma 4.

    Args:
        hidden_states: as in `fused_topk`, like every argument not named here.
        gating_output: see `fused_topk`.
        topk: see `fused_topk`.
        renormalize: see `fused_topk`; True in the model.
        per_expert_scale: ``(E,)``; bind it with `functools.partial`.
        topk_ids: ``(T, k)`` experts instead of the choice, as in `select_experts`.

    Returns:
        ``topk_weights (T, k)`` float32 and ``topk_ids (T, k)`` int32.

    Raises:
        TypeError, ValueError, NotImplementedError: as `fused_topk` and `adjust_routing`.

    Source:
        transformers ``Gemma4TextRouter``; vLLM ``gemma4`` routing function.
    """
    weights, ids = _topk(hidden_states, gating_output, topk, renormalize, topk_ids)
    num_experts = gating_output.shape[1]
    return adjust_routing(weights, ids, num_experts, per_expert_scale=per_expert_scale)


def sparsemixer(
    hidden_states: Tensor,
    gating_output: Tensor,
    topk: int = 2,
    renormalize: bool = False,
    jitter_eps: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Top-2, each weight a softmax over the experts close to the chosen one: Phi-3.5-MoE.

    For the largest logit ``m`` (ties to the lowest index), experts with
    ``(m - s) / max(|s|, m) > 2 * jitter_eps`` in float32 are left out, and the weight is the
    softmax of ``m`` among the rest, in float64, rounded once. The second expert is chosen in the
    same way among all experts but the first. A logit that is not finite is chosen last and has
    weight 0. The gradient is that of these weights, in which the choice and who is left out are
    constants; the model was trained with an estimator that samples.

    Args:
        hidden_states: ``(T, H)``; only its number of tokens matters.
        gating_output: ``(T, E)`` logits, bf16, fp16 or fp32. E up to 4096.
        topk: must be 2.
        renormalize: must be False.
        jitter_eps: see above; None means 0.01, as in the model.

    Returns:
        ``topk_weights (T, 2)`` float32 and ``topk_ids (T, 2)`` int32.

    Raises:
        TypeError: a wrong dtype.
        ValueError: ``topk`` other than 2, ``renormalize`` True, fewer than two experts, shapes that
            disagree.
        NotImplementedError: as `fused_topk`.

    Source:
        vLLM ``phimoe_routing_function``, transformers ``sparsemixer`` in evaluation.
    """
    if topk != 2:
        raise ValueError(f"topk must be 2, got {topk}")
    checks.flags(renormalize=renormalize)
    if renormalize:
        raise ValueError(f"renormalize must be False, got {renormalize}")
    check_logits(hidden_states, gating_output, topk)
    # The default is not 0.01 itself, because Dynamo turns float defaults into graph inputs.
    jitter = 0.01 if jitter_eps is None else jitter_eps
    checks.factor("jitter_eps", jitter)
    if torch.is_grad_enabled() and gating_output.requires_grad:
        return differentiable_sparsemixer(gating_output, jitter)
    return ops.sparsemixer(gating_output, jitter)
