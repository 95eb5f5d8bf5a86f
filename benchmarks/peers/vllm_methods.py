"""The layer benchmark's layers that vLLM's quantization methods make, as a server has them.

A method selects a backend, which ``moe_backend`` names, unless the plug-in of this library goes
before vLLM's choice. It gets a checkpoint's tensors, converts the weights and makes vLLM's modular
kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import cache
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moe_ops.bench.problems import Call, Experts, Inputs
from moe_ops.tensors import QTensor
from peers import vllm
from peers.installed import named, package

METHODS = "vllm.model_executor.layers.quantization"
COMPRESSED = f"{METHODS}.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe"
OURS, MARLIN, HUMMING = "auto", "marlin", "humming"
"""Values of vLLM's ``moe_backend``; with the first one the plug-in of this library serves."""


class Method(NamedTuple):
    """How a scheme's layers come about in vLLM."""

    make: Callable[[Any], Any]
    """The method of a ``FusedMoEConfig``."""
    tensors: Callable[[str, QTensor], Mapping[str, Any]]
    """Tensors of a checkpoint for ``w13`` or ``w2``, by the names of the layer's parameters."""


def _integers(config: Any) -> Any:
    described = named("compressed_tensors.quantization.QuantizationArgs")(
        num_bits=4, type="int", symmetric=True, strategy="group", group_size=128
    )
    made = named(f"{COMPRESSED}_wna16.CompressedTensorsWNA16MoEMethod")
    return made(described, None, config)


def _integer_tensors(which: str, q: QTensor) -> Mapping[str, Any]:
    words = q.data.contiguous().view(torch.int32)
    return {f"{which}_weight_packed": words, f"{which}_weight_scale": q.scale}


def _nvfp4(config: Any) -> Any:
    made = named(f"{COMPRESSED}_w4a4_nvfp4.CompressedTensorsW4A4Nvfp4MoEMethod")
    return made(config, use_a16=True)


def _nvfp4_tensors(which: str, q: QTensor) -> Mapping[str, Any]:
    factor: Any = 1 / q.global_scale  # type: ignore[operator]
    if which == "w13":  # of gate and of up
        factor = factor[:, None].expand(-1, 2)
    return {
        f"{which}_weight_packed": q.data,
        f"{which}_weight_scale": q.scale,
        f"{which}_weight_global_scale": factor,
        f"{which}_input_global_scale": torch.ones_like(factor),
    }


def _mxfp4(config: Any) -> Any:
    return named(f"{METHODS}.mxfp4.Mxfp4MoEMethod")(config)


def _mxfp4_tensors(which: str, q: QTensor) -> Mapping[str, Any]:
    return {f"{which}_weight": q.data, f"{which}_weight_scale": q.scale}


SCHEMES = {
    "int4_w4a16_g128": Method(_integers, _integer_tensors),
    "nvfp4_w4a16": Method(_nvfp4, _nvfp4_tensors),
    "mxfp4_w4a16": Method(_mxfp4, _mxfp4_tensors),
}
"""Schemes whose layers vLLM's methods make here: compressed-tensors' integers and NVFP4 weights,
and the MXFP4 of DeepSeek-V4."""


def humming_missing() -> str | None:
    """What is missing of Humming: its package, or what is missing of vLLM."""
    return vllm.missing(*vllm.HUMMING) or package("humming")


@cache
def started() -> ExitStack:
    """Register the plug-in, and make a configuration of vLLM and its forward pass current.

    They stay current for the rest of the process. Humming's experts ask the forward pass for the
    number of tokens of other ranks.
    """
    import_module("moe_ops.integrations.vllm").register()
    config, forward = import_module("vllm.config"), import_module("vllm.forward_context")
    current = config.VllmConfig()
    object.__setattr__(current, "model_config", SimpleNamespace(quantization_config=None))
    stack = ExitStack()
    stack.enter_context(config.set_current_vllm_config(current))
    passing = forward.create_forward_context(None, current)
    stack.enter_context(forward.override_forward_context(passing))
    return stack


def layer_of(method: Any, config: Any, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Return a layer as vLLM makes one for a method, with copies of a checkpoint's tensors."""
    base = named(f"{vllm.LAYERS}.RoutedExperts")
    layer: Any = type("Layer", (base,), {"__init__": nn.Module.__init__})()
    facts = {
        "moe_config": config,
        "activation": config.activation,
        "global_num_experts": config.num_experts,
        "local_num_experts": config.num_local_experts,
        "hidden_size": config.hidden_dim,
        "intermediate_size_per_partition": config.intermediate_size_per_partition,
        "apply_router_weight_on_input": False,
        "layer_name": "layer",
        "params_dtype": config.in_dtype,
        "_loaded_expert_biases": set(),
        "_expert_routing_tables": lambda: None,
    }
    vars(layer).update(facts)
    sizes = (config.num_experts, config.hidden_dim, config.intermediate_size_per_partition)
    with torch.device(config.device):
        method.create_weights(
            layer,
            *sizes,
            config.in_dtype,
            weight_loader=lambda *_: None,
            global_num_experts=config.num_experts,
        )
    for name, tensor in tensors.items():
        parameter = getattr(layer, name)
        if parameter.shape != tensor.shape:
            raise ValueError(f"{name} must be {tuple(parameter.shape)}, got {tuple(tensor.shape)}")
        parameter.data.copy_(tensor)
    return layer


def served(backend: str, experts: Experts, inputs: Inputs) -> Call:
    """The modular kernel that vLLM's method makes of a scheme's weights.

    Args:
        backend: `OURS`, `MARLIN` or `HUMMING`.
        experts: weights in one of `SCHEMES`.
        inputs: tokens with their routing.

    Raises:
        RuntimeError: vLLM runs the experts of another backend.
    """
    started()
    vllm.workspace(inputs.x.device)
    scheme = SCHEMES[experts.scheme.name]
    config = vllm.moe_config(experts, inputs, moe_backend=backend)
    method = scheme.make(config)
    tensors: dict[str, Tensor] = {}
    for which, q in zip(("w13", "w2"), experts.stored, strict=True):
        tensors.update(scheme.tensors(which, q))
    layer = layer_of(method, config, tensors)
    method.process_weights_after_loading(layer)
    runs = type(method.moe_kernel.impl.fused_experts).__name__
    if {OURS: "MoeOps", MARLIN: "Marlin", HUMMING: "Humming"}[backend] not in runs:
        raise RuntimeError(f"moe_backend {backend!r} must run its experts, got {runs}")
    return vllm.call_of(method.moe_kernel, config, layer, inputs)
