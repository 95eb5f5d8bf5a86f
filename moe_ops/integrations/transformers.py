"""Hugging Face transformers: importing this module registers the experts implementation "moe_ops".

    import moe_ops.integrations.transformers
    model = AutoModelForCausalLM.from_pretrained(path, experts_implementation="moe_ops")

or ``model.set_experts_implementation("moe_ops")`` on a loaded model. Inference only: call the model
under ``torch.no_grad()`` (as ``generate`` does).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import activations
from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate

from moe_ops.activation import MoEActivation
from moe_ops.pipeline.fused_experts import fused_experts

NAME = "moe_ops"

_ACTIVATIONS: dict[type, MoEActivation] = {
    nn.SiLU: MoEActivation.SILU,
    activations.SiLUActivation: MoEActivation.SILU,
    nn.GELU: MoEActivation.GELU,
    activations.GELUActivation: MoEActivation.GELU,
    activations.GELUTanh: MoEActivation.GELU_TANH,
    activations.NewGELUActivation: MoEActivation.GELU_TANH,
    activations.ReLUSquaredActivation: MoEActivation.RELU2,
}
"""transformers' activation modules that are the gate functions of this library."""

_UNSUPPORTED = {
    "is_transposed": (True, "transposed weights"),
    "has_bias": (True, "biases"),
    "has_gate": (False, "experts without a gate"),
    "is_concatenated": (False, "interleaved gate and up rows"),
    "has_post_expert_norm": (True, "a norm after the experts"),
}
"""Attributes that transformers sets on an experts module: the value not supported, and its name."""


def activation_of(experts: Any) -> MoEActivation:
    """The activation of an experts module.

    Raises:
        NotImplementedError: naming the module's class and what is not supported in it.
    """
    name = type(experts).__name__
    for attribute, (value, what) in _UNSUPPORTED.items():
        if getattr(experts, attribute, not value) == value:
            raise NotImplementedError(
                f'experts_implementation="moe_ops" must not have {what} in this version, '
                f"got {name} with {attribute}={value}"
            )
    if type(experts)._apply_gate is not _default_apply_gate:
        raise NotImplementedError(
            f'experts_implementation="moe_ops" must have the default gate in this version, '
            f"got {name} with an _apply_gate of its own"
        )
    function: Any = experts.act_fn
    if type(function) not in _ACTIVATIONS:
        raise NotImplementedError(
            f'experts_implementation="moe_ops" must have an activation of '
            f"{sorted({a.value for a in _ACTIVATIONS.values()})}, got {type(function).__name__} "
            f"in {name}"
        )
    return _ACTIVATIONS[type(function)]


def moe_ops_experts(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The experts forward of transformers, by `moe_ops.fused_experts`.

    Args:
        self: an experts module of the default layout: ``gate_up_proj (E, 2I, H)`` with gate rows
            first, ``down_proj (E, H, I)``.
        hidden_states: ``(T, H)``.
        top_k_index: ``(T, k)`` int64; ids >= E (expert parallelism's sentinels) are skipped.
        top_k_weights: ``(T, k)``, applied after the down projection.

    Returns:
        ``(T, H)``, dtype of ``hidden_states``.
    """
    activation = activation_of(self)
    return fused_experts(
        hidden_states,
        self.gate_up_proj,
        self.down_proj,
        top_k_weights,
        top_k_index,
        activation=activation,
    )


def _no_fp8(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    raise NotImplementedError(
        f'experts_implementation="moe_ops" must have unquantized experts in this version, '
        f"got {type(self).__name__}"
    )


ALL_EXPERTS_FUNCTIONS.register(NAME, moe_ops_experts)
# transformers accepts a name that stands in either mapping and fails later with a KeyError.
ALL_FP8_EXPERTS_FUNCTIONS.register(NAME, _no_fp8)
