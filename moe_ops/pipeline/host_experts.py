"""Experts in host memory as `fused_experts` takes them: views that stand for them, and a config.

The GEMMs of such a config read slots, into which they copy what a routing wants.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from moe_ops.residency.host import HostMemory, padded_size
from moe_ops.residency.slots import Residency, tensor_pairs
from moe_ops.scheme import TENSORS, FusedMoEQuantConfig
from moe_ops.tensors import ExpertWeight, ExpertWeights, TensorSpec


class HostConfig(FusedMoEQuantConfig):
    """A configuration whose tensors stand for experts in host memory."""

    on_host: ExpertWeights | None  # type: ignore[misc]


class HostExperts(NamedTuple):
    """A layer's experts in host memory."""

    residency: Residency
    w1: Tensor
    """A view with the shape, dtype and device of the weight of all experts. It has no numbers."""
    w2: Tensor
    w1_bias: Tensor | None
    w2_bias: Tensor | None
    quant_config: HostConfig


class Store(NamedTuple):
    """All experts of a layer, in memory of the host."""

    weights: tuple[ExpertWeight, ExpertWeight]
    memory: HostMemory


def store_bytes(weights: ExpertWeights) -> int:
    """Return the bytes that `store` takes for these weights."""
    return sum(
        padded_size(x.nbytes) for weight in weights[:2] for x in weight.of_experts if x is not None
    )


@torch.inference_mode(False)  # later calls write to these tensors
def store(weights: ExpertWeights, *, pinned: bool) -> Store:
    """Copy the weights of all experts to memory of the host.

    Raises:
        RuntimeError: see `HostMemory`.
    """
    memory = HostMemory(store_bytes(weights), pinned=pinned)
    stored: list[ExpertWeight] = []
    for weight in weights[:2]:
        fields: list[Tensor | None] = []
        for x in weight.of_experts:
            if x is None:
                fields.append(None)
                continue
            place = memory.take(x.nbytes).view(x.dtype)
            fields.append(place.as_strided(x.shape, _strides(x)).copy_(x.detach()))
        stored.append(ExpertWeight(*fields))  # type: ignore[arg-type]
    return Store((stored[0], stored[1]), memory)


@torch.inference_mode(False)  # later calls write to these tensors
def place_in(x: Tensor, weights: ExpertWeights, held: Store) -> Tensor | None:
    """Return the tensor of a store that holds a parameter; None: there is none.

    Args:
        x: the parameter that one of ``weights`` is, or is a view of. Its experts may share memory.
        weights: the weights that `store` was given.
        held: the store.
    """
    for weight, stored in zip(weights[:2], held.weights, strict=True):
        for w, y in tensor_pairs(weight, stored):
            if w.data_ptr() != x.data_ptr() or w.nbytes != x.nbytes:
                continue
            if w.stride()[1:] == y.stride()[1:]:
                whole, strides = torch.empty(0, dtype=x.dtype, device="cpu"), x.stride()[1:]
                shape, dense = x.shape, x.shape[1:].numel()
                return whole.set_(y.untyped_storage(), 0, shape, (dense, *strides))
    return None


def refill(held: Sequence[ExpertWeight], weights: ExpertWeights) -> None:
    """Copy to a store what does not lie in it: products of parameters."""
    for weight, stored in zip(weights[:2], held, strict=True):
        for x, y in tensor_pairs(weight, stored):
            if x.data_ptr() != y.data_ptr():
                y.copy_(x)


def _strides(x: Tensor) -> tuple[int, ...]:
    """The strides of ``x`` if each expert is one range of memory, one after the other."""
    size, dense = x.stride(0), x.shape[1:].numel()
    axes = sorted(zip(x.stride()[1:], x.shape[1:], strict=True))
    expected = 1
    for stride, length in axes:
        if length > 1 and stride != expected:
            return TensorSpec.contiguous(x.dtype, *x.shape).strides
        expected *= length
    return x.stride() if size == dense else (dense, *x.stride()[1:])


@torch.inference_mode(False)  # later calls write to these tensors
def host_experts(
    held: Store, config: FusedMoEQuantConfig, num_slots: int, device: torch.device
) -> HostExperts:
    """Return the experts of a store with ``num_slots`` slots on a device.

    Args:
        held: the store.
        config: the scheme, and its tensors for all experts, on any device.
        num_slots: K.
        device: the device of the slots.
    """
    residency = Residency(held.weights, num_slots, device, held.memory)
    experts = residency.num_experts
    first, second = (
        whole(slots, table, experts)
        for slots, table in zip(residency.slots, residency.tables, strict=True)
    )
    tensors = {
        name: x.to(device)
        if name in config.scheme.input_scale_names
        else _all(x[:1].to(device), experts)
        for name in TENSORS
        if (x := getattr(config, name)) is not None and not name.endswith("_bias")
    }
    made = HostConfig(config.scheme, **tensors)
    object.__setattr__(made, "on_host", ExpertWeights(first, second, *made.input_scales))
    return HostExperts(residency, first.data, second.data, first.bias, second.bias, made)


def whole(slots: ExpertWeight, table: Tensor, num_experts: int) -> ExpertWeight:
    """The weight of all experts, without numbers: see `ExpertWeight.host`."""
    data, *rest = (_all(x, num_experts) for x in slots.of_experts)
    for x in (data, *rest):
        if x is not None and x.is_cuda:
            torch._dynamo.mark_static_address(x)
    return ExpertWeight(cast(Tensor, data), *rest)._replace(host=table)


def _all(slots: Tensor | None, num_experts: int) -> Tensor | None:
    """A view of the first slot with the shape of all experts."""
    return None if slots is None else slots.narrow(0, 0, 1).expand(num_experts, *slots.shape[1:])
