"""What an experts module of transformers holds, as `fused_experts` takes it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Weights(NamedTuple):
    """Views of an experts module's parameters; nothing is copied."""

    w1: Tensor
    """``(E, 2I, H)``, or ``(E, I, H)`` without a gate."""
    w2: Tensor
    """``(E, H, I)``."""
    w1_bias: Tensor | None
    w2_bias: Tensor | None


def weights_of(experts: Any) -> Weights:
    """The weights of a module decorated with ``use_experts_implementation``, any layout.

    Raises:
        NotImplementedError: the module norms what an expert returns (``has_post_expert_norm``).
    """
    if getattr(experts, "has_post_expert_norm", False):
        raise NotImplementedError(
            f'experts_implementation="moe_ops" must not have a norm after each expert in this '
            f"version, got {type(experts).__name__} with has_post_expert_norm=True"
        )
    has_gate, has_bias = experts.has_gate, experts.has_bias
    w1, w2 = experts.gate_up_proj if has_gate else experts.up_proj, experts.down_proj
    if experts.is_transposed:
        w1, w2 = w1.transpose(1, 2), w2.transpose(1, 2)
    if not has_bias:
        return Weights(w1, w2, None, None)
    w1_bias = experts.gate_up_proj_bias if has_gate else experts.up_proj_bias
    return Weights(w1, w2, w1_bias, experts.down_proj_bias)


def map_for_few_experts(topk_ids: Tensor, num_experts: int) -> Tensor | None:
    """An expert map where a rank of expert parallelism has fewer experts than a token has slots.

    `fused_experts` rejects k > E. There it is sound: the ids of other ranks are sentinels >= E.
    """
    k = topk_ids.shape[1]
    if k <= num_experts:
        return None
    ids = torch.arange(k, device=topk_ids.device)
    return torch.where(ids < num_experts, ids, -1)
