"""Experts modules of transformers whose weights are in a quantized layer.

Such a module has no weights of its own, only placeholders (`_placeholders`). It holds a `FusedMoE`
called `LAYER`, whose parameters keep their bits when the model is moved, copied or cast. The
module's forward runs these weights.
"""

from __future__ import annotations

from typing import Any

from moe_ops.integrations._gates import activation_of
from moe_ops.integrations._placeholders import WEIGHTS, add_placeholders
from moe_ops.layer import FusedMoE
from moe_ops.scheme import Scheme

NAME = "moe_ops"
"""The name of this library's experts implementation."""
LAYER = "moe_ops_layer"
"""The attribute of an experts module that holds its quantized weights."""
ACCELERATE = "_hf_hook"
"""The attribute in which accelerate keeps the hook that moves a module's weights."""


def quantized_layer(experts: Any) -> FusedMoE | None:
    """Return the layer that holds the weights of a quantized module; None: it is not quantized."""
    layer: FusedMoE | None = getattr(experts, LAYER, None)
    return layer


def new_layer(experts: Any, scheme: Scheme | None) -> FusedMoE:
    """Return a layer on ``meta`` with the sizes of a module that has its own weights."""
    first = experts.gate_up_proj if experts.has_gate else experts.up_proj
    num_experts, *sizes = experts.down_proj.shape
    hidden, width = reversed(sizes) if experts.is_transposed else sizes
    return FusedMoE(
        num_experts,
        1,
        hidden,
        width,
        scheme=scheme,
        params_dtype=first.dtype,
        activation=_storage_activation(experts),
        has_bias=experts.has_bias,
        device="meta",
    )


def _storage_activation(experts: Any) -> str:
    """Return an activation whose row order is that of a module's first weight.

    The layer's own activation never runs: a module's gate may be any function.
    """
    if not experts.has_gate:
        return "silu_no_mul"
    activation = activation_of(experts)
    interleaved = not experts.is_concatenated
    if activation is not None:
        interleaved = activation.kind.is_interleaved
    return "swigluoai" if interleaved else "silu"


def put_layer(experts: Any, layer: FusedMoE) -> None:
    """Replace the parameters of a module by a quantized layer."""
    plain = dict(experts.named_parameters(recurse=False))
    for name in plain:
        delattr(experts, name)
    experts.add_module(LAYER, layer.train(experts.training))
    add_placeholders(experts, {name: plain[name] for name in WEIGHTS if name in plain})
    experts.config._experts_implementation = NAME
    experts.register_forward_pre_hook(_begin)
    experts.register_forward_hook(_end, always_call=True)


def _begin(experts: Any, args: Any) -> None:
    """Bring in weights that accelerate keeps elsewhere: the layer's forward does not run.

    Raises:
        ValueError: another library runs the module; no other has its weights.
    """
    layer: Any = quantized_layer(experts)
    hook = getattr(layer, ACCELERATE, None)
    if hook is not None:
        hook.pre_forward(layer)
    chosen = experts.config._experts_implementation
    if chosen != NAME:
        raise ValueError(
            f'experts_implementation must be "{NAME}" for experts that moe_ops.quantize_ has '
            f'quantized (model.set_experts_implementation("{NAME}")), got {chosen!r}'
        )


def _end(experts: Any, args: Any, output: Any) -> None:
    """Let accelerate take the weights out again."""
    layer: Any = quantized_layer(experts)
    hook = getattr(layer, ACCELERATE, None)
    if hook is not None:
        hook.post_forward(layer, None)
