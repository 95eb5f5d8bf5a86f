"""What trainers do with a model: checkpoints, accumulation, autocast, compiled steps."""

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from training_models import KINDS, batch_of, gradients, model_of

import moe_ops


def run(model, ids):
    model.zero_grad()
    loss = model(ids)
    loss.backward()
    return loss.detach(), gradients(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", [*KINDS, "qlora", "frozen", "llama4"])
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_functions_in_checkpoints_are_bitwise(dtype, device):
    """Without a module too, and in checkpoints of others, whose autograd Function has any name."""
    g = torch.Generator().manual_seed(0)
    shapes = (9, 32), (8, 48, 32), (8, 32, 24), (9, 8)
    given = [torch.randn(s, generator=g).to(device, dtype).requires_grad_() for s in shapes]

    def route_and_run(x, w1, w2, logits):
        weights, ids = moe_ops.fused_topk(x, logits, 2, True)
        return moe_ops.fused_experts(x, w1, w2, weights, ids)

    def routed(*call):
        return moe_ops.fused_moe(*call, 2)

    for run in (routed, route_and_run):
        expected = run(*given)
        for again in (partial(checkpoint, run, use_reentrant=True), partial(Recomputed.apply, run)):
            assert torch.equal(again(*given), expected)
            with torch.no_grad():
                assert torch.equal(again(*given), run(*given))


class Recomputed(torch.autograd.Function):
    """As DeepSpeed's, Megatron's and Unsloth's checkpoints are made."""

    @staticmethod
    def forward(context, run, *given):
        with torch.no_grad():
            return run(*given)


class Operators(TorchDispatchMode):
    """Notes the library's operators that are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "moe_ops":
            self.names.append(function.name())
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", [*KINDS, "llama4"])
def test_without_grad_mode(kind, device):
    """Bits are those of a frozen model; without gradients, so are the operators."""
    model, ids = model_of(kind, torch.bfloat16).to(device), batch_of(2).to(device)
    calls = {}

    def call(name, mode=nullcontext):
        with mode(), Operators() as seen:
            calls[name] = model(ids).detach()
        return seen.names

    steps = call("recorded")
    names = call("no_grad", torch.no_grad)
    assert call("inference", torch.inference_mode) == names
    model.requires_grad_(False)
    assert call("frozen") == names and len(names) == len(steps)
    assert torch.equal(calls["no_grad"], calls["frozen"])
    assert torch.equal(calls["inference"], calls["frozen"])
    assert torch.equal(calls["recorded"], calls["frozen"])


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
