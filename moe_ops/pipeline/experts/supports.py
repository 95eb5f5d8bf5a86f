"""What an implementation of experts supports, as data, and why it does not serve a layer."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import torch

from moe_ops.activation import MoEActivation
from moe_ops.dispatch.device import device_facts
from moe_ops.parallel import FusedMoEParallelConfig
from moe_ops.pipeline.config import FusedMoEConfig
from moe_ops.pipeline.formats import FusedMoEActivationFormat
from moe_ops.pipeline.row_spaces import depends_on_batch
from moe_ops.routing import RoutingMethodType
from moe_ops.scheme import Quant, min_capability, refusal

SchemeKey = tuple[Quant | None, Quant | None]
"""``(weight, activation)``: the parts of a scheme that a kernel depends on."""


class EveryScheme:
    """The keys of all schemes that operators compute."""

    def __contains__(self, key: Any) -> bool:
        weight, activation = key
        return refusal(activation, weight) is None


EVERY_SCHEME = EveryScheme()
"""What `get_scheme` makes, and a caller's own."""
UNQUANTIZED_ONLY = frozenset({(None, None)})


@dataclass(frozen=True)
class Supports:
    """What one class supports. None in a field means everything.

    On a GPU, a scheme also needs a compute capability of `moe_ops.scheme.min_capability`.

    Args:
        devices: device types.
        schemes: scheme keys; by default only the unquantized one.
        activations: kinds of activation.
        gateless: whether activations without a gate work (``is_act_and_mul = False``).
        parallel: modes of `FusedMoEParallelConfig` that work: ``tp``, ``dp``, ``ep``, ``sp``.
        routing_methods: routing methods, for experts that route tokens themselves.
        router_logits_dtypes: dtypes of logits, for experts that route tokens themselves.
        hidden_multiple: the number that the hidden size must be a multiple of.
        batch_invariant: whether batch-invariant mode works.
    """

    devices: tuple[str, ...] = ("cpu", "cuda")
    schemes: Container[SchemeKey] | None = UNQUANTIZED_ONLY
    activations: Container[MoEActivation] | None = None
    gateless: bool = True
    parallel: frozenset[str] = frozenset({"tp", "dp", "ep", "sp"})
    routing_methods: Container[RoutingMethodType] | None = None
    router_logits_dtypes: Container[torch.dtype] | None = None
    hidden_multiple: int = 1
    batch_invariant: bool = False

    def reason_against(
        self,
        config: FusedMoEConfig,
        key: SchemeKey,
        own_format: FusedMoEActivationFormat,
        activation_format: FusedMoEActivationFormat,
        capability: int | None = None,
    ) -> str | None:
        """The first rule that fails, in the order of the interface; None if all hold.

        Args:
            config: the layer.
            key: the key of its scheme.
            own_format: the format that the experts take.
            activation_format: the format that prepare-finalize produces.
            capability: compute capability times ten of a GPU that is not in this machine; None:
                the capability of ``config.device``.
        """
        weight, activation = key
        kind, logits = config.activation_kind, config.router_logits_dtype or config.in_dtype
        parallel, method = config.moe_parallel_config, config.routing_method
        lacks = parallel.lacks()
        device = torch.device(config.device)
        sizes = config.hidden_dim, config.intermediate_size
        each = max((q.element.values_per_byte for q in key if q is not None), default=1)
        rules = (
            (
                self._device_works(device, key, capability),
                f"current device {_name(device, capability)}",
            ),
            (config.is_act_and_mul or self.gateless, "no act_and_mul MLP layer"),
            (_among(kind, self.activations), f"{kind.value} activation"),
            (
                _among(key, self.schemes),
                f"quantization scheme {_key_name(weight)}x{_key_name(activation)}",
            ),
            (_modes(parallel) <= self.parallel, f"parallel config {parallel}"),
            (lacks is None, f"parallel config {parallel}: {lacks}"),
            (
                not parallel.exchanges_tokens
                or activation_format is FusedMoEActivationFormat.Standard,
                "an exchange of tokens between ranks in the Batched format",
            ),
            (_among(method, self.routing_methods), f"routing method {method!r}"),
            (_among(logits, self.router_logits_dtypes), f"router logits dtype {logits}"),
            (config.hidden_dim % self.hidden_multiple == 0, f"hidden size {config.hidden_dim}"),
            (sizes[0] % each == sizes[1] % each == 0, f"odd sizes {sizes} with 4-bit numbers"),
            (self.batch_invariant or not config.batch_invariant, "batch invariance"),
            (
                not (config.batch_invariant and depends_on_batch(activation)),
                "batch invariance with one scale for all tokens",
            ),
            (
                activation_format is own_format,
                f"{activation_format.value[0]} activation format",
            ),
        )
        return next((f"kernel does not support {text}" for holds, text in rules if not holds), None)

    def _device_works(self, device: torch.device, key: SchemeKey, capability: int | None) -> bool:
        if device.type not in self.devices:
            return False
        if device.type != "cuda":
            return True
        return (capability or device_facts(device).arch) >= min_capability(key[1])


def _among(value: Any, choices: Container | None) -> bool:
    return choices is None or value in choices


def _name(device: torch.device, capability: int | None) -> str:
    if device.type != "cuda":
        return str(device)
    if capability is None and torch.cuda.is_available():
        return torch.cuda.get_device_name(device)
    return f"sm_{capability or device_facts(device).arch}"


def _key_name(quant: Quant | None) -> str:
    return "None" if quant is None else quant.key


def _modes(parallel: FusedMoEParallelConfig) -> frozenset[str]:
    """The kinds of parallelism that are in use."""
    sizes = {"tp": parallel.tp_size, "dp": parallel.dp_size, "sp": parallel.sp_size}
    used = {name for name, size in sizes.items() if size > 1}
    if parallel.use_ep:
        used.add("ep")
    return frozenset(used)
