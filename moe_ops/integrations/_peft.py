"""Adapters of PEFT on experts (``LoraConfig.target_parameters``), run as grouped LoRA.

PEFT wraps an experts module once per parameter and makes ``W + B @ A`` of all experts in every
forward pass. An adapted wrapper passes the factors to the experts' own forward instead, so that
weights are neither copied nor changed, and may be quantized. PEFT finds the weights of quantized
experts by their placeholders (`_placeholders`). Which adapters are active, merged or
disabled is read from the wrappers in every pass. Wrappers are recognized by their attributes; PEFT
is not imported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moe_ops.integrations import _fp8
from moe_ops.integrations._blocks import check_forward
from moe_ops.integrations._experts import HOST, weights_of
from moe_ops.integrations._gates import activation_of
from moe_ops.integrations._layers import NAME, quantized_layer
from moe_ops.pipeline.lora import ExpertLora

PARAMETERS = {"gate_up_proj": "w1", "up_proj": "w1", "down_proj": "w2"}
"""The weight of each parameter of an experts module."""
_ATTRIBUTES = ("parameter_name", "base_layer", "lora_A", "lora_B", "scaling", "num_experts")


def is_wrapper(module: nn.Module) -> bool:
    """Whether a module is PEFT's ``ParamWrapper``."""
    return all(hasattr(module, name) for name in _ATTRIBUTES)


def wrappers_of(outer: Any) -> tuple[list[Any], Any]:
    """Nested wrappers, outermost first, and the experts module inside."""
    wrappers = []
    while is_wrapper(outer):
        wrappers.append(outer)
        outer = outer.base_layer
    return wrappers, outer


def runs_this_library(experts: Any) -> bool:
    """Whether transformers' experts implementation is this library's."""
    return getattr(getattr(experts, "config", None), "_experts_implementation", None) == NAME


def is_adapted(outer: nn.Module) -> bool:
    """Whether the module runs `_forward`."""
    return isinstance(outer.__dict__.get("forward"), partial)


def adaptation(name: str, outer: Any) -> Callable[[], None]:
    """Return what makes nested wrappers run the experts inside by their own forward, with adapters.

    Raises:
        NotImplementedError: experts whose activation this library does not have, or with weights or
            scales that do not run here; an adapter of a parameter that is no weight of the experts.
        ValueError: the module has a forward of its own.
    """
    wrappers, experts = wrappers_of(outer)
    check_forward(name, outer)
    unknown = [w.parameter_name for w in wrappers if w.parameter_name not in PARAMETERS]
    if unknown or activation_of(experts) is None:
        got = f"an adapter of {unknown[0]}" if unknown else "another activation"
        raise NotImplementedError(
            f"{name} must have adapters of {sorted(PARAMETERS)} and an activation of this library, "
            f"got {got}"
        )
    _check_weights(name, experts)
    return partial(_adapt_wrappers, outer, wrappers)


def _check_weights(name: str, experts: Any) -> None:
    """Raise NotImplementedError if adapters do not run beside the weights of an experts module."""
    if not _fp8.is_quantized(experts):
        weights_of(experts)
        return
    _fp8.fp8_weights(experts)
    if experts.activation_scheme == "static" and experts.down_proj.dtype != torch.int8:
        raise NotImplementedError(
            f"{name} must have dynamic scales of activations for adapters, got static scales in "
            f"{type(experts).__name__}"
        )


def _adapt_wrappers(outer: Any, wrappers: list[Any]) -> None:
    outer.forward = partial(_forward, outer)
    for wrapper in wrappers:
        for method in ("merge", "unmerge"):
            setattr(wrapper, method, partial(_change_weight, wrapper, method))


def _forward(outer: Any, *args: Any, **kwargs: Any) -> Tensor:
    """The experts' forward with the active adapters of all wrappers."""
    wrappers, experts = wrappers_of(outer)
    if not runs_this_library(experts):
        result: Tensor = type(outer).forward(outer, *args, **kwargs)
        return result
    if kwargs.get("adapter_names") is not None:
        raise NotImplementedError(
            "adapter_names must be None for adapters of experts (set_adapter chooses one for the "
            "batch, fused_experts(.., lora=ExpertLora(.., lora_ids)) one per token), got "
            f"{kwargs['adapter_names']}"
        )
    kwargs.pop("adapter_names", None)
    out: Tensor = experts(*args, **kwargs, lora=active(wrappers))
    return out


def _change_weight(wrapper: Any, method: str, *args: Any, **kwargs: Any) -> Any:
    """PEFT's ``merge`` or ``unmerge``, which needs a weight that numbers can be added to."""
    experts = wrappers_of(wrapper)[1]
    if has_quantized_weights(experts):
        raise NotImplementedError(
            f"{method} must be called with weights that are not quantized, got quantized ones of "
            f"{type(experts).__name__}: merge into the model before moe_ops.quantize_, or leave "
            "adapters beside it"
        )
    result = getattr(type(wrapper), method)(wrapper, *args, **kwargs)
    if HOST in experts.__dict__:
        experts.renew_slots()
    return result


def has_quantized_weights(experts: Any) -> bool:
    """Whether a module that this library runs has quantized weights of any kind."""
    if quantized_layer(experts) is not None or _fp8.is_quantized(experts):
        return True
    return weights_of(experts).quant_config.scheme.weight is not None


def needs_adapting(experts: Any) -> bool:
    """Whether PEFT's own forward cannot change the weights that this library runs."""
    return HOST in experts.__dict__ or has_quantized_weights(experts)


def active(wrappers: list[Any]) -> ExpertLora | None:
    """The sum of the active adapters of each weight; None: none is active, or they are merged.

    As in PEFT, weights with merged adapters are restored if adapters are disabled, and other
    adapters are left out while one is merged.
    """
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    for wrapper in wrappers:
        if wrapper.disable_adapters and wrapper.merged:
            wrapper.unmerge()
        names = [name for name in wrapper.active_adapters if name in wrapper.lora_A]
        if names and not wrapper.disable_adapters and not wrapper.merged:
            pairs[PARAMETERS[wrapper.parameter_name]] = factors_of(wrapper, names)
    return ExpertLora(pairs.get("w1"), pairs.get("w2")) if pairs else None


def factors_of(wrapper: Any, names: Sequence[str]) -> tuple[Tensor, Tensor]:
    """The factors ``(1, E, r, K)`` and ``(1, E, N, r)`` of a sum of adapters, scaled.

    The product of factors that are concatenated along r is the sum of the adapters' products. PEFT
    keeps ``(E * r, K)``, expert by expert, and ``(N, r * E)``, in which experts alternate.
    """
    first, second, experts = [], [], wrapper.num_experts
    for name in names:
        a, b = wrapper.lora_A[name].weight, wrapper.lora_B[name].weight
        first.append(a.view(experts, -1, a.shape[1]))
        second.append(b.view(b.shape[0], -1, experts).permute(2, 0, 1) * wrapper.scaling[name])
    return torch.cat(first, 1)[None], torch.cat(second, 2)[None]
