"""A layer whose experts are in host memory, of which the device holds some: see `offload`.

The parameters stay what they are, all experts of the rank, on the host. So loading, saving and
converting see all of them. The device holds slots (`HostExperts`), which are no parameters.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from math import prod
from typing import Any, cast

import torch
from torch import Tensor, nn

from moe_ops.layer.options import FusedMoEOptions
from moe_ops.layer.parameters import parameter_specs, stored_config
from moe_ops.layer.partition import LayerSizes
from moe_ops.layer.stage import Stage
from moe_ops.layer.state import LayerState, against_host_memory
from moe_ops.pipeline.gemms import expert_weights
from moe_ops.pipeline.host_experts import HostExperts, Store, host_experts, place_in, refill, store
from moe_ops.residency import Amount, parse_amount
from moe_ops.tensors import ExpertWeight, ExpertWeights

EXPERTS = ("weight", "scale", "zero_point", "global_scale", "channel_scale", "bias")
"""Kinds of the parameters that an expert is copied with."""


def renewed(stage: Stage) -> Stage:
    """Return the stage whose slots hold nothing, once the parameters have changed.

    New slots are made if parameters were replaced. Without experts in host memory there are none.
    """
    state = stage.state
    resident, host = state.resident_experts, state.host_experts
    if resident is None or stage.parameters["w13_weight"].is_meta:
        if state.initial_seed is None and host is None:
            return stage
        state = replace(state, initial_seed=None, host_experts=None)
        return Stage(state, stage.parameters)
    stage = Stage(replace(state, initial_seed=None), stage.parameters)
    if host is None or not _same_places(stage, host):
        return on_host(stage, resident, stage.compute_device)
    refill(host.residency.store, _weights_of(stage))
    scales = stored_config(state.sizes.scheme, stage.parameters).input_scales
    for x, y in zip(scales, host.quant_config.input_scales, strict=True):
        if x is not None and y is not None:
            y.copy_(x)
    host.residency.empty_()
    return stage


def residency_of_new(state: LayerState, options: FusedMoEOptions) -> LayerState:
    """Return the state of a new layer with as many resident experts as its options say.

    Raises:
        TypeError, ValueError: as `parse_amount`.
    """
    if options.resident_experts is None:
        return state
    (count,) = parse_amount("resident_experts", options.resident_experts, [amount_of(state)])
    if count == state.sizes.num_experts:
        return state
    device = torch.empty(0, device=options.device).device
    return replace(state, resident_experts=count, device=device)


def moved_on_host(stage: Stage, probe: Tensor, kept: Container[int]) -> dict[int, Tensor]:
    """Return what a move leaves of the parameters on the host, by the ids of the old ones.

    They stay there, and are cast there unless they are ``kept`` as they are. The slots follow.

    Args:
        stage: its experts are in host memory.
        probe: what the move makes of an empty tensor of the layer.
        kept: ids of parameters.
    """
    host = torch.device("meta" if probe.is_meta else "cpu")
    moved: dict[int, Tensor] = {}
    for x in stage.held().values():
        dtype = x.dtype if id(x) in kept else probe.dtype
        if x.is_meta and host.type != "meta":
            moved[id(x)] = torch.empty_like(x, dtype=dtype, device=host)
        else:
            moved[id(x)] = x.data.to(host, dtype)
    return moved


def new_on_host(stage: Stage, device: torch.device) -> Stage:
    """Make new parameters in host memory, where they hold no weights yet, and their slots.

    They hold what a quantized layer holds before it is loaded. Nothing of a layer's size is made
    beside the store.
    """
    for name, spec in parameter_specs(stage.state.sizes).items():
        one = torch.zeros(1, *spec.shape[1:], dtype=spec.dtype, device="cpu")
        x = (one.fill_(spec.fill) if spec.fill else one).expand(spec.shape)
        stage.parameters[name] = nn.Parameter(x, requires_grad=False)
    return on_host(stage, cast(int, stage.state.resident_experts), device)


def reason_against(state: LayerState) -> str | None:
    """Say why a layer's experts cannot be in host memory; None: they can."""
    reason = against_host_memory(state.parallel.enable_eplb, state.parallel)
    if reason is None and state.kernel is not None:
        return (
            "layer.kernel must be None with resident_experts, since its experts read parameters on "
            f"the device, got {type(state.kernel).__name__}"
        )
    return reason


