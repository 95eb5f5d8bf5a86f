"""Loading transformers' folders into host memory: an experts module gets one expert at a time.

transformers collects the tensors of all experts of a module and stacks them, for all modules at
once. While `by_expert` is open, its function that loads a state dict gets the tensors of one expert
at a time instead, for a module whose parameters have one expert. So renaming, converting and
casting stay transformers' own. Each result is copied into the store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import modeling_utils
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)
from transformers.utils import logging

from moe_ops.integrations import _mxfp4
from moe_ops.integrations._layers import LAYER
from moe_ops.integrations._offloaded import ExpertsOnHost, QuantizedOnHost, hold
from moe_ops.offload.model import resident_counts
from moe_ops.offload.targets import FINDERS
from moe_ops.quantization.chosen import found_in, with_progress
from moe_ops.residency.host import check_host_room

LOADS = "convert_and_load_state_dict_in_model"
"""The function of transformers that loads a state dict."""
WRAPPED = "_wrapped_by_moe_ops"
INITIALIZED = "_is_hf_initialized"
"""The mark of transformers on what has its weights."""
PROBLEMS = ("missing_keys", "unexpected_keys", "mismatched_keys", "conversion_errors")
"""What transformers tells of tensors that it could not load."""


class Wanted(NamedTuple):
    """Where the experts of the model that is being loaded go."""

    resident: float | str
    """``resident`` of `moe_ops.offload_`."""
    device: torch.device
    """The device on which experts run."""


WANTED: ContextVar[Wanted | None] = ContextVar("experts of the model being loaded", default=None)


@contextmanager
def by_expert(resident: float | str, device: torch.device) -> Iterator[None]:
    """Let transformers load experts into host memory, one at a time, where that is possible.

    Transformers loads other modules whole: their tensors in the files are neither of single experts
    nor begin with an axis of experts, or are MXFP4 in triton_kernels' layouts.
    """
    _wrap_loader()
    token = WANTED.set(Wanted(resident, device))
    try:
        yield
    finally:
        WANTED.reset(token)


def _wrap_loader() -> None:
    """Wrap the function `LOADS`; calling this again changes nothing."""
    function = getattr(modeling_utils, LOADS, None)
    if function is None or hasattr(function, WRAPPED):
        return

    @wraps(function)
    def load(model: Any, state_dict: Any, load_config: Any, *args: Any, **named: Any) -> Any:
        wanted = WANTED.get()
        held: list[str] = []
        if wanted is not None:
            state_dict, held = _held(function, wanted, model, dict(state_dict), load_config)
        loaded = function(model, state_dict, load_config, *args, **named)
        loaded[0].missing_keys.difference_update(held)
        return loaded

    setattr(load, WRAPPED, True)
    setattr(modeling_utils, LOADS, load)


class _Part(NamedTuple):
    """The tensors of a state dict for one experts module."""

    per_expert: list[list[str]]
    """Names of tensors of single experts, E in each list, in order."""
    stacked: list[str]
    """Names of tensors whose first axis is that of experts."""

    def of(self, expert: int, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state dict of one expert."""
        single = {names[expert]: tensors[names[expert]] for names in self.per_expert}
        return {**single, **{name: _Row(tensors[name], expert) for name in self.stacked}}

    def names(self) -> list[str]:
        """Return all names."""
        return [*self.stacked, *(name for names in self.per_expert for name in names)]


class _Row:
    """One row of a tensor, or of a tensor in a file, as transformers reads either."""

    def __init__(self, source: Any, row: int) -> None:
        self._source, self._row = source, row

    def __getitem__(self, _: Any) -> Tensor:
        """Read the row, with its axis."""
        row: Tensor = self._source[self._row : self._row + 1]
        return row

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


