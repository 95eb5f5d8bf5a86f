"""Placeholders of the weights that a quantized experts module no longer has as parameters.

PEFT finds weights by their names, and reads shape, dtype and device. Conversions of transformers
read shapes. A placeholder has these, no memory, and no numbers: everything else raises. It is made
when an attribute such as ``experts.down_proj`` is read. The module does not hold it, so that it is
never moved, copied, trained, counted or saved.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")
"""Names of the weights of experts modules."""
PLAIN = "moe_ops_plain"
"""The attribute of a quantized module with each weight's shape and dtype, by name."""


class Placeholder(nn.Parameter):
    """A parameter without numbers."""

    weight: str
    """The name of the weight."""

    @staticmethod
    def of(module: nn.Module, name: str) -> Placeholder:
        """Return the placeholder of a weight, on the device of the module's quantized weights."""
        shape, dtype = getattr(module, PLAIN)[name]
        device = next(module.parameters()).device
        new: Any = torch.Tensor._make_wrapper_subclass
        placeholder: Placeholder = new(
            Placeholder, shape, dtype=dtype, device=device, requires_grad=False
        )
        placeholder.weight = name
        return placeholder

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Raise: there are no numbers to compute with."""
        names = " and ".join(dict.fromkeys(x.weight for x in args if isinstance(x, cls)))
        raise NotImplementedError(
            f"{names or 'weights'} of experts must be plain for {func}, got weights that "
            "moe_ops.quantize_ has quantized: call moe_ops.integrations.transformers.adapt(model) "
            "after PEFT has added adapters, which then run beside the quantized weights; merge "
            "adapters before moe_ops.quantize_"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        """Name the weight, and what is known of it."""
        return f"Placeholder({self.weight}, {tuple(self.shape)}, {self.dtype}, {self.device})"


class _WithPlaceholders(nn.Module):
    """Base of the classes of quantized experts modules."""

    _plain_class: type[nn.Module]
    _placeholders: tuple[str, ...]

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters, and to PEFT the placeholders of the module's own weights.

        FSDP and accelerate call this method as PEFT does, and shard or move what they get. Only the
        calling module tells which of them it is.
        """
        caller: str = sys._getframe(1).f_globals.get("__name__", "")
        if caller.startswith("peft.") and not args and kwargs == {"recurse": False}:
            return iter([(name, getattr(self, name)) for name in self._placeholders])
        return super().named_parameters(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle by the class before, since no module has this one by name."""
        state = super().__reduce_ex__(protocol)[2]
        return _empty, (self._plain_class, self._placeholders), state


def add_placeholders(module: Any, weights: Mapping[str, Tensor]) -> None:
    """Give a quantized module placeholders of the weights that it has lost."""
    setattr(module, PLAIN, {name: (x.shape, x.dtype) for name, x in weights.items()})
    # An entry of None is no parameter to PyTorch, and lets PEFT's own code reach the placeholder.
    module._parameters.update(dict.fromkeys(weights))
    plain: Any = type(module)
    module.__class__ = _class_with(plain, tuple(weights))


@functools.cache
def _class_with(plain: Any, names: tuple[str, ...]) -> type[nn.Module]:
    """Return a subclass of the same name whose attributes ``names`` are placeholders."""
    body = {
        **{name: property(functools.partial(Placeholder.of, name=name)) for name in names},
        "_plain_class": plain, "_placeholders": names, "__module__": plain.__module__,
        "__qualname__": plain.__qualname__, "__doc__": plain.__doc__,
    }  # fmt: skip
    return type(plain.__name__, (_WithPlaceholders, plain), body)


def _empty(plain: Any, names: tuple[str, ...]) -> nn.Module:
    cls = _class_with(plain, names)
    return cls.__new__(cls)
