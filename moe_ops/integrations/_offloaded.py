"""Experts modules of transformers whose experts are in host memory.

A quantized module's experts are in its `FusedMoE`, which is moved like any other. A module with
weights of its own keeps them as parameters, by their names, on the host: its class becomes a
subclass of the same name that leaves them there. Its forward runs the slots (`HOST`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.integrations.finegrained_fp8 import FP8Experts

from moe_ops.integrations import _fp8, _mxfp4, _peft, _reach, _torchao
from moe_ops.integrations._blocks import runs
from moe_ops.integrations._experts import HOST, Weights, own_weights
from moe_ops.integrations._layers import NAME, quantized_layer
from moe_ops.offload.targets import FINDERS, HostTarget, LayerOnHost
from moe_ops.pipeline.gemms import expert_weights
from moe_ops.pipeline.host_experts import HostExperts, host_experts, place_in, refill, store
from moe_ops.residency import Amount
from moe_ops.tensors import ExpertWeights

RESIDENT = "moe_ops_resident"
"""The attribute of a module with its number of resident experts and their device."""
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
"""Names that configurations have for k."""


class ExpertsOnHost(HostTarget):
    """An experts module with weights of its own."""

    def reason_against(self) -> str | None:
        """Name what this library does not run, or not from host memory."""
        experts, own = self.module, list(self.module.parameters(recurse=False))
        if _mxfp4.is_experts(experts):
            if runs(experts, _mxfp4.experts_forward):
                return None
            return "its MXFP4 weights are not adapted: call adapt(model) first"
        chosen = getattr(experts.config, "_experts_implementation", None)
        if chosen != NAME:
            return f'its experts_implementation is {chosen!r}, not "{NAME}"'
        if any(map(_torchao.is_torchao_tensor, own)):
            return "its weights are torchao tensors (moe_ops.quantize_ makes others)"
        if _fp8.is_quantized(experts):
            static = experts.activation_scheme == "static" and "static activation scales"
            return _fp8.unsupported(experts) or static or None
        wrapped = [x for x in own if type(x) is not nn.Parameter]
        return f"its weights are {type(wrapped[0]).__name__}" if wrapped else None

    def amount(self) -> Amount:
        """Return the sizes of the weights."""
        weights = _expert_weights(_own(self.module))
        size = sum(x[0].nbytes for weight in weights[:2] for x in weight[:5] if x is not None)
        experts, k = weights.w1.data.shape[0], _top_k(self.module)
        return Amount(experts, min(k, experts), size)

    def device(self) -> torch.device:
        """Return the device of the slots, or of the weights."""
        resident = getattr(self.module, RESIDENT, None)
        return self.module.down_proj.device if resident is None else resident[1]

    def host_experts(self) -> HostExperts | None:
        """Return the slots."""
        return getattr(self.module, HOST, None)

    def put(self, resident: int | None, device: torch.device) -> None:
        """Change the module's parameters and its class."""
        if resident is None or resident >= self.amount().num_experts:
            leave(self.module, device)
        else:
            hold(self.module, resident, device)


@dataclass(frozen=True)
class QuantizedOnHost(LayerOnHost):
    """The layer inside of an experts module that `quantize_` has quantized."""

    top_k: int = 1
    """k of the model, which the layer does not know."""

    def amount(self) -> Amount:
        """Return the layer's sizes with the k of the model."""
        amount = super().amount()
        return amount._replace(top_k=min(self.top_k, amount.num_experts))


def _top_k(experts: Any) -> int:
    """Return k of the experts' model; 1 if its configuration has another name for it."""
    config = getattr(experts, "config", None)
    counts = (getattr(config, name, None) for name in TOP_K)
    return next((k for k in counts if isinstance(k, int)), 1)


def _is_known(module: nn.Module) -> bool:
    """Whether a module is of a kind whose weights this library finds."""
    own = _mxfp4.is_experts(module) or isinstance(module, FP8Experts)
    return own or _reach.is_decorated(module)


def modules_on_host(model: nn.Module) -> Iterator[HostTarget]:
    """Yield the experts modules of transformers in a model."""
    for name, module in model.named_modules():
        if _peft.is_wrapper(module):
            continue
        layer = quantized_layer(module) if _reach.is_decorated(module) else None
        if layer is not None:
            yield QuantizedOnHost(name, layer, _top_k(module))
        elif _is_known(module):
            yield ExpertsOnHost(name, module)


FINDERS.append(modules_on_host)


