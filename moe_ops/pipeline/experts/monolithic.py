"""Experts that take router logits."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from moe_ops.activation import Activation, MoEActivation, kind_and_key
from moe_ops.pipeline.autocast import autocast_dtype
from moe_ops.pipeline.config import FusedMoEConfig
from moe_ops.pipeline.experts.base import FusedMoEExpertsMonolithic
from moe_ops.pipeline.experts.supports import EVERY_SCHEME, Supports
from moe_ops.pipeline.formats import FusedMoEActivationFormat
from moe_ops.pipeline.forward import Pass, forward
from moe_ops.pipeline.gathering import Settings
from moe_ops.pipeline.gemms import expert_weights
from moe_ops.routing import RoutingMethodType, select_experts
from moe_ops.tensors import Routing


class _Weighing(NamedTuple):
    """Weights of a routing method: scores of the experts, divided by their sum or not."""

    scoring_func: str
    renormalize: bool


_METHOD = RoutingMethodType
ROUTED = MappingProxyType(
    {
        _METHOD.Default: _Weighing("softmax", renormalize=False),
        _METHOD.Renormalize: _Weighing("softmax", renormalize=True),
        _METHOD.DeepSeekV3: _Weighing("sigmoid", renormalize=True),
        _METHOD.Llama4: _Weighing("sigmoid", renormalize=False),
        _METHOD.RenormalizeNaive: _Weighing("softmax", renormalize=True),
        _METHOD.SigmoidRenorm: _Weighing("sigmoid", renormalize=True),
        _METHOD.MiniMax2: _Weighing("sigmoid", renormalize=True),
        _METHOD.Sigmoid: _Weighing("sigmoid", renormalize=False),
        _METHOD.DeepseekV4: _Weighing("sqrtsoftplus", renormalize=True),
        _METHOD.Unspecified: None,
    }
)
"""Routing methods of `MonolithicExperts`. None: ``scoring_func`` and ``renormalize`` come from the
configuration. Groups, bias and factor are arguments of each call."""


class MonolithicExperts(FusedMoEExpertsMonolithic):
    """Router and experts in one call: the operators of `fused_moe` behind one interface.

    ``moe_config.routing_method`` says how tokens are routed. ``scoring_func`` and ``renormalize``
    count only if the method is ``Unspecified``. ``TopK``, ``Custom`` and ``Simulated`` are not
    supported.

    Raises:
        NotImplementedError: an unsupported routing method; and as `FusedMoEExperts`.

    Source:
        vLLM ``FusedMoEExpertsMonolithic``.
    """

    SUPPORTS: ClassVar[Supports] = Supports(
        schemes=EVERY_SCHEME, batch_invariant=True, routing_methods=ROUTED
    )
    ACTIVATES_IN_GEMM1: ClassVar[bool | None] = True

    def __init__(self, moe_config: FusedMoEConfig, *arguments: Any, **keywords: Any) -> None:
        super().__init__(moe_config, *arguments, **keywords)
        method = moe_config.routing_method
        if method not in ROUTED:
            names = ", ".join(method.name for method in ROUTED)
            raise NotImplementedError(
                f"moe_config.routing_method must be one of {names} for MonolithicExperts, got "
                f"{method!r}"
            )
        self.weighing = ROUTED[method] or _Weighing(moe_config.scoring_func, moe_config.renormalize)

    @property
    def expects_unquantized_inputs(self) -> bool:
        """True: router weights may have to multiply rows before these are quantized."""
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
        """Route as ``moe_config`` says (within groups if they are given), then run the experts."""
        config, scheme = self.moe_config, self.quant_config.scheme

        def route() -> Routing:
            weights, ids, _ = select_experts(
                hidden_states,
                router_logits,
                config.experts_per_token,
                num_expert_group is not None,
                self.weighing.renormalize,
                topk_group,
                num_expert_group,
                scoring_func=self.weighing.scoring_func,
                e_score_correction_bias=e_score_correction_bias,
                routed_scaling_factor=1 if routed_scaling_factor is None else routed_scaling_factor,
            )
            return Routing(weights, ids, expert_map)

        settings = Settings(
            scheme,
            kind_and_key(activation)[1],
            apply_router_weight_on_input,
            config.batch_invariant,
            autocast_dtype(hidden_states) or config.in_dtype,
        )
        step = Pass(expert_weights(w1, w2, self.quant_config), settings)
        return forward(step, hidden_states, route)
