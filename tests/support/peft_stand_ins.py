"""Adapters of experts as PEFT makes them: by PEFT itself, or by a stand-in with its attributes."""

from __future__ import annotations

import itertools
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_transformers import tiny_qwen3
from torch import nn

from moe_ops.integrations import _peft

RANKS, SCALING = {"a": 3, "b": 2}, 2.0
TARGETS = ["gate_up_proj", "down_proj"]
KINDS = ("stand-in", "peft")


class ParamWrapper(nn.Module):
    """The attributes and methods of PEFT 0.21's ``ParamWrapper`` of a parameter ``(E, N, K)``."""

    def __init__(self, base_layer: Any, parameter_name: str) -> None:
        super().__init__()
        self.base_layer, self.parameter_name = base_layer, parameter_name
        experts = _peft.wrappers_of(base_layer)[1]
        self.num_experts, out, into = getattr(experts, parameter_name).shape
        wide = {name: rank * self.num_experts for name, rank in RANKS.items()}
        down = {name: nn.Linear(into, r, bias=False) for name, r in wide.items()}
        up = {name: nn.Linear(r, out, bias=False) for name, r in wide.items()}
        self.lora_A, self.lora_B = nn.ModuleDict(down), nn.ModuleDict(up)
        self.scaling = dict.fromkeys(RANKS, SCALING)
        self.active_adapters, self.merged_adapters = ["a"], []
        self.disable_adapters = False

    @property
    def merged(self) -> bool:
        return bool(self.merged_adapters)

    def _add(self, names: list[str], sign: int) -> None:
        weight = getattr(_peft.wrappers_of(self)[1], self.parameter_name)
        for name in names:
            weight.data += sign * delta(self, name).to(weight.device)

    def merge(self) -> None:
        self._add(self.active_adapters, 1)
        self.merged_adapters = list(self.active_adapters)

    def unmerge(self) -> None:
        self._add(self.merged_adapters, -1)
        self.merged_adapters = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Without adapters, by which tests see that this is what runs."""
        return self.base_layer(*args, **kwargs)


def delta(wrapper: Any, name: str) -> torch.Tensor:
    """``scaling * B @ A`` of all experts, as PEFT computes it."""
    a, b, count = wrapper.lora_A[name].weight, wrapper.lora_B[name].weight, wrapper.num_experts
    a, b = a.reshape(count, -1, a.shape[-1]), b.reshape(b.shape[0], -1, count)
    return torch.einsum("o r e, e r i -> e o i", b, a) * wrapper.scaling[name]


def blocks_of(model: nn.Module) -> list[Any]:
    return [m for m in model.modules() if "experts" in m._modules]


def experts_of(model: nn.Module) -> list[Any]:
    """The outermost wrapper of each layer's experts, or the experts."""
    return [block.experts for block in blocks_of(model)]


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a module itself, as code of PEFT gets them."""
    names = {"__name__": "peft.tuners.tuners_utils", "dict": dict, "module": module}
    found: dict[str, nn.Parameter] = eval("dict(module.named_parameters(recurse=False))", names)
    return found


def wrappers(model: nn.Module) -> list[Any]:
    return [w for outer in experts_of(model) for w in _peft.wrappers_of(outer)[0]]


class StandIn:
    """What PEFT's functions do to the stand-ins in a model."""

    def wrapped(self, model: Any) -> Any:
        for block in blocks_of(model):
            found = own_parameters(block.experts)
            for name in TARGETS:
                assert isinstance(found[name], nn.Parameter)
                block.experts = ParamWrapper(block.experts, name)
        return model

    def set_adapters(self, model: Any, names: list[str]) -> None:
        for wrapper in wrappers(model):
            wrapper.active_adapters = names

    @contextmanager
    def disabled(self, model: Any) -> Any:
        for wrapper in wrappers(model):
            wrapper.disable_adapters = True
        yield
        for wrapper in wrappers(model):
            wrapper.disable_adapters = False

    def merge(self, model: Any) -> None:
        for wrapper in wrappers(model):
            wrapper.merge()

    def unmerge(self, model: Any) -> None:
        for wrapper in wrappers(model):
            wrapper.unmerge()

    def unload(self, model: Any) -> Any:
        for block in blocks_of(model):
            block.experts = _peft.wrappers_of(block.experts)[1]
        return model

    def save(self, model: Any, folder: Path) -> None:
        state = {name: x for name, x in model.state_dict().items() if "lora_" in name}
        torch.save(state, folder / "adapters.pt")

    def load(self, model: Any, folder: Path) -> Any:
        model = self.wrapped(model)
        model.load_state_dict(torch.load(folder / "adapters.pt"), strict=False)
        return model


class RealPeft:
    """The same by PEFT."""

    def __init__(self, peft: Any) -> None:
        self.peft = peft

    def wrapped(self, model: Any) -> Any:
        configs = {
            name: self.peft.LoraConfig(
                r=rank, lora_alpha=SCALING * rank, target_modules=[],
                target_parameters=[f"experts.{target}" for target in TARGETS],
            )
            for name, rank in RANKS.items()
        }  # fmt: skip
        model = self.peft.get_peft_model(model, configs["a"], adapter_name="a")
        model.add_adapter("b", configs["b"])
        return model

    def set_adapters(self, model: Any, names: list[str]) -> None:
        model.base_model.set_adapter(names)

    def disabled(self, model: Any) -> Any:
        return model.disable_adapter()

    def merge(self, model: Any) -> None:
        model.merge_adapter()

    def unmerge(self, model: Any) -> None:
        model.unmerge_adapter()

    def unload(self, model: Any) -> Any:
        return model.unload()

    def save(self, model: Any, folder: Path) -> None:
        model.save_pretrained(folder)

    def load(self, model: Any, folder: Path) -> Any:
        loaded = self.peft.PeftModel.from_pretrained(model, folder / "a", adapter_name="a")
        loaded.load_adapter(folder / "b", adapter_name="b")
        return loaded


def kind_of(name: str) -> Any:
    """What adds adapters, by a name in `KINDS`; skips the test where PEFT is not installed."""
    return StandIn() if name == "stand-in" else RealPeft(pytest.importorskip("peft"))


def model_with_adapters(kind: Any, device: str, model: Any = None) -> Any:
    """A frozen model with adapters a (active) and b, no factor of which is zero."""
    if model is None:
        model = tiny_qwen3(device)
        model.set_experts_implementation("moe_ops")
    model = kind.wrapped(model.requires_grad_(False)).to(device)
    g = torch.Generator().manual_seed(1)
    for wrapper, name in itertools.product(wrappers(model), RANKS):
        for factor in (wrapper.lora_A[name], wrapper.lora_B[name]):
            factor.weight.data.copy_(torch.randn(factor.weight.shape, generator=g) * 0.2)
    return model


def dense(model: Any, names: list[str], device: str, plain: Any = None) -> Any:
    """A model without wrappers whose experts' weights are ``W`` plus the named adapters."""
    plain = tiny_qwen3(device) if plain is None else plain
    for experts, outer in zip(experts_of(plain), experts_of(model), strict=True):
        for wrapper in _peft.wrappers_of(outer)[0]:
            weight = getattr(experts, wrapper.parameter_name).detach()
            for name in names:
                weight = weight + delta(wrapper, name)
            delattr(experts, wrapper.parameter_name)  # a tensor in its place keeps its history
            setattr(experts, wrapper.parameter_name, weight)
    return plain
