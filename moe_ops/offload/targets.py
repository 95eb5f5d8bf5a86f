"""Modules whose experts `offload_` can put in host memory: one class for each kind."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from moe_ops.layer import FusedMoE
from moe_ops.layer.forms import in_forms_for_device
from moe_ops.layer.host_memory import amount_of, reason_against
from moe_ops.layer.moving import offload
from moe_ops.layer.rank_checks import held_by, taken_by
from moe_ops.layer.stage import Stage
from moe_ops.pipeline.host_experts import HostExperts
from moe_ops.residency import Amount


@dataclass(frozen=True)
class HostTarget(ABC):
    """A module whose experts can be put in host memory."""

    name: str
    """Path of the module in the model, as in ``named_modules``."""
    module: Any

    @abstractmethod
    def reason_against(self) -> str | None:
        """Say why the module's experts cannot be in host memory; None: they can."""

    @abstractmethod
    def amount(self) -> Amount:
        """Return the sizes on which the number of resident experts depends."""

    @abstractmethod
    def device(self) -> torch.device:
        """Return the device on which the experts run."""

    @abstractmethod
    def host_experts(self) -> HostExperts | None:
        """Return the experts if they are in host memory."""

    @abstractmethod
    def put(self, resident: int | None, device: torch.device) -> None:
        """Put all experts in host memory, ``resident`` of them on the device too.

        None, or all of them: put them on the device alone.
        """

    def check(self) -> None:
        """Check that `put` will not refuse the module.

        Raises:
            NotImplementedError: it will.
        """
        reason = self.reason_against()
        if reason is not None:
            raise NotImplementedError(
                f"model must have experts that can be in host memory (modules= leaves others out), "
                f"got {type(self.module).__name__} {self.name!r}: {reason}"
            )


class LayerOnHost(HostTarget):
    """A `FusedMoE`."""

    module: FusedMoE

    def reason_against(self) -> str | None:
        """Name what must be different."""
        taken = taken_by(self.module, held_by(self.module))
        return reason_against(self.module.state) or (f"it has {taken}" if taken else None)

    def amount(self) -> Amount:
        """Return the layer's own sizes."""
        return amount_of(self.module.state)

    def device(self) -> torch.device:
        """Return the layer's device."""
        return self.module.compute_device

    def host_experts(self) -> HostExperts | None:
        """Return the layer's."""
        return self.module.host_experts

    def put(self, resident: int | None, device: torch.device) -> None:
        """Change the layer's parameters."""
        layer = self.module
        if device.type == "cuda" and layer.compute_device.type == "cpu":
            stage = Stage(replace(layer.state, device=device), layer._parameters)
            layer.take(in_forms_for_device(stage))
        offload(layer, self.amount().num_experts if resident is None else resident, device)


Finder = Callable[[nn.Module], Iterator[HostTarget]]


def layers_on_host(model: nn.Module) -> Iterator[HostTarget]:
    """Yield the `FusedMoE` layers of a model that belong to no other kind of target."""
    for name, module in model.named_modules():
        if isinstance(module, FusedMoE):
            yield LayerOnHost(name, module)


FINDERS: list[Finder] = [layers_on_host]
"""Functions that find the targets of a model; integrations add theirs when they are imported."""
