"""Adapters of PEFT on experts (``LoraConfig.target_parameters``), run as grouped LoRA.

PEFT wraps an experts module once per parameter and makes ``W + B @ A`` of all experts in every
forward pass. An adapted wrapper passes the factors to `fused_experts` instead, so that weights are
neither copied nor changed, and may be quantized. Wrappers are recognized by their attributes; PEFT
is not imported.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from moe_ops.integrations._experts import map_for_few_experts, weights_of
from moe_ops.integrations._gates import activation_of
from moe_ops.pipeline.fused_experts import fused_experts
from moe_ops.pipeline.lora import ExpertLora

PARAMETERS = {"gate_up_proj": "w1", "up_proj": "w1", "down_proj": "w2"}
"""The weight of each parameter of an experts module."""
_ATTRIBUTES = ("parameter_name", "base_layer", "lora_A", "lora_B", "scaling", "num_experts")


def is_wrapper(module: nn.Module) -> bool:
    """Whether a module is PEFT's ``ParamWrapper``."""
    return all(hasattr(module, name) for name in _ATTRIBUTES)


def wrappers_of(outer: Any) -> tuple[list[Any], Any]:
    """Nested wrappers, outermost first, and the experts module inside."""
    found = []
    while is_wrapper(outer):
        found.append(outer)
        outer = outer.base_layer
    return found, outer


def is_adapted(outer: nn.Module) -> bool:
    """Whether `adapt_wrappers` has given the module its forward."""
    return isinstance(outer.__dict__.get("forward"), partial)


def adapt_wrappers(name: str, outer: Any) -> None:
    """Run the experts inside of nested wrappers by `fused_experts`, with grouped LoRA.

    Raises:
        NotImplementedError: experts whose activation this library does not have; an adapter of a
            parameter that is no weight of the experts.
        ValueError: the module has a forward of its own.
    """
    wrappers, experts = wrappers_of(outer)
    if "forward" in outer.__dict__:
        raise ValueError(f"{name}.forward must be that of its class to be adapted, got another")
    unknown = [w.parameter_name for w in wrappers if w.parameter_name not in PARAMETERS]
    if unknown or activation_of(experts) is None:
        got = f"an adapter of {unknown[0]}" if unknown else "another activation"
        raise NotImplementedError(
            f"{name} must have adapters of {sorted(PARAMETERS)} and an activation of this library, "
            f"got {got}"
        )
    outer.forward = partial(_forward, outer)


def _forward(
    outer: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The experts' forward with the active adapters of all wrappers."""
    wrappers, experts = wrappers_of(outer)
    w1, w2, w1_bias, w2_bias, config = weights_of(experts)
    x = hidden_states if config is not None else hidden_states.to(w1.dtype)
    out = fused_experts(
        x, w1, w2, top_k_weights, top_k_index, activation=activation_of(experts) or "silu",
        expert_map=map_for_few_experts(top_k_index, w1.shape[0]), w1_bias=w1_bias,
        w2_bias=w2_bias, quant_config=config, lora=active(wrappers),
    )  # fmt: skip
    return out.to(hidden_states.dtype)


def active(wrappers: list[Any]) -> ExpertLora | None:
    """The active adapters of nested wrappers; None: none is active, or they are merged.

    Raises:
        NotImplementedError: several active adapters of one parameter.
    """
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    for wrapper in wrappers:
        names = [n for n in wrapper.active_adapters if n in wrapper.lora_A]
        if wrapper.disable_adapters or wrapper.merged or not names:
            continue
        if len(names) > 1:
            raise NotImplementedError(
                f"at most one adapter of {wrapper.parameter_name} must be active, got {names}"
            )
        pairs[PARAMETERS[wrapper.parameter_name]] = factors_of(wrapper, names[0])
    return ExpertLora(pairs.get("w1"), pairs.get("w2")) if pairs else None


def factors_of(wrapper: Any, name: str) -> tuple[Tensor, Tensor]:
    """The factors ``(1, E, r, K)`` and ``(1, E, N, r)`` of an adapter, scaled.

    PEFT keeps ``(E * r, K)``, expert by expert, and ``(N, r * E)``, in which experts alternate.
    """
    a, b = wrapper.lora_A[name].weight, wrapper.lora_B[name].weight
    experts = wrapper.num_experts
    a = a.view(1, experts, -1, a.shape[1])
    b = b.view(b.shape[0], -1, experts).permute(2, 0, 1)[None]
    return a, b * wrapper.scaling[name]
