"""Modules that `quantize_` can quantize: one class for each kind."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from moe_ops import ops
from moe_ops.layer import FusedMoE, LayerSizes, UnquantizedFusedMoEMethod
from moe_ops.layer.partition import aligned_sizes
from moe_ops.layer.plain import PlainExperts, quantize_layer
from moe_ops.layer.rank_checks import held_by, taken_by
from moe_ops.pipeline.lora import ExpertLora
from moe_ops.quantization.peaks import Peaks
from moe_ops.scheme import Scheme
from moe_ops.scheme.limits import Refusal
from moe_ops.tensors import Routing


@dataclass(frozen=True)
class Target(ABC):
    """A module whose experts can be quantized in place."""

    name: str
    """Path of the module in the model, as in ``named_modules``."""
    module: Any

    @abstractmethod
    def sizes(self) -> LayerSizes:
        """Return the sizes of the module's experts."""

    @abstractmethod
    def refusal(self, scheme: Scheme) -> Refusal | None:
        """Return the exception to raise and its reason if the module cannot be quantized."""

    @abstractmethod
    def weights(self) -> PlainExperts:
        """Return the plain weights."""

    @abstractmethod
    def observed(self, peaks: Peaks) -> AbstractContextManager[None]:
        """Note the inputs of the module's GEMMs in ``peaks`` while the context is open."""

    @abstractmethod
    def quantize(self, scheme: Scheme, input_scales: tuple[float, float] | None) -> None:
        """Replace the module's weights; the caller has called `check`."""

    @classmethod  # noqa: B027 (a default)
    def finish(cls, model: nn.Module) -> None:
        """Note in the model what has been quantized, once all targets are."""

    @property
    def full_name(self) -> str:
        """The module's name as errors give it."""
        return f"model.{self.name}" if self.name else "model"

    def check(self, scheme: Scheme) -> None:
        """Check that `quantize` will succeed.

        Raises:
            NotImplementedError: a module of another kind or layout.
            ValueError: weights that are quantized already, or that the scheme cannot hold.
        """
        taken = taken_by(self.module, self.held())
        refusal = self.refusal(scheme)
        if taken is not None:
            refusal = NotImplementedError, f"it has {taken}"
        if refusal is not None:
            error, reason = refusal
            raise error(
                f"model must have plain experts of a known kind (modules= leaves others out), got "
                f"{type(self.module).__name__} {self.name!r}: {reason}"
            )
        plain, sizes, quant = self.weights(), self.sizes(), scheme.weight
        for name, w in zip(PlainExperts._fields, plain, strict=True):
            if w is not None and w.is_meta:
                raise ValueError(
                    f"{self.full_name} must hold numbers, got {name} on meta (a device_map that "
                    "offloads to the CPU or the disk leaves it there)"
                )
        width = sizes.intermediate_size
        per_byte = 1 if quant is None else quant.element.values_per_byte
        if sizes.hidden_size % per_byte or width % per_byte:
            raise ValueError(
                f"{self.full_name} must have even sizes for 4-bit scheme {scheme.name}, got "
                f"H = {sizes.hidden_size} and I = {width}"
            )
        aligned_sizes(replace(sizes, scheme=scheme), width, 1)
        for name, w in zip(PlainExperts._fields, plain, strict=True):
            self._check_finite(name, w)

    def held(self) -> dict[str, Tensor | None]:
        """Return the module's parameters, also those that a wrapper computes, by name."""
        stored = (name.removesuffix("_orig") for name in self.module._parameters)  # of pruning
        names = (*stored, *getattr(self.module, "parametrizations", ()))
        return {name: getattr(self.module, name) for name in names}

    def _check_finite(self, name: str, w: Tensor | None) -> None:
        for expert, part in enumerate(() if w is None else w):
            if not bool(part.isfinite().all()):
                raise ValueError(
                    f"{self.full_name} must have finite weights, got others in {name} of "
                    f"expert {expert}"
                )


class LayerTarget(Target):
    """A `FusedMoE`."""

    module: FusedMoE

    def sizes(self) -> LayerSizes:
        """Return the layer's own sizes."""
        return self.module.sizes

    def refusal(self, scheme: Scheme) -> Refusal | None:
        """Name what must be different."""
        layer = self.module
        parallel = layer.moe_parallel_config
        if layer.scheme.weight is not None:
            return ValueError, f"its weights are quantized already ({layer.scheme.name})"
        if layer.state.kernel is not None:
            return ValueError, "its kernel is for unquantized weights (set layer.kernel afterwards)"
        if type(layer.quant_method) is not UnquantizedFusedMoEMethod:
            return NotImplementedError, f"it has a {type(layer.quant_method).__name__} of its own"
        if parallel.tp_size > 1:
            reason = "ranks hold parts of its experts (load_checkpoint(.., quantize=True) works)"
            return NotImplementedError, reason
        if scheme.input_scale_names and parallel.ep_size > 1:
            reason = "ranks would find different static scales for their own experts"
            return NotImplementedError, reason
        return None

    def weights(self) -> PlainExperts:
        """Return the layer's parameters."""
        return PlainExperts.of_layer(self.module)

    def held(self) -> dict[str, Tensor | None]:
        """Return the layer's parameters by name."""
        return held_by(self.module)

    @contextmanager
    def observed(self, peaks: Peaks) -> Iterator[None]:
        """Observe behind the layer's routing."""
        layer = self.module
        before = layer.state
        layer.state = replace(before, quant_method=_Observing(peaks))
        try:
            yield
        finally:
            layer.state = replace(layer.state, quant_method=before.quant_method)

    def quantize(self, scheme: Scheme, input_scales: tuple[float, float] | None) -> None:
        """Change the layer's scheme, parameters and method."""
        quantize_layer(self.module, scheme, input_scales)


class _Observing(UnquantizedFusedMoEMethod):
    """Runs a layer as before, and notes the inputs of its GEMMs."""

    def __init__(self, peaks: Peaks) -> None:
        super().__init__()
        self.peaks = peaks

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts_input: Tensor | None = None,
        lora: ExpertLora | None = None,
    ) -> Any:
        if lora is not None:
            raise NotImplementedError("lora must be None while calibrate runs, got adapters")
        routing = Routing(topk_weights, topk_ids, layer.expert_map)
        plain = PlainExperts(layer.w13_weight, layer.w2_weight, layer.w13_bias, layer.w2_bias)
        gate = partial(ops.activation, activation=layer.activation)
        on_input = layer.apply_router_weight_on_input
        self.peaks.observe(x, plain, routing, gate, weight_on_input=on_input)
        return super().apply(layer, x, topk_weights, topk_ids, shared_experts_input)


Finder = Callable[[nn.Module], Iterator[Target]]


def layers(model: nn.Module) -> Iterator[Target]:
    """Yield the `FusedMoE` layers of a model that belong to no other kind of target."""
    for name, module in model.named_modules():
        if isinstance(module, FusedMoE):
            yield LayerTarget(name, module)


FINDERS: list[Finder] = [layers]
"""Functions that find the targets of a model; integrations add theirs when they are imported."""
