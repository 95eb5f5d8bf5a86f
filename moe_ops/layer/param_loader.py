"""The ``weight_loader`` attribute of parameters, which loaders of vLLM-style models call."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn


class ParameterLoader:
    """`FusedMoE.weight_loader` of the layer that holds a parameter, as the parameter's attribute.

    The reference to the layer is weak: a cycle of layer and parameters would keep their memory
    until the garbage collector runs. A copied or unpickled loader belongs to no layer; the layer
    that takes the copied parameter attaches a new one.
    """

    def __init__(self, layer: Any = None) -> None:
        self._layer = None if layer is None else weakref.ref(layer)

    @property
    def layer(self) -> Any:
        """The layer; None if there is none, or if it is gone."""
        return None if self._layer is None else self._layer()

    def __call__(
        self,
        param: Tensor,
        loaded_weight: Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,  # noqa: FBT001, FBT002 (the field's signature)
    ) -> bool | None:
        """Call `FusedMoE.weight_loader`; ValueError if the layer is gone."""
        layer = self.layer
        if layer is None:
            raise ValueError("param must belong to a FusedMoE that exists, got one without a layer")
        return layer.weight_loader(
            param, loaded_weight, weight_name, shard_id, expert_id, return_success
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return ParameterLoader, ()


def attach_loader(layer: nn.Module, param: nn.Parameter) -> None:
    """Give a parameter of ``layer`` a ``weight_loader``, unless it has one of a live layer."""
    loader = getattr(param, "weight_loader", None)
    if loader is None or (isinstance(loader, ParameterLoader) and loader.layer is None):
        param.weight_loader = ParameterLoader(layer)  # type: ignore[attr-defined]


# Lets torch.load(.., weights_only=True) read a parameter that was saved by itself.
torch.serialization.add_safe_globals([ParameterLoader])
