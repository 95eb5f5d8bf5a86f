"""Experts that take router logits."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from moe_ops.activation import Activation, MoEActivation, kind_and_key
from moe_ops.pipeline.experts.base import FusedMoEExpertsMonolithic
from moe_ops.pipeline.experts.standard import slot_experts
from moe_ops.pipeline.experts.supports import EVERY_SCHEME, Supports
from moe_ops.pipeline.formats import FusedMoEActivationFormat
from moe_ops.pipeline.gemms import expert_weights
from moe_ops.pipeline.no_ep import quantize_tokens
from moe_ops.pipeline.row_spaces import SlotRows
from moe_ops.routing import select_experts
from moe_ops.tensors import Routing, Rows


class MonolithicExperts(FusedMoEExpertsMonolithic):
    """Router and experts in one call: the operators of `fused_moe` behind one interface.

    Source:
        vLLM ``FusedMoEExpertsMonolithic``.
    """

    SUPPORTS: ClassVar[Supports] = Supports(schemes=EVERY_SCHEME, batch_invariant=True)
    ACTIVATES_IN_GEMM1: ClassVar[bool | None] = True

    @property
    def expects_unquantized_inputs(self) -> bool:
        """Router weights may have to go in before rows are quantized."""
        return True

    @staticmethod
    def activation_format() -> FusedMoEActivationFormat:
        """Standard."""
        return FusedMoEActivationFormat.Standard

    def apply(
        self,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        router_logits: Tensor,
        activation: MoEActivation | Activation | str,
        global_num_experts: int,
        expert_map: Tensor | None,
        a1q_scale: Tensor | None,
        apply_router_weight_on_input: bool,
        num_expert_group: int | None = None,
        e_score_correction_bias: Tensor | None = None,
        routed_scaling_factor: float | None = None,
        topk_group: int | None = None,
    ) -> Tensor:
        """Route as ``moe_config`` says (within groups where they are given), then the experts."""
        config, scheme = self.moe_config, self.quant_config.scheme
        topk_weights, topk_ids, _ = select_experts(
            hidden_states,
            router_logits,
            config.experts_per_token,
            num_expert_group is not None,
            config.renormalize,
            topk_group,
            num_expert_group,
            scoring_func=config.scoring_func,
            e_score_correction_bias=e_score_correction_bias,
            routed_scaling_factor=1 if routed_scaling_factor is None else routed_scaling_factor,
        )
        routing = Routing(topk_weights, topk_ids, expert_map)
        on_input = apply_router_weight_on_input
        rows = Rows(hidden_states)
        if scheme.activation is not None and on_input:  # router weights go in first
            arguments = (self.quant_config, routing, w1.shape[0], on_input)
            rows = Rows(*quantize_tokens(hidden_states, *arguments))
        return slot_experts(
            rows,
            expert_weights(w1, w2, self.quant_config),
            scheme,
            SlotRows.of(routing, w1.shape[0], self.row_tiles(w2)),
            topk_weights,
            kind_and_key(activation)[1],
            config.in_dtype,
            on_input,
        )
