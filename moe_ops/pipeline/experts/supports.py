"""What an experts implementation supports, declared as data, and the reason why it does not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from moe_ops.activation import MoEActivation
from moe_ops.pipeline.config import FusedMoEConfig
from moe_ops.pipeline.formats import FusedMoEActivationFormat
from moe_ops.routing import RoutingMethodType
from moe_ops.scheme import SCHEMES, Quant

if TYPE_CHECKING:
    from moe_ops.parallel import FusedMoEParallelConfig

SchemeKey = tuple[Quant | None, Quant | None]
"""``(weight, activation)``: what a kernel sees of a scheme."""


EVERY_SCHEME = frozenset((s.weight, s.activation) for s in SCHEMES.values())
"""The keys of all named schemes."""


@dataclass(frozen=True)
class Supports:
    """One class's declaration. ``None`` in a field: everything.

    Args:
        devices: device types, and for GPUs the lowest compute capability times ten by scheme key's
            element (``min_capability``).
        schemes: the scheme keys.
        activations: kinds of activation.
        gateless: whether activations without a gate work (``is_act_and_mul = False``).
        parallel: the modes of a `FusedMoEParallelConfig` that work: ``tp``, ``dp``, ``ep``, ``sp``.
        routing_methods: for experts that route themselves.
        router_logits_dtypes: for experts that route themselves.
        hidden_multiple: what the hidden size must be a multiple of.
    """

    devices: tuple[str, ...] = ("cpu", "cuda")
    schemes: frozenset[SchemeKey] | None = None
    activations: frozenset[MoEActivation] | None = None
    gateless: bool = True
    parallel: frozenset[str] = frozenset({"tp", "dp", "ep", "sp"})
    routing_methods: frozenset[RoutingMethodType] | None = None
    router_logits_dtypes: frozenset[torch.dtype] | None = None
    hidden_multiple: int = 1

    def reason_against(
        self,
        config: FusedMoEConfig,
        key: SchemeKey,
        own_format: FusedMoEActivationFormat,
        activation_format: FusedMoEActivationFormat,
    ) -> str | None:
        """The first rule that fails, in the order of the interface; None where all hold."""
        weight, activation = key
        kind, logits = config.activation_kind, config.router_logits_dtype or config.in_dtype
        parallel = config.moe_parallel_config
        device = torch.device(config.device)
        rules = (
            (self._device_works(device, key), f"current device {_name(device)}"),
            (config.is_act_and_mul or self.gateless, "no act_and_mul MLP layer"),
            (_among(kind, self.activations), f"{kind.value} activation"),
            (
                _among(key, self.schemes),
                f"quantization scheme {_key_name(weight)}x{_key_name(activation)}",
            ),
            (_modes(parallel) <= self.parallel, f"parallel config {parallel}"),
            (
                _among(config.routing_method, self.routing_methods),
                f"routing method {config.routing_method!r}",
            ),
            (_among(logits, self.router_logits_dtypes), f"router logits dtype {logits}"),
            (config.hidden_dim % self.hidden_multiple == 0, f"hidden size {config.hidden_dim}"),
            (
                activation_format is own_format,
                f"{activation_format.value[0]} activation format",
            ),
        )
        return next((f"kernel does not support {text}" for holds, text in rules if not holds), None)

    def _device_works(self, device: torch.device, key: SchemeKey) -> bool:
        if device.type not in self.devices:
            return False
        return device.type != "cuda" or capability(device) >= min_capability(key)


def _among(value: object, known: frozenset | None) -> bool:
    return known is None or value in known


def _name(device: torch.device) -> str:
    if device.type == "cuda" and torch.cuda.is_available():
        return torch.cuda.get_device_name(device)
    return str(device)


def _key_name(quant: Quant | None) -> str:
    return "None" if quant is None else quant.key


def capability(device: torch.device) -> int:
    """Compute capability times ten; that of an H200 on a machine without a GPU."""
    if not torch.cuda.is_available():
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def min_capability(key: SchemeKey) -> int:
    """Where Triton's kernels for a scheme compile: e4m3 numbers exist from sm_89 on."""
    fp8 = any(q is not None and q.dtype == torch.float8_e4m3fn for q in key)
    return 89 if fp8 else 80


def _modes(parallel: FusedMoEParallelConfig) -> frozenset[str]:
    """The kinds of parallelism that are in use."""
    sizes = {"tp": parallel.tp_size, "dp": parallel.dp_size, "sp": parallel.sp_size}
    used = {name for name, size in sizes.items() if size > 1}
    if parallel.use_ep:
        used.add("ep")
    return frozenset(used)