class _OneModule:
    """Stands for a model in which only one module gets weights."""

    def __init__(self, model: Any, name: str, module: nn.Module) -> None:
        self._model, self._name, self._module = model, name, module

    def state_dict(self) -> dict[str, Tensor]:
        """Return the module's own parameters, by their names in the model."""
        own = self._module.named_parameters(recurse=False)
        return {f"{self._name}.{key}": x for key, x in own}

    def named_buffers(self) -> list[tuple[str, Tensor]]:
        """Return none."""
        return []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _held(
    function: Callable[..., Any], wanted: Wanted, model: Any, tensors: dict[str, Any], config: Any
) -> tuple[dict[str, Any], list[str]]:
    """Put the experts of a model in host memory; return other tensors, and the parameters' names.

    Quantized layers, which transformers does not load, learn how many experts are resident.

    Raises:
        TypeError, ValueError: ``resident_experts`` outside its range.
        RuntimeError: too little host memory; a tensor that transformers cannot load.
    """
    targets = list(found_in(model, FINDERS))
    if any(target.reason_against() for target in targets):
        return tensors, []
    named = resident_counts(targets, "resident_experts", wanted.resident)
    counts = {target.name: count for target, count in zip(targets, named, strict=True)}
    quantized = [
        target
        for target in targets
        if isinstance(target, QuantizedOnHost) and counts[target.name] < target.amount().num_experts
    ]
    names: list[str] = []
    for inner in quantized:
        layer = inner.module  # stays on meta until its own tensors are loaded
        layer.state = replace(
            layer.state, resident_experts=counts[inner.name], device=wanted.device
        )
        names += [f"{inner.name}.{LAYER}.{key}" for key, _ in layer.named_parameters()]
    own = [t for t in targets if isinstance(t, ExpertsOnHost) and not _mxfp4.is_experts(t.module)]
    parts = _parts_of_modules(model, tensors, config.weight_mapping or [], {t.name: t for t in own})
    loads = []
    for target in own:
        amount, part = target.amount(), parts.get(target.name)
        if part is None or not 1 < amount.num_experts > counts[target.name]:
            continue
        expert = _loader(function, model, target, part, tensors, config)
        if expert(0) is not None:
            loads.append((target, part, expert))
    sizes = (target.amount() for target in (*quantized, *(load[0] for load in loads)))
    check_host_room(sum(amount.num_experts * amount.expert_bytes for amount in sizes))
    for target, part, expert in with_progress(loads, "loading experts", progress=bool(loads)):
        _hold(target, counts[target.name], wanted.device, expert)
        names += [f"{target.name}.{key}" for key in target.module._parameters]
        for name in part.names():
            del tensors[name]
    return tensors, names


def _parts_of_modules(
    model: Any, tensors: Mapping[str, Any], conversions: list[Any], own: Mapping[str, Any]
) -> dict[str, _Part]:
    """Return the tensors of each experts module, without modules that have others."""
    renamings = [x for x in conversions if isinstance(x, WeightRenaming)]
    converters = [x for x in conversions if isinstance(x, WeightConverter)]
    prefix, state = model.base_model_prefix, model.state_dict()
    groups: dict[str, dict[tuple[str, str], list[str]]] = {}
    for name in sorted(tensors, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if renamed not in state and name in state:
            renamed, pattern = name, None
        module = renamed.rpartition(".")[0]
        if module in own and renamed in state:
            group = (renamed, name if pattern is None else pattern)
            groups.setdefault(module, {}).setdefault(group, []).append(name)
    parts = {}
    for module, lists_of in groups.items():
        experts, lists = own[module].amount().num_experts, [*lists_of.values()]
        if all(len(names) in (1, experts) for names in lists):
            single = [names for names in lists if len(names) == experts]
            parts[module] = _Part(single, [names[0] for names in lists if len(names) == 1])
    return parts


def _loader(
    function: Callable[..., Any],
    model: Any,
    target: ExpertsOnHost,
    part: _Part,
    tensors: Mapping[str, Any],
    config: Any,
) -> Callable[[int], dict[str, Tensor] | None]:
    """Return a function of an expert's number: its tensors by the parameters' names, one row each.

    It returns None if transformers does not make exactly these of one expert's tensors.
    """
    module = target.module
    rows = {key: (1, *x.shape[1:]) for key, x in module.named_parameters(recurse=False)}
    dtypes = {key: x.dtype for key, x in module.named_parameters(recurse=False)}

    def load(expert: int) -> dict[str, Tensor] | None:
        kept = dict(module._parameters)
        try:
            for key, shape in rows.items():
                empty = torch.empty(shape, dtype=dtypes[key], device="meta")
                module._parameters[key] = nn.Parameter(empty, requires_grad=False)
            one: Any = _OneModule(model, target.name, module)
            with _without_progress_bars():
                info, _ = function(one, part.of(expert, tensors), config)
            made = {key: module._parameters[key].detach() for key in rows}
        finally:
            module._parameters.update(kept)
        right = all(not x.is_meta and tuple(x.shape) == rows[key] for key, x in made.items())
        return made if right and not any(getattr(info, name) for name in PROBLEMS) else None

    return load


def _hold(
    target: ExpertsOnHost,
    resident: int,
    device: torch.device,
    load: Callable[[int], dict[str, Tensor] | None],
) -> None:
    """Put a module's experts in host memory, one after the other."""
    module, experts = target.module, target.amount().num_experts

    def one(expert: int) -> dict[str, Tensor]:
        made = load(expert)
        if made is None:
            raise RuntimeError(
                f"path must hold expert {expert} of {target.name} as it holds expert 0, got "
                "tensors that transformers does not load"
            )
        return made

    for key, x in one(0).items():
        row = x.contiguous().expand(experts, *x.shape[1:])
        module._parameters[key] = nn.Parameter(row, requires_grad=False)

    def fill() -> None:
        for expert in range(experts):
            for key, x in one(expert).items():
                module._parameters[key].data[expert].copy_(x[0])

    hold(module, resident, device, fill)
    for x in (module, *module.parameters(recurse=False)):
        setattr(x, INITIALIZED, True)


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Hide the bars of transformers, of which each call would show one."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
