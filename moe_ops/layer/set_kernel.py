"""A kernel that a caller sets for a layer: whether it serves the layer, and holds its scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moe_ops import checks
from moe_ops.layer.parameters import Held
from moe_ops.layer.partition import LayerSizes
from moe_ops.layer.state import LayerState
from moe_ops.pipeline.config import FusedMoEConfig
from moe_ops.pipeline.formats import FusedMoEActivationFormat
from moe_ops.pipeline.modular_kernel import FusedMoEKernel

SAME = (
    "num_experts",
    "experts_per_token",
    "hidden_dim",
    "intermediate_size",
    "num_local_experts",
    "is_act_and_mul",
)
"""Fields of `FusedMoEConfig` in which a kernel and its layer must be equal."""


def with_kernel(layer: Any, kernel: Any) -> LayerState:
    """Return the state of an `ExpertLayer` with a kernel; None: without one.

    Raises:
        TypeError: anything but a `FusedMoEKernel`.
        ValueError: a kernel that routes itself, with other sizes or another scheme, or whose
            experts do not support the layer.
    """
    if kernel is not None:
        checks.instance("layer.kernel", kernel, FusedMoEKernel)
        _check_serves(kernel, layer.moe_config, layer.sizes, layer.chunk_size)
    held = None if kernel is None else Held(_beside_weights(layer._parameters))
    return replace(layer.state, kernel=kernel, beside_kernel=held)


def _check_serves(
    kernel: FusedMoEKernel, config: FusedMoEConfig, sizes: LayerSizes, chunk_size: int | None
) -> None:
    experts, name = kernel.fused_experts, type(kernel.fused_experts).__name__
    if kernel.is_monolithic:
        raise ValueError(
            f"layer.kernel must be modular, since the layer routes its tokens, got {name}"
        )
    quant = experts.quant_config
    pairs = {x: (getattr(experts.moe_config, x), getattr(config, x)) for x in SAME}
    pairs["scheme"] = quant.scheme.name, sizes.scheme.name
    has_bias = quant.w1_bias is not None or quant.w2_bias is not None
    pairs["has_bias"] = has_bias, sizes.has_bias
    for fact, (own, wanted) in pairs.items():
        if own != wanted:
            raise ValueError(f"layer.kernel must have the layer's {fact}, {wanted}, got {own}")
    scheme, format = sizes.scheme, experts.activation_format()
    kind = type(experts)
    holds, reason = kind.is_supported_config(kind, config, scheme.weight, scheme.activation, format)
    if not holds:
        raise ValueError(
            f"layer.kernel must have experts that support the layer, got {name}: {reason}"
        )
    standard = format is FusedMoEActivationFormat.Standard
    if chunk_size is not None and standard and not experts.supports_chunking():
        raise ValueError(
            "layer.kernel must have experts that take tokens in chunks, as the layer's chunk_size "
            f"= {chunk_size} asks for, got {name}"
        )


def _beside_weights(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return scales and biases, which a kernel's experts hold; weights come with each call."""
    weights = ("w13_weight", "w2_weight")
    return {name: x for name, x in parameters.items() if x is not None and name not in weights}


def check_is_current(state: LayerState, parameters: Mapping[str, Any]) -> None:
    """Check that scales and biases are still the parameters that the set kernel was made for.

    Raises:
        ValueError: one of them was replaced, as ``load_state_dict(assign=True)`` does, and a copy
            with static scales or scales that are 8-bit floats.
    """
    held = state.beside_kernel
    if held is not None and not held.are_of(parameters):
        raise ValueError(
            "layer.kernel must be set after loading or copying, which replaced scales or biases "
            f"that it holds, got a kernel for earlier parameters ({type(state.kernel).__name__})"
        )
