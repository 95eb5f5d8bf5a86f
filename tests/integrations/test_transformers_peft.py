"""Adapters of PEFT's `target_parameters`: recognized, and run as grouped LoRA."""

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from tiny_transformers import tiny_qwen3  # noqa: E402

import moe_ops.integrations.transformers as integration  # noqa: E402
from moe_ops.integrations import _peft  # noqa: E402

RANK, SCALING = 3, 2.0


class ParamWrapper(nn.Module):
    """The attributes of PEFT 0.21's ``ParamWrapper`` of a 3-D parameter that is not transposed."""

    def __init__(self, base_layer, parameter_name):
        super().__init__()
        self.base_layer, self.parameter_name = base_layer, parameter_name
        inner = base_layer
        while isinstance(inner, ParamWrapper):
            inner = inner.base_layer
        self.num_experts, out, into = getattr(inner, parameter_name).shape
        self.lora_A = nn.ModuleDict({"a": nn.Linear(into, RANK * self.num_experts, bias=False)})
        self.lora_B = nn.ModuleDict({"a": nn.Linear(RANK * self.num_experts, out, bias=False)})
        self.scaling, self.active_adapters = {"a": SCALING}, ["a"]
        self.disable_adapters = self.merged = False

    def delta(self):
        """``W + delta`` is what PEFT computes."""
        a, b = self.lora_A["a"].weight, self.lora_B["a"].weight
        a = a.reshape(self.num_experts, -1, a.shape[-1])
        b = b.reshape(b.shape[0], -1, self.num_experts)
        return torch.einsum("o r e, e r i -> e o i", b, a) * SCALING


@pytest.fixture
def model(device):
    model = tiny_qwen3(device).requires_grad_(False)
    model.set_experts_implementation("moe_ops")
    for layer in model.model.layers:
        for name in ("gate_up_proj", "down_proj"):
            layer.mlp.experts = ParamWrapper(layer.mlp.experts, name).to(device)
    return model


def merged(model):
    """Experts with ``W + delta`` in autograd, as PEFT runs them."""
    for layer in model.model.layers:
        wrappers, experts = _peft.wrappers_of(layer.mlp.experts)
        for wrapper in wrappers:
            weight = getattr(experts, wrapper.parameter_name)
            delattr(experts, wrapper.parameter_name)
            setattr(experts, wrapper.parameter_name, weight + wrapper.delta())
        layer.mlp.experts = experts


def test_gradients_are_those_of_merged_weights(model, device):
    names = integration.adapt(model)
    assert names == [f"model.layers.{i}.mlp.experts" for i in range(len(model.model.layers))]
    assert integration.adapt(model) == []
    ids = torch.arange(3, 14, device=device)[None]
    adapters = [p for p in model.parameters() if p.requires_grad]
    assert len(adapters) == 4 * len(names)
    ours = torch.autograd.grad(model(ids, labels=ids).loss, adapters)
    merged(model)
    theirs = torch.autograd.grad(model(ids, labels=ids).loss, adapters)
    for a, b in zip(ours, theirs, strict=True):
        assert b.any()
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-6)


def test_adapters_that_are_off(model, device):
    integration.adapt(model)
    ids = torch.arange(3, 14, device=device)[None]
    for layer in model.model.layers:
        for wrapper in _peft.wrappers_of(layer.mlp.experts)[0]:
            wrapper.disable_adapters = True
    with torch.no_grad():
        out = model(ids).logits
        plain = tiny_qwen3(device)
        plain.set_experts_implementation("moe_ops")
        assert torch.equal(out, plain(ids).logits)


def test_what_is_refused(model):
    experts = model.model.layers[0].mlp.experts
    experts.active_adapters = ["a", "b"]
    experts.lora_A["b"] = experts.lora_A["a"]
    with pytest.raises(NotImplementedError, match="at most one adapter of down_proj must be"):
        _peft.active([experts])
    experts.parameter_name = "router"
    with pytest.raises(NotImplementedError, match="must have adapters of .* got an adapter of rou"):
        integration.adapt(model)
