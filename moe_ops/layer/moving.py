"""Moving, copying, pickling and resetting a layer: values stored in a scheme keep their bits.

Values that follow from a layer's settings instead of a checkpoint are right after each of these:
the numbers in ``expert_map``, and the ``weight_loader`` of each parameter.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import init

from moe_ops import checks
from moe_ops.layer.base import ExpertLayer
from moe_ops.layer.forms import convert
from moe_ops.layer.host_memory import (
    moved_on_host,
    new_on_host,
    on_device,
    on_host,
    reason_against,
)
from moe_ops.layer.initial import initialize
from moe_ops.layer.parameters import parameter_specs
from moe_ops.layer.rank_checks import OF_A_RANK, check_own_weights, check_sharded
from moe_ops.layer.stage import Stage
from moe_ops.layer.state import LayerState
from moe_ops.loading.names import ROUTER_TENSORS, SHARED_GATE
from moe_ops.scheme import is_packed

CAST = ("w13_bias", "w2_bias", SHARED_GATE)
"""Parameters that ``.to(dtype)`` casts in a quantized layer."""
CAST_UNQUANTIZED = (*CAST, "w13_weight", "w2_weight")
"""Parameters that ``.to(dtype)`` casts in an unquantized layer."""
KEPT_BUFFERS = (*ROUTER_TENSORS, *OF_A_RANK, "eplb_step")
"""Buffers that keep their dtypes. What others add, like masks of pruning, is cast."""


class KeepsBits(ExpertLayer):
    """A layer whose stored values and router tensors keep their dtypes when it is cast."""

    def _begin(self) -> None:
        """Fill the parameters of a new layer."""
        device = self.compute_device
        if self.resident_experts is not None and device.type != "meta":
            self.take(new_on_host(self.stage(), device))
        self._filled(initialize(self))

    def reset_parameters(self) -> None:
        """Set parameters and buffers to what they hold before a checkpoint is loaded.

        Unquantized weights and biases become random, as in `torch.nn.Linear`: uniform within
        ``1 / sqrt(fan_in)`` for each projection of each expert, with zeros in padding. They follow
        from torch's generator of their device: ranks that seed it alike hold parts of one layer,
        however they share it, and replicas of an expert are equal.

        Quantized weights, their scales and biases become zeros (packed integers: the code of zero).
        Static scales become NaN, so that a missing scale shows in the result.
        ``e_score_correction_bias`` becomes zeros, even if the layer was made with other values.
        ``w13_input_order`` becomes None, and ``expert_map`` gets the numbers of this rank.
        ``shared_expert_gate_weight`` becomes zeros. ``hash_indices_table`` stays as it is: after
        ``to_empty()`` load or assign it.

        Call it after ``to_empty()`` of a layer that was made on ``meta``, or from ``_init_weights``
        of a transformers model. Tensors that ``from_pretrained`` has loaded stay as they are there.
        """
        seed = self._refill()
        if self.e_score_correction_bias is not None:
            init.zeros_(self.e_score_correction_bias)
        if self.shared_expert_gate_weight is not None:
            init.zeros_(self.shared_expert_gate_weight)
        self.w13_input_order = None
        self._fill_expert_map()
        self._filled(seed)

    def _filled(self, seed: int | None) -> None:
        """Renew the slots of a layer that holds nothing but the numbers of a seed."""
        self.renew_slots()
        self.state = replace(self.state, initial_seed=seed)

    def _refill(self, seed: int | None = None) -> int | None:
        """Fill the parameters like a new layer's; return the seed, see `initialize`."""
        for name, spec in parameter_specs(self.sizes).items():
            param = self._parameters.get(name)
            if param is not None:
                fill = _packed_fill(spec.fill) if is_packed(param) else spec.fill
                init.constant_(param, fill) if fill else init.zeros_(param)
        return initialize(self, seed)

    def _empty_again(self, before: LayerState) -> None:
        """Undo what was written into a new layer, whose state was ``before``."""
        convert(self, {})
        self._refill(before.initial_seed)
        self._filled(before.initial_seed)
        self.state = replace(self.state, given_scales=before.given_scales)

    def _fill_expert_map(self) -> None:
        """Write this rank's numbers into the buffer, which keeps its address."""
        expert_map = self._buffers.get("expert_map")
        if type(expert_map) is Tensor:
            expert_map.copy_(torch.tensor(self.placement.row, dtype=expert_map.dtype, device="cpu"))

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register as `nn.Module` does, and give an expert's parameter a ``weight_loader``."""
        super().register_parameter(name, param)
        self.adopt(name, param)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set as `nn.Module` does; fill new memory of ``expert_map`` (from ``from_pretrained``).

        Raises:
            NotImplementedError: a wrapper's tensor that is cut over the ranks of the layer.
        """
        if isinstance(value, Tensor):
            check_sharded(self, name, value)
        super().__setattr__(name, value)
        if name == "expert_map":
            self._fill_expert_map()

    def _apply(self, fn: Any, recurse: bool = True) -> KeepsBits:  # noqa: FBT001 (torch's signature)
        """Apply ``fn`` as `nn.Module` does, but cast only unquantized weights and biases."""
        if recurse:
            for module in self.children():
                module._apply(fn)
        quantized = self.sizes.scheme.weight is not None
        kept = self._kept(CAST if quantized else CAST_UNQUANTIZED)

        state, kept_there, is_meta = self.state, dict[int, Tensor](), self.w13_weight.is_meta
        at = torch.device("meta") if is_meta else self.compute_device
        probe = fn(torch.empty(0, dtype=state.in_dtype, device=at))
        state = replace(state, cast_dtype=probe.dtype)
        if state.resident_experts is not None:
            kept_there = moved_on_host(self.stage(), probe, kept)
            state = replace(state, device=probe.device)

        def moved(x: Tensor) -> Tensor:
            if id(x) in kept_there:
                return kept_there[id(x)]
            if id(x) not in kept:
                return fn(x)
            return _same_bits(x.data, fn)

        expert_map = self._buffers.get("expert_map")
        super()._apply(moved, recurse=False)
        sizes = state.sizes.with_dtype(self.w13_weight.dtype)
        if self._buffers.get("expert_map") is not expert_map:  # `to_empty` leaves it undefined
            self._fill_expert_map()
        self.take(Stage(replace(state, sizes=sizes), self._parameters))
        self.renew_slots()
        if sizes.dtype == state.sizes.dtype and not (is_meta or self.w13_weight.is_meta):
            self.state = replace(self.state, initial_seed=state.initial_seed)
        return self

    def _kept(self, cast: Container[str]) -> set[int]:
        own = {**parameter_specs(self.sizes), **dict.fromkeys(KEPT_BUFFERS)}
        tensors = {**self._parameters, **self._buffers}
        kept = [x for name, x in tensors.items() if name in own and name not in cast]
        return {id(x) for x in kept if x is not None}

    def __prepare_scriptable__(self) -> None:
        """Raise for `torch.jit.script`, which calls this for each module of a model."""
        raise NotImplementedError(checks.TORCHSCRIPT)

    def __getstate__(self) -> dict[str, Any]:
        """Replace 8-bit floats by bytes, since torch cannot pickle them."""
        parameters = {
            name: _Bytes(x.data.view(torch.uint8), x.dtype)
            if x is not None and x.is_floating_point() and x.dtype.itemsize == 1
            else x
            for name, x in self._parameters.items()
        }
        state = replace(self.state, host_experts=None)
        return {**self.__dict__, "_parameters": parameters, "state": state}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore 8-bit floats and give each parameter its ``weight_loader``; make new slots."""
        parameters = {
            name: nn.Parameter(x.data.view(x.dtype), False) if isinstance(x, _Bytes) else x
            for name, x in state["_parameters"].items()
        }
        super().__setstate__({**state, "_parameters": parameters})
        self.take(self.stage())
        self.state = replace(self.state, eplb_state_is_copied=self.eplb_state is not None)
        self.renew_slots()


