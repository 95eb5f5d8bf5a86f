"""Makes vLLM ask this library's experts first, where it would ask its Triton experts.

vLLM has an oracle for each family of formats: it goes through a list of backends, and asks the
classes that ``backend_to_kernel_cls`` returns for each whether they support the layer. That
function is wrapped here. The chosen backend also decides how vLLM stores the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import vllm.envs as envs

from moe_ops.integrations.vllm._experts import BatchedMoeOpsExperts, MoeOpsExperts
from moe_ops.integrations.vllm._factories import changes, everywhere
from moe_ops.integrations.vllm._interface import ORACLES
from moe_ops.integrations.vllm._warmup import warm_up_changes
from moe_ops.version import __version__

UNQUANTIZED = f"{ORACLES}.unquantized"
OURS = [MoeOpsExperts, BatchedMoeOpsExperts]
PLACES = {
    "unquantized": ("TRITON", "BATCHED_TRITON", "CPU"),
    "fp8": ("TRITON", "BATCHED_TRITON"),
    "int8": ("TRITON",),
}
"""Backends of each oracle at which this library goes first. vLLM stores their weights in the layout
of checkpoints, which is also this library's. Other formats: see `_factories`."""


def install() -> None:
    """Wrap the functions of all oracles; calling this again changes nothing.

    Nothing is changed if this raises.
    """
    # First what imports more of vLLM: the functions are changed where they are imported by then.
    wanted = [*warm_up_changes(), *changes()]
    for name, backends in PLACES.items():
        function = import_module(f"{ORACLES}.{name}").backend_to_kernel_cls
        wanted += everywhere(function, _ours_first(backends))
    wanted += everywhere(import_module(UNQUANTIZED).select_unquantized_moe_backend, _asking)
    for owner, name, value in wanted:
        setattr(owner, name, value)
    # vLLM caches compiled graphs by its variables, and on the CPU a graph holds our operators.
    envs.environment_variables["MOE_OPS_VERSION"] = lambda: __version__


def _ours_first(backends: tuple[str, ...]) -> Callable[[Callable], Callable]:
    """Return a wrapper of ``backend_to_kernel_cls`` for these backends."""

    def wrapper(function: Callable) -> Callable:
        def classes(backend: Any) -> list[type]:
            theirs = list(function(backend))
            if backend.value not in backends:
                return theirs
            return [*OURS, *theirs]

        return classes

    return wrapper


def _asking(function: Callable) -> Callable:
    """Wrap the selection for layers that are not quantized.

    With LoRA it takes the first class of its backend without asking whether that serves the layer.
    """

    def select(moe_config: Any) -> tuple[Any, Any]:
        backend, kind = function(moe_config)
        if kind is not MoeOpsExperts or not moe_config.is_lora_enabled:
            return backend, kind
        standard = MoeOpsExperts.activation_format()
        if kind.is_supported_config(kind, moe_config, None, None, standard)[0]:
            return backend, kind
        own = import_module(UNQUANTIZED).backend_to_kernel_cls(backend)
        return backend, next(x for x in own if x not in OURS)

    return select
