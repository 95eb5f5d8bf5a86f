"""The parameters of a layer: their names, shapes and dtypes follow from its scheme."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from functools import lru_cache
from operator import is_
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn

from moe_ops.layer.partition import LayerSizes
from moe_ops.loading.names import SUFFIX
from moe_ops.scheme import FusedMoEQuantConfig, Quant, Scheme
from moe_ops.scheme.quant_config import FIELDS

PARAMETER_NAMES = tuple(f"{which}_{end}" for end in SUFFIX.values() for which in ("w13", "w2"))
"""All names that parameters of experts may have, in their order."""


class FusedMoeWeightScaleSupported(Enum):
    """Which elements share a scale, by the names that weight loaders use."""

    TENSOR = "tensor"
    CHANNEL = "channel"
    GROUP = "group"
    BLOCK = "block"

    @classmethod
    def of(cls, quant: Quant) -> FusedMoeWeightScaleSupported:
        """Return the value for a weight's `Quant`."""
        return cls(quant.granularity)


class ParameterSpec(NamedTuple):
    """Name, kind, shape and dtype of one parameter."""

    name: str
    kind: str
    """``weight``, ``scale``, ``zero_point``, ``global_scale``, ``channel_scale``, ``exponents``,
    ``input_scale`` or ``bias``."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    fill: float = 0
    """What it holds before it is loaded, and in its padding. A missing static scale is NaN, which
    shows in every result."""

    @property
    def is_w13(self) -> bool:
        """Whether the parameter belongs to the first GEMM."""
        return self.name.startswith("w13")


@lru_cache(maxsize=64)
def parameter_specs(sizes: LayerSizes) -> Mapping[str, ParameterSpec]:
    """Return the parameters by name: ``w13_weight``, ``w2_weight``, then the rest.

    ``w13`` has gate rows, then up rows (alternating for an interleaved activation). Scales have the
    shape `Quant.weight_scale_shape`. Global scales and scales of whole tensors are ``(El, 2)``
    (gate, up) if ``w13`` has separate gate and up rows, else ``(El,)``.

    Returns:
        A mapping of names to specs that cannot be changed.
    """
    specs = (spec for w, (n, k) in sizes.weights.items() for spec in _of_weight(w, n, k, sizes))
    by_name = {spec.name: spec for spec in specs}
    return MappingProxyType({name: by_name[name] for name in PARAMETER_NAMES if name in by_name})


def _of_weight(which: str, n: int, k: int, sizes: LayerSizes) -> Iterator[ParameterSpec]:
    experts, quant = sizes.num_experts, sizes.scheme.weight

    def spec(
        kind: str, shape: tuple[int, ...], dtype: torch.dtype, fill: float = 0
    ) -> ParameterSpec:
        return ParameterSpec(f"{which}_{SUFFIX[kind]}", kind, (experts, *shape), dtype, fill)

    if sizes.has_bias:
        yield spec("bias", (n,), sizes.dtype)
    if quant is None:
        yield spec("weight", (n, k), sizes.dtype)
        return
    element = quant.element
    per_byte = element.values_per_byte
    # The code of zero; in both nibbles, if two codes share a byte.
    zero = element.offset * (17 if per_byte == 2 else 1)
    yield spec("weight", (n, k // per_byte), quant.dtype, zero)
    halves = (2,) if which == "w13" and sizes.gated and not sizes.interleaved else ()
    shape = halves if quant.per_tensor else quant.weight_scale_shape(experts, n, k)[1:]
    parts = {
        "scale": (shape, quant.dtype_of_scales(sizes.dtype)),
        "zero_point": (quant.zero_point_shape(experts, n, k)[1:], torch.uint8),
        "channel_scale": ((n,), torch.float32),
        "global_scale": (halves, torch.float32),
    }
    for kind in quant.parts:
        yield spec(kind, *parts[kind])
    held = None if sizes.exact_of is None else sizes.exact_of.weight
    if held is not None:
        yield spec("exponents", held.weight_scale_shape(experts, n, k)[1:], held.scale_dtype)
    if sizes.scheme.input_scale_names:
        yield spec("input_scale", (), torch.float32, torch.nan)


def stored_config(scheme: Scheme, parameters: Mapping[str, Any]) -> FusedMoEQuantConfig:
    """Return the scheme, the scales and the biases of parameters by name, which may be empty."""
    tensors: dict[str, Any] = {}
    for kind, names in FIELDS.items():
        for name, which in zip(names, ("w13", "w2"), strict=True):
            tensors[name] = parameters[f"{which}_{SUFFIX[kind]}"]
    for name, which in zip(scheme.input_scale_names, ("w13", "w2"), strict=False):
        scale = parameters[f"{which}_{SUFFIX['input_scale']}"]
        tensors[name] = None if scale is None else scale[:1]
    return FusedMoEQuantConfig(scheme, **tensors)


class Held:
    """Parameters of a layer, by name, of which something was made."""

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        self.named = {**parameters}
        own = [x for name, x in self.named.items() if name.endswith(SUFFIX["input_scale"])]
        # Under FakeTensorMode and torch.func there is nothing behind a tensor.
        self.views = [(x, x.detach()[:1]) for x in own if type(x) is nn.Parameter]
        """Static scales, and a view of each such as configurations have."""

    def are_of(self, parameters: Mapping[str, Any]) -> bool:
        """Whether they are still these parameters, in the same memory.

        A view stays behind if a parameter gets other memory: by ``data``, or in a copy.
        """
        named = self.named
        if not all(map(is_, map(parameters.get, named), named.values())):
            return False
        if not self.views or torch.compiler.is_compiling():  # compiled code makes its views
            return True
        return all(x.data_ptr() == view.data_ptr() for x, view in self.views)
