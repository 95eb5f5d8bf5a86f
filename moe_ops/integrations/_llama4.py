"""Llama 4, whose experts transformers does not dispatch: the whole MoE block is adapted.

transformers runs every expert on every token, scaled by the router's score (0 for experts that were
not chosen). Here only the chosen experts run, and the first GEMM applies the score. PEFT's adapters
of the experts run as grouped LoRA, whether PEFT has wrapped the experts before or after `adapt`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from moe_ops.integrations import _peft
from moe_ops.integrations._blocks import check_forward, check_whole, is_of_model, runs
from moe_ops.integrations._gates import kind_of
from moe_ops.pipeline.fused_experts import fused_experts
from moe_ops.pipeline.lora import ExpertLora

BLOCK = "Llama4TextMoe"


def is_block(module: nn.Module) -> bool:
    """Whether a module is transformers' MoE block of Llama 4, and not just of the same name."""
    return is_of_model(module, BLOCK, "llama4")


def is_adapted(module: nn.Module) -> bool:
    """Whether a block runs `block_forward`."""
    return runs(module, block_forward)


def block_forward(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """Run as ``Llama4TextMoe.forward``: return the tokens' rows and the router's logits."""
    hidden_states = hidden_states.reshape(-1, self.hidden_dim)
    router_scores, router_logits = self.router(hidden_states)
    # Which experts of score 0 are chosen does not matter: they add nothing.
    topk_weights, topk_ids = router_scores.topk(self.top_k, dim=1)
    experts, lora = self.experts, None
    if "base_layer" in experts._modules:
        wrappers, experts = _peft.wrappers_of(experts)
        lora = _adapters(wrappers)
    routed = _routed(experts, hidden_states, topk_weights, topk_ids, lora)
    return self.shared_expert(hidden_states) + routed, router_logits


def _adapters(wrappers: list[Any]) -> ExpertLora | None:
    """Return the active adapters, for weights ``(E, N, K)``.

    Llama 4's weights are ``(E, K, N)``. PEFT takes them for ``(E, N, K)``, so that A and B change
    roles.

    Raises:
        NotImplementedError: a call with ``adapter_names``, which PEFT hands to modules by hooks.
    """
    if any(wrapper._forward_pre_hooks for wrapper in wrappers):
        raise NotImplementedError(
            f"adapter_names must be None for adapters of {BLOCK} (set_adapter chooses one for the "
            "batch), got hooks of the experts' modules"
        )
    lora = _peft.active(wrappers)
    if lora is None:
        return None
    w1, w2 = (None if pair is None else (pair[1].mT, pair[0].mT) for pair in lora[:2])
    return ExpertLora(w1, w2)


def _routed(
    experts: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, lora: ExpertLora | None
) -> Tensor:
    """Run the chosen experts of every token."""
    activation: Any = kind_of(experts.act_fn)
    w1, w2 = experts.gate_up_proj.transpose(1, 2), experts.down_proj.transpose(1, 2)
    return fused_experts(
        x,
        w1,
        w2,
        topk_weights,
        topk_ids,
        activation=activation,
        apply_router_weight_on_input=True,
        lora=lora,
    )


def adaptation(name: str, block: Any) -> Callable[[], None]:
    """Return what gives one block the forward `block_forward`; ``del block.forward`` undoes it.

    Raises:
        NotImplementedError: an activation that this library does not have; a block of transformers'
            tensor parallelism.
        ValueError: the block or its experts have a forward of their own already, such as a hook of
            accelerate.
    """
    experts = _peft.wrappers_of(block.experts)[1]
    if kind_of(experts.act_fn) is None:
        raise NotImplementedError(
            f"{name} must have an activation of this library, "
            f"got {type(experts.act_fn).__name__} in {type(experts).__name__}"
        )
    check_whole(name, block)
    check_forward(name, block)
    check_forward(f"{name}.experts", experts)  # which `block_forward` does not call
    return partial(setattr, block, "forward", partial(block_forward, block))
