"""LongCat-Flash, whose experts transformers does not dispatch: some of them return their input.

The ids of these identity experts are larger than the ids of the experts with weights, which
`fused_experts` runs alone: it skips larger ids.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from moe_ops.integrations._blocks import check_forward, check_whole, is_of_model, runs
from moe_ops.integrations._experts import map_for_few_experts
from moe_ops.integrations._gates import kind_of
from moe_ops.pipeline.fused_experts import fused_experts

EXPERTS = "LongcatFlashExperts"


def is_block(module: nn.Module) -> bool:
    """Whether a module is transformers' experts of LongCat-Flash, some of which have weights."""
    return is_of_model(module, EXPERTS, "longcat_flash") and module.gate_up_proj is not None


def is_adapted(module: nn.Module) -> bool:
    """Whether experts run `experts_forward`."""
    return runs(module, experts_forward)


def experts_forward(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Run as ``LongcatFlashExperts.forward``: ``(T, H)``, with gradients."""
    count = self.num_routed_experts
    activation: Any = kind_of(self.act_fn)
    routed = fused_experts(
        hidden_states,
        self.gate_up_proj[:count],
        self.down_proj,
        top_k_weights,
        top_k_index,
        activation=activation,
        expert_map=map_for_few_experts(top_k_index, count),
    )
    weight = top_k_weights.float().masked_fill(top_k_index < count, 0.0).sum(1, keepdim=True)
    unchanged = weight * self.identity_expert(hidden_states)
    return routed + unchanged.to(routed.dtype)


def adaptation(name: str, experts: Any) -> Callable[[], None]:
    """Return what gives experts the forward `experts_forward`; ``del experts.forward`` undoes it.

    Raises:
        NotImplementedError: an activation that this library does not have; experts under
            transformers' tensor parallelism.
        ValueError: the experts have a forward of their own already.
    """
    if kind_of(experts.act_fn) is None:
        raise NotImplementedError(
            f"{name} must have an activation of this library, got {type(experts.act_fn).__name__}"
        )
    check_whole(name, experts)
    check_forward(name, experts)
    return partial(setattr, experts, "forward", partial(experts_forward, experts))
