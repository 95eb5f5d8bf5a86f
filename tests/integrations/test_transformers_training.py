"""Models of transformers fine-tune with experts_implementation="moe_ops": gradients are eager's."""

import copy

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.flop_counter import FlopCounterMode

transformers = pytest.importorskip("transformers")

from tiny_transformers import build, tiny_qwen3  # noqa: E402

import moe_ops.integrations.transformers  # noqa: E402, F401
from moe_ops.testing import assert_matches_reference  # noqa: E402

MODELS = {
    "qwen3": lambda device: (tiny_qwen3(device), {"input_ids": tokens(device)}),
    **{
        name: lambda device, where=where, name=name: build(where, name, device)
        for name, where in (
            ("MixtralExperts", "transformers.models.mixtral.modeling_mixtral"),
            ("GptOssExperts", "transformers.models.gpt_oss.modeling_gpt_oss"),
            ("DeepseekV3Experts", "transformers.models.deepseek_v3.modeling_deepseek_v3"),
        )
    },
}
"""Experts of the default layout, and transposed with biases and interleaved gate and up."""


def tokens(device, length=13, batch=2):
    g = torch.Generator().manual_seed(length)
    return torch.randint(3, 60, (batch, length), generator=g).to(device)


def gradients(model, implementation, given):
    model = copy.deepcopy(model)
    model.set_experts_implementation(implementation)
    out = model(**given)
    scores = out.logits if hasattr(out, "logits") else out.last_hidden_state
    weights = torch.linspace(-1, 1, scores.numel(), device=scores.device).view_as(scores)
    (scores * weights).sum().backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def test_operations_equal_eager(device):
    """PyTorch counts the products that eager experts compute one by one, forward and backward."""
    for name, make in MODELS.items():
        model, given = make(device)
        counts = []
        for implementation in ("moe_ops", "eager"):
            with FlopCounterMode(display=False) as counter:
                gradients(model, implementation, given)
            counts.append(counter.get_total_flops())
        assert counts[0] == counts[1] > 0, name


@pytest.mark.parametrize("name", MODELS)
def test_gradients_equal_eager(name, device):
    model, given = MODELS[name](device)
    model.train()
    found = gradients(model, "moe_ops", given)
    near = gradients(model, "eager", given)
    exact = gradients(copy.deepcopy(model).double(), "eager", given)
    assert set(found) == set(near) and any("experts" in n for n in found)
    for n, actual in found.items():
        if not any(part in n for part in ("experts", "router", "gate", "embed")):
            continue  # of attention, through which the tokens' gradient goes on to the embedding
        a, b, c = (g.cpu().reshape(1, -1) for g in (actual, exact[n], near[n]))
        assert_matches_reference(a.contiguous(), b, c)


def test_a_model_learns(device):
    """A few steps of AdamW on one batch, with checkpointing; experts and routers move."""
    model = tiny_qwen3(device).train()
    model.set_experts_implementation("moe_ops")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer, ids, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), tokens(device), []
    for _ in range(20):
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert {n for n in before if "experts" in n or "gate" in n} <= moved


def test_autocast(device):
    """float32 weights under autocast: the loss and the gradients are about those in float32."""
    model, ids = tiny_qwen3(device).train(), tokens(device)
    model.set_experts_implementation("moe_ops")
    found = []
    for enabled in (False, True):
        model.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=enabled):
            loss = model(ids, labels=ids).loss
        loss.backward()
        gradient = model.model.layers[0].mlp.experts.down_proj.grad
        assert gradient.dtype == torch.float32
        found.append(torch.cat([loss.detach().view(1) * 0.01, gradient.flatten().float()]))
    assert (found[0] - found[1]).norm() <= 0.05 * found[0].norm()


def test_compiled_with_backward(device):
    """One compilation of forward and backward of a block serves other lengths."""
    torch._dynamo.reset()
    model = tiny_qwen3(device).train()
    model.set_experts_implementation("moe_ops")
    block, counter = model.model.layers[0].mlp, CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=counter)
    for number, length in enumerate((7, 5, 20)):
        x = torch.randn(1, length, 32, device=device)
        stance = "fail_on_recompile" if number else "default"
        found = []
        with torch.compiler.set_stance(stance):
            for run in (compiled, block):
                block.zero_grad()
                given = x.clone().requires_grad_()
                out = run(given)
                (out[0] if isinstance(out, tuple) else out).square().sum().backward()
                found.append([given.grad, *(p.grad.clone() for p in block.parameters())])
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b)
    assert counter.frame_count == 1
