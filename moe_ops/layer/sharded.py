"""Where the tensors of one of several ranks lie in the tensors of the same layer on one rank.

`torch.distributed.checkpoint` saves and loads the state dict of a layer over several ranks by these
places: see `RankTensor`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

from torch import Tensor, nn

from moe_ops.layer.base import ExpertLayer
from moe_ops.layer.parameters import ParameterSpec, parameter_specs
from moe_ops.layer.partition import LayerSizes
from moe_ops.layer.rank_tensor import RankPiece, RankTensor, rank_tensor
from moe_ops.layer.state import PLAIN, LayerState


class Span(NamedTuple):
    """Neighbouring entries of one axis."""

    start: int
    """The first one in the rank's tensor."""
    offset: int
    """The first one in the whole tensor."""
    length: int


def rank_tensors(layer: ExpertLayer, tensors: Mapping[str, Tensor]) -> dict[str, RankTensor]:
    """Return a layer's parameters, by name, as tensors that know their place.

    Args:
        layer: a layer over several ranks.
        tensors: parameters, or tensors of their shapes, such as an optimizer's.
    """
    state, refusal = layer.state, refusal_of(layer)
    sizes, rows, parallel = state.sizes, _row_spans(state), state.parallel
    own, whole = parameter_specs(sizes), parameter_specs(whole_sizes(state))
    cut = parameter_specs(replace(sizes, intermediate_size=2 * sizes.intermediate_size))
    experts = len(state.placement.rows)
    placed = {}
    for name, x in tensors.items():
        if name not in own:
            continue
        shape, axes = (experts, *x.shape[1:]), [rows, *([Span(0, 0, n)] for n in x.shape[1:])]
        if parallel.tp_size > 1 and not refusal:
            shape = whole[name].shape
            for axis in range(1, x.dim()):
                if own[name].shape[axis] != cut[name].shape[axis]:
                    axes[axis] = _axis_parts(state, own[name], axis, shape[axis])
            if name == "w2_bias" and parallel.tp_rank:
                axes[0] = []  # the first rank alone adds it
        boxes = [RankPiece(*zip(*spans, strict=True)) for spans in product(*axes)]
        placed[name] = rank_tensor(x, shape, boxes, refusal)
    return placed


def whole_sizes(state: LayerState) -> LayerSizes:
    """Return the sizes of the layer on one rank.

    Where this rank has smaller blocks than checkpoints, the whole layer has such blocks, too.
    """
    sizes, own = state.saved_sizes(), state.sizes
    if sizes.scheme.key != own.plain.scheme.key:
        sizes = replace(own, intermediate_size=state.intermediate_size)
    return replace(sizes, num_experts=len(state.placement.rows), exact_of=own.exact_of)


def refusal_of(layer: ExpertLayer) -> str:
    """Return why `torch.distributed.checkpoint` cannot have the layer's tensors; empty: it can."""
    must = "must {} for torch.distributed.checkpoint (or save each rank's state_dict in a file of"
    must += " its own, with torch.save or safetensors), got {}"
    if layer.w13_input_order is not None:
        return "a FusedMoE over several ranks " + must.format("have no w13_input_order", "one")
    forms = {*layer.state.forms.values()} - {PLAIN}
    if forms and layer.state.parallel.tp_size > 1:
        rule = must.format("be in the plain form, see unpack_,", f"the form {min(forms)}")
        return "weights of experts that tp_size ranks share " + rule
    return ""


def _row_spans(state: LayerState) -> list[Span]:
    """Return which experts the rows hold; replicas of an expert are spans of one row each."""
    experts, spans = state.held_placement().experts, list[Span]()
    merges = len(state.placement.row) == len(state.placement.rows)
    for row, expert in enumerate(experts):
        last = spans[-1] if spans and merges else None
        if last is not None and last.offset + last.length == expert:
            spans[-1] = last._replace(length=last.length + 1)
        elif expert >= 0:
            spans.append(Span(row, expert, 1))
    return spans


def _axis_parts(state: LayerState, spec: ParameterSpec, axis: int, whole: int) -> list[Span]:
    """Return this rank's part of an axis that ranks share; gate and up rows have one part each."""
    rank, sizes = state.parallel.tp_rank, state.sizes
    halves = 2 if spec.is_w13 and sizes.gated and not sizes.interleaved else 1
    each, total = spec.shape[axis] // halves, whole // halves
    length = min(each, total - rank * each)
    return [
        Span(half * each, half * total + rank * each, length)
        for half in range(halves)
        if length > 0
    ]


def sharded_state_dict(model: nn.Module, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict whose tensors of experts know their place in the whole layers.

    For the state dict of an optimizer, which `torch.distributed.checkpoint` would otherwise keep
    for one rank's experts. Save the result, or load into it: its tensors share the memory of
    ``state_dict``, which is then given to ``set_optimizer_state_dict``. (The state dict of a model
    needs no call.)

    Args:
        model: the model; its layers over several ranks are found.
        state_dict: what ``get_optimizer_state_dict`` returned, flattened or not.

    Returns:
        The same entries; tensors under the name of an expert's parameter are replaced if they have
        its shape or, where ranks hold whole experts, its rows. One number stays as it is.

    Raises:
        NotImplementedError: a tensor of another shape under such a name (Adafactor's, where ranks
            hold parts of experts).
    """
    layers = {
        _clean(name): module
        for name, module in model.named_modules()
        if isinstance(module, ExpertLayer) and module.is_spread
    }

    def placed(path: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: placed(f"{path}.{name}", x) for name, x in value.items()}
        if not isinstance(value, Tensor):
            return value
        for prefix, layer in layers.items():
            for name, param in layer.named_parameters(recurse=False):
                if path.startswith(f".state.{prefix}{name}."):
                    return _state_tensor(layer, name, param, path, value)
        return value

    return placed("", state_dict)


def _state_tensor(
    layer: ExpertLayer, name: str, param: Tensor, path: str, value: Tensor
) -> Tensor | RankTensor:
    """Return a tensor of an optimizer for the parameter of a name, with its place."""
    if name not in parameter_specs(layer.sizes) or value.numel() == 1:
        return value
    has_rows = layer.state.parallel.tp_size == 1 and value.shape[:1] == param.shape[:1]
    if value.shape != param.shape and not has_rows:
        raise NotImplementedError(
            f"state_dict{path} must have the shape of {name}, {tuple(param.shape)}, since ranks "
            f"hold parts of it, got {tuple(value.shape)}"
        )
    return rank_tensors(layer, {name: value})[name]


def _clean(name: str) -> str:
    """Return a module's name as the beginning of its parameters' names in state dicts."""
    inserted = {"module", "_orig_mod", "_checkpoint_wrapped_module"}
    return "".join(f"{part}." for part in name.split(".") if part and part not in inserted)