def _same_bits(x: Tensor, fn: Any) -> Tensor:
    """Return what ``fn`` makes of a tensor whose bits stay: ``fn`` gets its bytes."""
    # One axis: `contiguous` leaves an axis of size 1 any stride, with which `view` refuses bytes.
    stored = x.contiguous().view(-1).view(torch.uint8)
    moved = fn(stored)  # `.to(dtype)` leaves integers alone
    if moved.dtype != torch.uint8:  # `.type(dtype)` does not
        moved = stored.to(moved.device)
    return moved.view(x.dtype).view(x.shape)


def _packed_fill(byte: float) -> int:
    """Return the word of a packed weight in which every byte is ``byte``."""
    return int.from_bytes(bytes([int(byte)] * 4), "little", signed=True)


class _Bytes(NamedTuple):
    data: Tensor
    dtype: torch.dtype


def offload(layer: ExpertLayer, resident: int, device: torch.device | None = None) -> None:
    """Move a layer's experts to host memory, ``resident`` of which its device holds.

    All of the rank's experts or more: they go (back) to the device. An error leaves the layer as it
    was. Parameters no longer require grad.

    Args:
        layer: its parameters hold memory.
        resident: the number of experts on the device.
        device: the device on which experts run; None: the layer's own.
    """
    reason = reason_against(layer.state)
    if reason is not None:
        raise NotImplementedError(reason)
    check_own_weights(layer)
    stage, device = layer.stage(), device or layer.compute_device
    on_all = resident >= layer.sizes.num_experts
    layer.take(on_device(stage, device) if on_all else on_host(stage, resident, device))
