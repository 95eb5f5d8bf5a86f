"""Layers of a model whose experts are copied to the device before each forward.

This is what `accelerate` does with the modules that a ``device_map`` leaves on the CPU, and a
stand-in for it that is as fast as such copies can be: from pinned memory, into memory that is there
already, in a CUDA graph.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from moe_ops.residency.host import HostMemory, padded_size

ACCELERATE, COPIES = "accelerate", "copied-layers"


class CopiedLayers:
    """Modules whose parameters are copied from pinned memory before each of their forwards.

    Modules with equal sizes share one place on the device.

    Args:
        modules: the modules, with their parameters on the device.
        device: the device.
    """

    def __init__(self, modules: list[nn.Module], device: torch.device) -> None:
        self.device, self.held = device, [dict(module.named_parameters()) for module in modules]
        self.on_host: list[dict[str, Tensor]] = []
        self._places: dict[Any, Tensor] = {}
        sizes = (padded_size(x.nbytes) for own in self.held for x in own.values())
        memory = HostMemory(sum(sizes), pinned=device.type == "cuda")
        self._memory: HostMemory | None = memory
        for own in self.held:
            self.on_host.append({name: _on_host(x.data, memory) for name, x in own.items()})
            for name, x in own.items():
                key = (name, x.dtype, x.shape, x.stride())
                if key not in self._places:
                    self._places[key] = torch.empty_like(x.data)
                x.data = self._places[key]
        self._hooks = [
            module.register_forward_pre_hook(self._copies(number))
            for number, module in enumerate(modules)
        ]

    @property
    def nbytes(self) -> int:
        """Bytes that one pass copies."""
        return sum(x.nbytes for own in self.on_host for x in own.values())

    def _copies(self, number: int) -> Any:
        def copy(module: nn.Module, args: Any) -> None:
            for name, x in self.held[number].items():
                x.data.copy_(self.on_host[number][name], non_blocking=True)

        return copy

    def remove(self, device: torch.device) -> None:
        """Put the parameters on a device, without hooks."""
        for hook in self._hooks:
            hook.remove()
        for own, stored in zip(self.held, self.on_host, strict=True):
            for name, x in own.items():
                x.data = stored.pop(name).to(device)
        self._places.clear()
        self._memory = None


def _on_host(x: Tensor, memory: HostMemory) -> Tensor:
    """A copy on the host."""
    like = memory.take(x.nbytes).view(x.dtype).as_strided(x.shape, x.stride())
    return like.copy_(x)


def with_accelerate(modules: list[nn.Module], device: torch.device) -> None:
    """Give modules the hooks that ``device_map`` gives to modules on the CPU.

    Raises:
        ImportError: accelerate is not installed.
    """
    hooks = import_module("accelerate.hooks")
    for module in modules:
        for x in module.parameters():
            x.data = x.data.to("cpu")
        hook = hooks.AlignDevicesHook(
            execution_device=device, offload=True, io_same_device=True, place_submodules=True
        )
        hooks.add_hook_to_module(module, hook)
