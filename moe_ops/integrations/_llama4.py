"""Llama 4, whose experts transformers does not dispatch: the whole MoE block is adapted.

transformers runs every expert on every token, scaled by the router's score (0 for experts that were
not chosen). Here only the chosen experts run, and the first GEMM applies the score.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

from torch import Tensor, nn

from moe_ops.integrations._gates import kind_of
from moe_ops.pipeline.fused_experts import fused_experts

BLOCK = "Llama4TextMoe"


def is_block(module: nn.Module) -> bool:
    """Whether a module is transformers' MoE block of Llama 4, and not just of the same name."""
    return any(
        c.__name__ == BLOCK and c.__module__.startswith("transformers.models.llama4.")
        for c in type(module).__mro__
    )


def is_adapted(module: nn.Module) -> bool:
    """Whether `adapt_block` was applied."""
    forward = module.__dict__.get("forward")
    return getattr(forward, "__func__", None) is block_forward


def block_forward(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """Run as ``Llama4TextMoe.forward``: return the tokens' rows and the router's logits."""
    hidden_states = hidden_states.reshape(-1, self.hidden_dim)
    router_scores, router_logits = self.router(hidden_states)
    # Which experts of score 0 are chosen does not matter: they add nothing.
    topk_weights, topk_ids = router_scores.topk(self.top_k, dim=1)
    routed = _routed(self.experts, hidden_states, topk_weights, topk_ids)
    return self.shared_expert(hidden_states) + routed, router_logits


def _routed(experts: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
    """Run the chosen experts of every token."""
    activation: Any = kind_of(experts.act_fn)
    w1, w2 = experts.gate_up_proj.transpose(1, 2), experts.down_proj.transpose(1, 2)
    return fused_experts(
        x, w1, w2, topk_weights, topk_ids, activation=activation, apply_router_weight_on_input=True
    )


def adapt_block(name: str, block: nn.Module) -> None:
    """Give one block the forward `block_forward`; ``del block.forward`` undoes it.

    Raises:
        NotImplementedError: an activation that this library does not have.
        ValueError: the block has a forward of its own already, such as a hook of accelerate.
    """
    experts: Any = block.experts
    if kind_of(experts.act_fn) is None:
        raise NotImplementedError(
            f"{name} must have an activation of this library, "
            f"got {type(experts.act_fn).__name__} in {type(experts).__name__}"
        )
    if "forward" in block.__dict__:
        raise ValueError(
            f"{name} must not have a forward of its own (adapt a model before accelerate's hooks "
            f"are added), got {block.__dict__['forward']}"
        )
    block.forward = MethodType(block_forward, block)
