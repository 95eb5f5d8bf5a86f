"""The configuration of a layer: sizes, routing and parallelism, without tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from moe_ops import checks
from moe_ops.activation import Activation, MoEActivation, kind_and_key
from moe_ops.brief import brief
from moe_ops.parallel import FusedMoEParallelConfig
from moe_ops.routing import SCORING_FUNCS, RoutingMethodType


@dataclass(frozen=True, repr=False)
class FusedMoEConfig:
    """What the choice of an implementation needs to know about a Mixture-of-Experts layer.

    Args:
        num_experts: E, global.
        experts_per_token: k.
        hidden_dim: H.
        intermediate_size: I, per partition.
        num_local_experts: El.
        activation: a `MoEActivation`, its name, or an `Activation`.
        device: where the layer runs.
        routing_method: a `RoutingMethodType`.
        moe_parallel_config: how the layer is spread over ranks.
        in_dtype: dtype of the activations.
        renormalize: whether a token's router weights are divided by their sum.
        scoring_func: the router's scoring function.
        router_logits_dtype: dtype of the router's logits; None: ``in_dtype``.
        has_bias: whether the experts have biases.
        is_act_and_mul: whether the activation is gated.
        max_num_tokens: rows of an expert in the Batched format; None: the Standard format.
        batch_invariant: whether the bits of a token's result may not depend on other tokens; see
            `fused_experts`.

    Raises:
        ValueError: sizes that do not fit each other; an unknown activation or ``scoring_func``.
        TypeError: a field of the wrong type; a dtype other than bf16, fp16 and fp32.
    """

    num_experts: int
    experts_per_token: int
    hidden_dim: int
    intermediate_size: int
    num_local_experts: int
    activation: MoEActivation | Activation | str
    device: torch.device | str
    routing_method: RoutingMethodType
    moe_parallel_config: FusedMoEParallelConfig = field(default_factory=FusedMoEParallelConfig)
    in_dtype: torch.dtype = torch.bfloat16
    renormalize: bool = True
    scoring_func: str = "softmax"
    router_logits_dtype: torch.dtype | None = None
    has_bias: bool = False
    is_act_and_mul: bool = True
    max_num_tokens: int | None = None
    batch_invariant: bool = False

    __repr__ = brief

    def __post_init__(self) -> None:
        object.__setattr__(self, "device", checks.device("device", self.device))
        self._check_kinds()
        for name in ("num_experts", "hidden_dim", "intermediate_size", "num_local_experts"):
            checks.at_least(1, **{name: getattr(self, name)})
        if self.max_num_tokens is not None:
            checks.at_least(1, max_num_tokens=self.max_num_tokens)
        checks.topk("experts_per_token", self.experts_per_token, self.num_experts)
        if self.num_local_experts > self.num_experts:
            raise ValueError(
                f"num_local_experts must be at most num_experts = {self.num_experts}, "
                f"got {self.num_local_experts}"
            )
        checks.one_of("scoring_func", self.scoring_func, SCORING_FUNCS)
        kind, _ = kind_and_key(self.activation)
        if kind.is_gated != self.is_act_and_mul:
            raise ValueError(
                f"is_act_and_mul must be {kind.is_gated} for activation {kind.value}, "
                f"got {self.is_act_and_mul}"
            )

    def _check_kinds(self) -> None:
        """Raise TypeError for a field of the wrong type."""
        flags = ("renormalize", "has_bias", "is_act_and_mul", "batch_invariant")
        checks.flags(**{name: getattr(self, name) for name in flags})
        checks.instance("routing_method", self.routing_method, RoutingMethodType)
        checks.instance("moe_parallel_config", self.moe_parallel_config, FusedMoEParallelConfig)
        checks.dtype_of("in_dtype", self.in_dtype, checks.FLOATS)
        logits = (*checks.FLOATS, None)
        checks.dtype_of("router_logits_dtype", self.router_logits_dtype, logits)

    @property
    def weight_shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Rows and columns of an expert's two weights, in numbers."""
        rows = self.intermediate_size * (2 if self.is_act_and_mul else 1)
        return (rows, self.hidden_dim), (self.hidden_dim, self.intermediate_size)

    @property
    def activation_kind(self) -> MoEActivation:
        """The activation without its numbers."""
        return kind_and_key(self.activation)[0]