def _own(experts: Any) -> Weights:
    """Return a module's own weights, wherever they are."""
    if _mxfp4.is_experts(experts):
        return _mxfp4.mxfp4_weights(experts)
    return _fp8.fp8_weights(experts) if _fp8.is_quantized(experts) else own_weights(experts)


def _expert_weights(own: Weights) -> ExpertWeights:
    w1, w2, b1, b2 = (None if x is None else x.detach() for x in own[:4])
    config = own.quant_config
    return expert_weights(w1, w2, config, config.biases(b1, b2))  # type: ignore[arg-type]


@torch.no_grad()
def hold(
    experts: Any, resident: int, device: torch.device, fill: Callable[[], None] | None = None
) -> None:
    """Put a module's experts in host memory, ``resident`` of them on the device too.

    Args:
        experts: the module.
        resident: the number of experts on the device.
        device: the device on which experts run.
        fill: writes the weights into the parameters once they are in host memory; None: they hold
            the weights already.
    """
    weights = _expert_weights(_own(experts))
    held = store(weights, pinned=device.type == "cuda")
    for name, x in list(experts.named_parameters(recurse=False)):
        y = place_in(x.detach(), weights, held)
        y = x.detach().cpu().contiguous() if y is None else y
        experts.register_parameter(name, nn.Parameter(y, requires_grad=False))
    if fill is not None:
        fill()
        refill(held.weights, _expert_weights(_own(experts)))
    made = host_experts(held, _own(experts).quant_config, resident, device)
    experts.__dict__[HOST], experts.__dict__[RESIDENT] = made, (resident, device)
    if not isinstance(experts, _OnHost):
        plain: Any = type(experts)
        experts.__class__ = _class_on_host(plain)


def leave(experts: Any, device: torch.device) -> None:
    """Put all experts on the device, as a module without host memory has them."""
    take_slots(experts)
    for x in experts.parameters(recurse=False):
        x.data = x.data.to(device, copy=True)


def take_slots(experts: Any) -> tuple[int, torch.device] | None:
    """Take the slots from a module, whose parameters stay on the host.

    Returns:
        The number of resident experts and their device; None for a module without slots.
    """
    if not isinstance(experts, _OnHost):
        return None
    experts.__dict__.pop(HOST, None)
    resident: tuple[int, torch.device] = experts.__dict__.pop(RESIDENT)
    experts.__class__ = experts._plain_class  # type: ignore[assignment]
    return resident


class _OnHost(nn.Module):
    """Base of the classes of modules whose experts are in host memory."""

    _plain_class: type[nn.Module]

    def _apply(self, fn: Any, recurse: bool = True) -> Any:  # noqa: FBT001 (torch's signature)
        """Apply ``fn`` to all but the weights, which stay on the host; the slots follow."""
        resident, device = self.__dict__[RESIDENT]
        own = self._parameters
        first = next(x for x in own.values() if x is not None)
        dtype = first.dtype if first.is_floating_point() and first.itemsize > 1 else torch.bfloat16
        probe = fn(torch.empty(0, dtype=dtype, device=device))
        if probe.is_meta:
            raise NotImplementedError("experts in host memory must not be moved to meta")
        try:
            self._parameters = {}
            super()._apply(fn, recurse)
        finally:
            self._parameters = own
        if probe.dtype != dtype:
            for x in own.values():
                if x is not None and x.dtype == dtype:
                    x.data = x.data.to(probe.dtype)
        if probe.dtype != dtype or probe.device != device:
            hold(self, resident, probe.device)
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Load into the store, and forget what the slots hold."""
        super()._load_from_state_dict(*args, **kwargs)
        self.renew_slots()

    def renew_slots(self) -> None:
        """Make new slots, once the parameters have changed: capture CUDA graphs after this."""
        hold(self, *self.__dict__[RESIDENT])

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle by the class before, since no module has this one by name."""
        state: Any = super().__reduce_ex__(protocol)[2]
        return _new_instance, (self._plain_class,), {**state, HOST: None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Make slots anew."""
        super().__setstate__(state)
        hold(self, *state[RESIDENT])


@functools.cache
def _class_on_host(plain: Any) -> type[nn.Module]:
    """Return a subclass of the same name whose weights stay on the host."""
    body = {
        "_plain_class": plain, "__module__": plain.__module__, "__qualname__": plain.__qualname__,
        "__doc__": plain.__doc__,
    }  # fmt: skip
    return type(plain.__name__, (_OnHost, plain), body)


def _new_instance(plain: Any) -> nn.Module:
    cls = _class_on_host(plain)
    return cls.__new__(cls)
