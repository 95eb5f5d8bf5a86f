"""Experts of transformers whose outputs are normed before the weighted sum, as in Muse Spark."""

import copy

import pytest
import torch
from torch import nn

import moe_ops

transformers = pytest.importorskip("transformers")

import peft_stand_ins as stand_ins  # noqa: E402
from tiny_transformers import QWEN3  # noqa: E402
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # noqa: E402

import moe_ops.integrations.transformers as integration  # noqa: E402


class Norm(nn.Module):
    """``MuseSparkTextInputScaledRMSNorm``."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-0.5, 0.5, width))

    def forward(self, x):
        out = (x.float() * (1 + self.weight).float()).type_as(x).float()
        return (out * torch.rsqrt(out.square().mean(-1, keepdim=True) + 1e-5)).type_as(x)


class NormedQwen3(transformers.Qwen3MoeForCausalLM):
    """Qwen3 with the attributes of ``use_experts_implementation(has_post_expert_norm=True)``."""

    def __init__(self, config):
        super().__init__(config)
        for experts in self.experts():
            experts.has_post_expert_norm = True
            experts.post_expert_norm = Norm(config.hidden_size)

    @classmethod
    def _can_set_experts_implementation(cls):
        return True  # transformers reads the file of the class

    def experts(self):
        return [layer.mlp.experts for layer in self.model.layers]


def in_pytorch(self, hidden_states, top_k_index, top_k_weights):
    """An experts implementation, expert by expert."""
    out = torch.zeros_like(hidden_states)
    for e in range(self.down_proj.shape[0]):
        token, slot = (top_k_index == e).nonzero(as_tuple=True)
        rows = self._apply_gate(hidden_states[token] @ self.gate_up_proj[e].t())
        rows = self.post_expert_norm(rows @ self.down_proj[e].t())
        out = out.index_add(0, token, rows * top_k_weights[token, slot, None])
    return out


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, "in_pytorch", in_pytorch)


@pytest.fixture
def model(device):
    torch.manual_seed(0)
    model = NormedQwen3(transformers.Qwen3MoeConfig(**QWEN3)).to(device)
    for experts in model.experts():
        for weight in (experts.gate_up_proj, experts.down_proj):
            nn.init.normal_(weight, std=0.3)
    model.set_experts_implementation("moe_ops")
    return model


def tokens(device):
    return torch.arange(3, 16, device=device)[None]


def gradients(model, implementation, ids):
    model = copy.deepcopy(model)
    model.set_experts_implementation(implementation)
    out = model(ids, labels=ids)
    out.loss.backward()
    return {"logits": out.logits, **{n: p.grad for n, p in model.named_parameters()}}


def test_results_and_gradients_are_those_of_plain_pytorch(model, device):
    assert integration.check(model) == []
    ids = tokens(device)
    found, expected = (gradients(model, name, ids) for name in ("moe_ops", "in_pytorch"))
    assert any("post_expert_norm" in name for name in found)
    for name, actual in found.items():
        assert expected[name].any(), name
        torch.testing.assert_close(actual, expected[name], rtol=1e-4, atol=1e-5)


def test_a_gate_that_this_library_does_not_have(model, device):
    ids = tokens(device)
    for experts in model.experts():
        experts.act_fn = nn.Mish()
    out = model(ids).logits
    with pytest.raises(NotImplementedError, match="gradients of unfused_experts"):
        out.sum().backward()
    model.set_experts_implementation("in_pytorch")
    torch.testing.assert_close(out, model(ids).logits, rtol=1e-4, atol=1e-5)


def test_sentinels_of_expert_parallelism(model, device):
    """Nothing is read of their slots, nor of their gradients; a norm of zeros may be anything."""
    experts = model.experts()[0]
    experts.post_expert_norm = nn.LayerNorm(32).to(device)
    nn.init.ones_(experts.post_expert_norm.bias)
    x = torch.randn(3, 32, device=device, requires_grad=True)
    ids = torch.tensor([[0, 8], [8, 8], [1, 2]], device=device)
    weights = torch.tensor([[0.5, torch.nan], [torch.nan, 0.0], [0.1, 0.9]], device=device)
    used = weights.masked_fill(ids == 8, 0).requires_grad_()
    expected = in_pytorch(experts, x, ids, used)
    out = experts(x, ids, weights.requires_grad_())
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    assert (out[1] == 0).all()
    inputs = (x, *experts.parameters())
    found = torch.autograd.grad(out.square().sum(), (*inputs, weights))
    wanted = torch.autograd.grad(expected.square().sum(), (*inputs, used))
    for actual, gradient in zip(found, wanted, strict=True):
        torch.testing.assert_close(actual, gradient, rtol=1e-4, atol=1e-4)


def test_compiled_whole(model, device):
    block = model.model.layers[0].mlp
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend="aot_eager")
    for number, length in enumerate((7, 5, 20)):
        x, found = torch.randn(1, length, 32, device=device), []
        torch._dynamo.mark_dynamic(x, 1)
        with torch.compiler.set_stance("fail_on_recompile" if number else "default"):
            for run in (compiled, block):
                block.zero_grad()
                out = run(x)
                (out[0] if isinstance(out, tuple) else out).square().sum().backward()
                found.append([p.grad for p in block.parameters()])
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("scheme", ["int8_w8a16", "fp8_tensor_static", "mxfp6_e2m3"])
def test_quantized_saved_and_loaded_with_adapters(scheme, model, device, tmp_path):
    """Saved once as compressed-tensors, once in our own form; the norm is beside the experts."""
    ids = tokens(device)
    g = torch.Generator().manual_seed(0)
    slots = torch.rand(9, 8, generator=g).topk(2).indices, torch.rand(9, 2, generator=g)
    given = [x.to(device) for x in (torch.randn(9, 32, generator=g), *slots)]
    with torch.no_grad():
        plain = model.experts()[0](*given)
        run = (lambda m: m(ids)) if scheme.endswith("static") else None
        moe_ops.quantize_(model, scheme, calibrate=run, progress=False)
        error = (model.experts()[0](*given) - plain).norm()
        assert 0 < error < 0.1 * plain.norm()
        expected = model(ids).logits
        model.save_pretrained(tmp_path)
        read, report = integration.from_pretrained(
            tmp_path, auto_class=NormedQwen3, dtype=torch.float32, output_loading_info=True
        )
        assert not any(report.values()), report
        read = read.to(device)
        assert torch.equal(read(ids).logits, expected)
    assert integration.check(read) == []
    model = stand_ins.model_with_adapters(stand_ins.StandIn(), device, read)
    assert len(integration.adapt(model)) == 2
    out = model(ids, labels=ids)
    assert (out.logits - expected).abs().max() > 0.01
    factors = [w.lora_A["a"].weight.requires_grad_() for w in stand_ins.wrappers(model)]
    assert all(g.any() for g in torch.autograd.grad(model(ids, labels=ids).loss, factors))


def test_tensors_of_experts_that_are_not_theirs_are_named(model, device, tmp_path):
    """Tensors that the module itself has are not unexpected; others are."""
    moe_ops.quantize_(model, "int8_w8a16", progress=False)
    model.experts()[1].post_expert_norm.register_buffer("stray", torch.zeros(2))
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"model.layers.1.mlp.experts exactly, .*norm.stray"):
        integration.from_pretrained(tmp_path, auto_class=NormedQwen3)