def amount_of(state: LayerState) -> Amount:
    """Return the sizes on which the number of resident experts depends."""
    shared = len(state.placement.rows) - state.num_experts
    experts = state.sizes.num_experts
    return Amount(experts, min(state.top_k + shared, experts), expert_bytes(state.sizes))


def expert_bytes(sizes: LayerSizes) -> int:
    """Return the bytes of one expert of a layer: weights, scales, zero points and biases."""
    specs = parameter_specs(sizes).values()
    return sum(prod(s.shape[1:]) * s.dtype.itemsize for s in specs if s.kind in EXPERTS)


def _weights_of(stage: Stage) -> ExpertWeights:
    config = stored_config(stage.state.sizes.scheme, stage.parameters)
    tensors = map(stage.parameters.get, ("w13_weight", "w2_weight", "w13_bias", "w2_bias"))
    w1, w2, *biases = (None if x is None else x.detach() for x in tensors)
    return expert_weights(w1, w2, config, tuple(biases))  # type: ignore[arg-type]


def _same_places(stage: Stage, host: HostExperts) -> bool:
    """Whether the weights of a layer are the store itself."""
    pairs = list(zip(_weights_of(stage)[:2], host.residency.store, strict=True))
    same_data = all(new.data.data_ptr() == old.data.data_ptr() for new, old in pairs)
    same_forms = all(_forms(new) == _forms(old) for new, old in pairs)
    same_device = host.residency.device == stage.compute_device
    same_count = host.residency.num_slots == stage.state.resident_experts
    return same_data and same_forms and same_device and same_count


def _forms(weight: ExpertWeight) -> list[Any]:
    return [x if x is None else (x.shape, x.dtype) for x in weight.of_experts]


def _kept_store(weights: ExpertWeights, host: HostExperts | None, pinned: bool) -> Store | None:
    """The store of a layer whose weights still lie in it, in any form; None: they do not.

    Products of parameters are copied into it.
    """
    if host is None or pinned != (host.residency.device.type == "cuda"):
        return None
    stored: list[ExpertWeight] = []
    for weight, old in zip(weights[:2], host.residency.store, strict=True):
        fields: list[Tensor | None] = []
        for x, y in zip(weight.of_experts, old.of_experts, strict=True):
            if x is None or y is None:
                if x is not y:
                    return None
            elif x.data_ptr() == y.data_ptr() and x.nbytes == y.nbytes:
                y = x  # noqa: PLW2901 (the same memory)
            elif fields and (x.shape, x.dtype) == (y.shape, y.dtype):
                y.copy_(x)
            else:
                return None
            fields.append(y)
        stored.append(ExpertWeight(*fields))  # type: ignore[arg-type]
    return Store((stored[0], stored[1]), host.residency.memory)


def on_host(stage: Stage, resident: int, device: torch.device) -> Stage:
    """Make store and slots, or slots alone; the parameters become the store's tensors."""
    state, weights, pinned = stage.state, _weights_of(stage), device.type == "cuda"
    held = _kept_store(weights, state.host_experts, pinned) or store(weights, pinned=pinned)
    config = stored_config(state.sizes.scheme, stage.parameters)
    made = host_experts(held, config, resident, device)
    for name, x in stage.held().items():
        new = place_in(x.detach(), weights, held)
        new = x.detach().cpu().contiguous() if new is None else new
        stage.parameters[name] = nn.Parameter(new, requires_grad=False)
    state = replace(state, host_experts=made, resident_experts=resident, device=device)
    return Stage(state, stage.parameters)


def on_device(stage: Stage, device: torch.device) -> Stage:
    """Put all experts on the device, as a layer without host memory has them."""
    held = stage.held()
    if stage.state.resident_experts is None and held["w13_weight"].device == device:
        return stage
    moved = {name: x.detach().to(device, copy=True) for name, x in held.items()}
    for name, x in moved.items():
        stage.parameters[name] = nn.Parameter(x, requires_grad=held[name].requires_grad)
    state = replace(stage.state, host_experts=None, resident_experts=None, device=None)
    return Stage(state, stage.parameters)
