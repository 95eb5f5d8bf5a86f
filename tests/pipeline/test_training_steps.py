"""What trainers do with a model: checkpoints, accumulation, autocast, compiled steps."""

import copy

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from training_models import KINDS, batch_of, gradients, model_of


def run(model, ids):
    model.zero_grad()
    loss = model(ids)
    loss.backward()
    return loss.detach(), gradients(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", [*KINDS, "qlora"])
def test_checkpoints_are_bitwise(kind, reentrant, dtype, device):
    """Reentrant ones run the forward pass without grad mode first."""
    model, ids = model_of(kind, dtype).to(device), batch_of(2).to(device)
    loss, expected = run(model, ids)
    model.checkpoint(use_reentrant=reentrant)
    again, found = run(model, ids)
    assert torch.equal(again, loss)
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize("kind", KINDS)
def test_experts_in_both_passes_of_a_checkpoint(kind, device):
    """Reentrant: the pass without grad mode and the one with it have the bits of a plain step."""
    model, ids, seen = model_of(kind, torch.bfloat16).to(device), batch_of(2).to(device), []
    for name, module in model.named_modules():
        if type(module).__name__.endswith(("FusedMoE", "Experts")):
            module.register_forward_hook(
                lambda *call, name=name: seen.append((name, torch.is_grad_enabled(), call[2]))
            )
    run(model, ids)
    plain = {name: out for name, _, out in seen}
    seen.clear()
    model.checkpoint(use_reentrant=True)
    run(model, ids)
    assert [(name, grad) for name, grad, _ in seen] == [
        *((name, False) for name in plain), *((name, True) for name in reversed(plain)),
    ]  # fmt: skip
    assert [name for name, _, out in seen if not torch.equal(out, plain[name])] == []


@pytest.mark.parametrize("kind", KINDS)
def test_without_grad_mode(kind, device):
    """In training mode the loss has the bits of a step; evaluation may round less."""
    model, ids = model_of(kind, torch.bfloat16).to(device), batch_of(2).to(device)
    loss, recorded = model(ids).detach(), []
    for module in model.modules():
        if type(module).__name__.endswith(("FusedMoE", "Experts")):
            module.register_forward_hook(lambda *call: recorded.append(call[2].requires_grad))
    with torch.no_grad():
        assert torch.equal(model(ids), loss)
        assert recorded == [False, False]
        torch.testing.assert_close(model.eval()(ids), loss, rtol=0.02, atol=0)
    with torch.inference_mode():
        assert model.train()(ids).isfinite()


@pytest.mark.parametrize("kind", KINDS)
def test_accumulated_gradients(kind, device):
    model, ids = model_of(kind).to(device), batch_of(4).to(device)
    loss, expected = run(model, ids)
    model.zero_grad()
    losses = [model(part) / 2 for part in ids.chunk(2)]
    for part in losses:
        part.backward()
    torch.testing.assert_close(sum(losses).detach(), loss)
    found = gradients(model)
    assert all(x.any() for name, x in found.items() if "expert" in name or "moe" in name)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_autocast(kind, device):
    """Parameters and gradients stay in float32; the experts compute in bfloat16.

    No token of this batch has two logits so close that rounding exchanges its experts.
    """
    model, ids = model_of(kind).to(device), batch_of(2, 5).to(device)
    exact, expected = run(model, ids)
    with torch.autocast(device, torch.bfloat16):
        loss = model(ids)
    model.zero_grad()
    loss.backward()
    assert loss.dtype == torch.float32 and not torch.equal(loss, exact)
    torch.testing.assert_close(loss.detach(), exact, rtol=0.02, atol=0)
    for name, found in gradients(model).items():
        assert found.dtype == torch.float32
        near = (found - expected[name]).norm() <= 0.1 * expected[name].norm() + 1e-3
        assert near, name


@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        ("layer", "aot_eager"),
        pytest.param("layer", "inductor", marks=[pytest.mark.slow, pytest.mark.exhaustive]),
        pytest.param("qwen3", "aot_eager", marks=[pytest.mark.slow, pytest.mark.exhaustive]),
    ],
)
def test_one_compilation_of_a_step(kind, backend, device):
    """Loss, backward pass and optimizer, compiled once for all lengths."""
    torch._dynamo.reset()
    model = model_of(kind).to(device)
    del model.layers[1:]  # code grows with layers
    plain, counter = copy.deepcopy(model), CompileCounterWithBackend(backend)
    rate = torch.tensor(1e-2, device=device)

    def stepping(model):
        optimizer = torch.optim.AdamW(model.parameters(), rate)

        def step(ids):
            loss = model(ids)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    eager = stepping(plain)
    compiled = torch.compile(stepping(model), dynamic=True, backend=counter)
    for number, length in enumerate((13, 7, 20)):
        ids = batch_of(2, length).to(device)
        with torch.compiler.set_stance("fail_on_recompile" if number else "default"):
            loss = compiled(ids)
        torch.testing.assert_close(loss, eager(ids))
        if not number:
            frames = counter.frame_count
    assert counter.frame_count == frames
