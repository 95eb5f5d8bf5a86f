"""Moving, copying and pickling a layer without changing a bit of what is stored in a scheme."""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from moe_ops.layers.partition import LayerSizes

CAST = ("w13_bias", "w2_bias")
CAST_UNQUANTIZED = (*CAST, "w13_weight", "w2_weight")


class KeepsBits(nn.Module):
    """A module whose stored values and router tensors keep their dtypes."""

    sizes: LayerSizes
    w13_weight: Tensor

    def _apply(self, fn: Any, recurse: bool = True) -> KeepsBits:  # noqa: FBT001 (torch's signature)
        """As in `nn.Module`, but only unquantized weights and biases take another dtype."""
        if recurse:
            for module in self.children():
                module._apply(fn)
        quantized = self.sizes.scheme.weight is not None
        kept = self._kept(CAST if quantized else CAST_UNQUANTIZED)

        def moved(x: Tensor) -> Tensor:
            if id(x) not in kept:
                return fn(x)
            stored = x.data.contiguous()  # as bytes, which no `.to(dtype)` touches
            return fn(stored.view(torch.uint8)).view(stored.dtype)

        super()._apply(moved, recurse=False)
        self.sizes = self.sizes.with_dtype(self.w13_weight.dtype)
        return self

    def _kept(self, cast: Container[str]) -> set[int]:
        tensors = {**self._parameters, **self._buffers}
        return {id(x) for name, x in tensors.items() if name not in cast and x is not None}

    def __getstate__(self) -> dict[str, Any]:
        """With floats of 8 bits as bytes: torch cannot pickle them otherwise."""
        parameters = {
            name: _Bytes(x.data.view(torch.uint8), x.dtype)
            if x is not None and x.is_floating_point() and x.dtype.itemsize == 1
            else x
            for name, x in self._parameters.items()
        }
        return {**self.__dict__, "_parameters": parameters}

    def __setstate__(self, state: dict[str, Any]) -> None:
        parameters = {
            name: nn.Parameter(x.data.view(x.dtype), False) if isinstance(x, _Bytes) else x
            for name, x in state["_parameters"].items()
        }
        super().__setstate__({**state, "_parameters": parameters})


class _Bytes(NamedTuple):
    data: Tensor
    dtype: torch.dtype
