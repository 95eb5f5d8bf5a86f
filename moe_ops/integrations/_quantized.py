"""Experts modules of transformers as targets of `quantize_`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from moe_ops.integrations import _reach, _saving
from moe_ops.integrations._experts import map_for_few_experts, own_weights
from moe_ops.integrations._layers import new_layer, put_layer, quantized_layer
from moe_ops.integrations._offloaded import take_slots
from moe_ops.layer import LayerSizes
from moe_ops.layer.plain import PlainExperts, fill_quantized
from moe_ops.offload.targets import LayerOnHost
from moe_ops.quantization.peaks import Peaks
from moe_ops.quantization.targets import FINDERS, Target
from moe_ops.scheme import Scheme
from moe_ops.scheme.limits import Refusal
from moe_ops.tensors import Routing


@dataclass(frozen=True)
class ExpertsTarget(Target):
    """An experts module of transformers."""

    method: str = ""
    """The method by which another library has quantized the model; empty: none has."""

    def sizes(self) -> LayerSizes:
        """Return the sizes of the weights."""
        return new_layer(self.module, None).sizes

    def refusal(self, scheme: Scheme) -> Refusal | None:
        """Name what the registration does not run, and what is not a plain weight."""
        experts = self.module
        if self.method:
            return ValueError, f"the model is quantized already, by {self.method}"
        layer = quantized_layer(experts)
        if layer is not None:
            return ValueError, f"its weights are quantized already ({layer.scheme.name})"
        reason = _reach.unquantizable(experts)
        return (NotImplementedError, reason) if reason else None

    def weights(self) -> PlainExperts:
        """Return views of the module's parameters."""
        return PlainExperts(*own_weights(self.module)[:4])

    @contextmanager
    def observed(self, peaks: Peaks) -> Iterator[None]:
        """Run the module's experts once more before each call."""

        def look(experts: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x, ids, weights, *_ = (*args, *kwargs.values())
            plain = self.weights()
            gate = experts._apply_gate if experts.has_gate else experts.act_fn
            expert_map = map_for_few_experts(ids, plain.w1.shape[0])
            peaks.observe(x.to(plain.w1.dtype), plain, Routing(weights, ids, expert_map), gate)

        hook = self.module.register_forward_pre_hook(look, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()

    def quantize(self, scheme: Scheme, input_scales: tuple[float, float] | None) -> None:
        """Replace the module's parameters by a `FusedMoE`, in host memory if they are there."""
        plain = self.weights()
        layer = new_layer(self.module, scheme)
        rows = {expert: expert for expert in range(layer.num_experts)}
        fill_quantized(layer, plain, rows, input_scales)
        resident = take_slots(self.module)
        put_layer(self.module, layer)
        if resident is not None:
            LayerOnHost(self.name, layer).put(*resident)

    @classmethod
    def finish(cls, model: nn.Module) -> None:
        """Let `save_pretrained` write the quantized experts."""
        _saving.make_saveable(model)


def experts_modules(model: nn.Module) -> Iterator[Target]:
    """Yield the experts modules of transformers in a model, reached or not.

    Outside a model of transformers only what its decorator has marked is certain.
    """
    of_transformers = any(isinstance(module, PreTrainedModel) for module in model.modules())
    for name, module in _reach.expert_modules(model, ""):
        if of_transformers or _reach.is_decorated(module):
            yield ExpertsTarget(name, module, _saving.other_method(model))


FINDERS.append(experts_modules)
