"""A stage: the state and the parameters of a layer that is being filled or converted.

The parameters are a layer's own, or new ones, which the layer gets once they are complete.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from moe_ops.layer.parameters import ParameterSpec, parameter_specs
from moe_ops.layer.state import LayerState
from moe_ops.layer.steps import LoadSteps, copy_front
from moe_ops.loading.derived import channel_scales, has_plain_scales
from moe_ops.loading.given import GivenScales
from moe_ops.loading.names import SUFFIX, CheckpointLayout, suffix_of
from moe_ops.loading.stored import Form, canonical
from moe_ops.scheme import WHOLE
from moe_ops.scheme.formats import join_nibbles

SHARD_DIMS = {"w1": 0, "w2": 1, "w3": 0}
"""The axis of one expert's projection that ranks cut."""


@dataclass(frozen=True, eq=False)
class Stage(LoadSteps):
    """A state and the parameters that it describes, into which steps write.

    A step returns the stage that follows. It holds the same dictionary of parameters: what a step
    replaces is free before the next one.
    """

    state: LayerState
    parameters: dict[str, Any]
    """A parameter or None for each name."""

    def as_held(self) -> Stage:
        """Return the stage whose placement says which experts the rows hold now."""
        state = replace(self.state, placement=self.state.held_placement())
        return Stage(state, self.parameters)

    @property
    def compute_device(self) -> torch.device:
        """The device on which the experts run."""
        device: torch.device = self.state.device or self.parameters["w13_weight"].device
        return device

    def held(self) -> dict[str, nn.Parameter]:
        """Return the parameters of the experts that there are."""
        own = {name: self.parameters.get(name) for name in parameter_specs(self.state.sizes)}
        return {name: x for name, x in own.items() if x is not None}

    @classmethod
    def new(cls, state: LayerState, device: torch.device) -> Stage:
        """Return new parameters on a device, for a layer whose experts are on its device."""
        holder = nn.Module()
        state.quant_method.create_weights(holder, state.sizes, device)
        state = replace(state, fragments=(), host_experts=None, given_scales=GivenScales())
        return cls(replace(state, resident_experts=None), holder._parameters)

    def rows_of(self, logical: int) -> list[int]:
        """Return the rows of this rank that hold a logical expert: none, one, or one per copy."""
        return self.state.placement.rows.get(logical, [])

    def form(self, spec: ParameterSpec, shard_id: str, layout: CheckpointLayout) -> Form:
        """Return how a checkpoint's projection is stored; ``w13`` is gate and up in one tensor."""
        state = self.state
        hidden, width = state.model_hidden_size, state.intermediate_size
        n, k = {"w2": (hidden, width), "w13": (2 * width, hidden)}.get(shard_id, (width, hidden))
        quant, own = state.checkpoint_scheme.weight, state.sizes.scheme.weight
        return Form(n, k, spec.dtype, quant, own, layout)

    def part(self, expert_data: Tensor, spec: ParameterSpec, shard_id: str) -> Tensor:
        """Return the view of one expert's parameter that belongs to a shard."""
        sizes = self.state.sizes
        if shard_id == "w2" or not sizes.gated or expert_data.dim() == 0:
            return expert_data
        if sizes.interleaved:
            return expert_data[int(shard_id == "w3") :: 2]
        return expert_data.chunk(2)[int(shard_id == "w3")]

    def place(self, param: Tensor, spec: ParameterSpec, x: Tensor, shard_id: str, row: int) -> None:
        """Copy this rank's part of a canonical tensor to row ``row`` of ``param``."""
        expert_data = param.data[row]
        if getattr(param, "is_transposed", False):
            expert_data = expert_data.transpose(-1, -2)
        sizes, quant = self.state.sizes, self.state.sizes.scheme.weight
        shard_dim, tp_rank = SHARD_DIMS[shard_id], self.state.parallel.tp_rank
        is_channel = quant is not None and quant.group.cols == WHOLE
        joins_nibbles = quant is not None and quant.element.values_per_byte == 2
        if spec.kind == "zero_point" and joins_nibbles:
            if sizes.gated and sizes.interleaved and shard_id != "w2":
                self._load_alternating_zero_points(expert_data, shard_id, x, tp_rank)
                return
            x = join_nibbles(pad(x, (0, 0, 0, x.shape[0] % 2)), 0)
        if spec.kind == "bias" and shard_id == "w2":
            expert_data.zero_()  # results are summed over ranks, so only one of them has the bias
            if tp_rank == 0:
                copy_front(expert_data, x)
        elif x.dim() == 0:
            self._load_per_tensor_weight_scale(shard_id, param, x, row)
        elif (
            x.dim() == 1
            and spec.kind in ("scale", "channel_scale")
            or (spec.kind in ("scale", "zero_point") and x.shape[1] == 1 and is_channel)
        ):
            self._load_per_channel_weight_scale(expert_data, shard_dim, shard_id, x, tp_rank)
        else:
            self._load_model_weight_or_group_weight_scale(
                shard_dim, expert_data, shard_id, x, tp_rank
            )

    def take_input_scale(
        self, spec: ParameterSpec, x: Tensor, shard_id: str, expert: int, rows: Iterable[int]
    ) -> None:
        """Note the input scale of an expert, and copy it to the rows that hold the expert.

        An expert of another rank has no rows here. Its scale counts when the weights are processed.
        """
        scale = self.state.given_scales.take(spec.name, expert, shard_id, float(x))
        for row in rows:
            self.parameters[spec.name].data[row] = scale

    def load_stored(
        self, param: Tensor, spec: ParameterSpec, x: Tensor, name: str, shard_id: str, row: int
    ) -> None:
        """Load a checkpoint's tensor, in any of the known forms."""
        if getattr(param, "is_transposed", False) and x.dim() == 2:
            x = x.t()
        if not has_plain_scales(spec.kind, x, self.state.checkpoint_scheme.weight):
            self.place(param, spec, self.stored(spec, x, name, shard_id, row), shard_id, row)
            return
        which = "w13" if spec.is_w13 else "w2"
        for kind, part in channel_scales(x.to(param.device)).items():
            of = parameter_specs(self.state.sizes)[f"{which}_{SUFFIX[kind]}"]
            part = self.stored(of, part, f"{name}.{SUFFIX[kind]}", shard_id, row)
            self.place(self.parameters[of.name], of, part, shard_id, row)

    def stored(
        self, spec: ParameterSpec, x: Tensor, name: str, shard_id: str, expert: int
    ) -> Tensor:
        """Return one expert's tensor in canonical form; an error names the tensor."""
        form = self.form(spec, shard_id, CheckpointLayout())
        device = self.parameters[spec.name].device
        try:
            return canonical(spec.kind, x.to(device), suffix_of(name), form)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name} ({spec.name}[{expert}]): {error}") from None
