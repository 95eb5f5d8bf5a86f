"""Shared experts of a layer: the parameter of their gate, and tensors that look like theirs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from moe_ops.layer.base import ExpertLayer
from moe_ops.layer.options import FusedMoEOptions
from moe_ops.loading.names import SHARED_EXPERTS, SHARED_GATE, router_tensor

SHOWN = 4
"""Number of names that an error quotes."""


def listed(names: Sequence[str]) -> str:
    """Return names for an error, which quotes `SHOWN` of them."""
    return ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")


def add_gate(layer: ExpertLayer, options: FusedMoEOptions) -> None:
    """Register the gate's parameter: zeros ``(1, H)`` if the layer has a gate, else None."""
    gate = None
    if options.shared_expert_gate:
        sizes = (1, layer.model_hidden_size)
        zeros = torch.zeros(sizes, dtype=layer.sizes.dtype, device=options.device)
        gate = nn.Parameter(zeros, requires_grad=layer.sizes.scheme.weight is None)
    layer.register_parameter(SHARED_GATE, gate)


def shared_hint(layer: ExpertLayer, unknown: Mapping[str, str]) -> str:
    """Return what to do about tensors that look like shared experts and that a layer cannot take.

    Args:
        layer: a layer with shared experts.
        unknown: names of tensors, and for each what comes after the block's prefix.

    Returns:
        Sentences for the end of an error message; empty if there are no such tensors.
    """
    gates: list[str] = []
    others: list[str] = []
    for name, relative in unknown.items():
        tensor = router_tensor(relative)
        is_gate = tensor is not None and tensor.buffer == SHARED_GATE
        (gates if is_gate else others).append(name)
    text = ""
    if gates and not layer.shared_expert_gate:
        text += (
            f". {gates[0]} weights the shared experts of each token: pass shared_expert_gate=True "
            "to FusedMoE"
        )
    if others:
        count = layer.routing["num_fused_shared_experts"]
        text += (
            f". Tensors of shared experts (n_shared_experts={count}) must be named as in "
            f"{', '.join(SHARED_EXPERTS)}, got {listed(others)}"
        )
    return text
