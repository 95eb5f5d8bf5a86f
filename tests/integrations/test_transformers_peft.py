"""Adapters of PEFT's `target_parameters`: recognized, and run as grouped LoRA in every state."""

import copy
from functools import partial

import pytest
import torch

pytest.importorskip("transformers")

import fp8_transformers  # noqa: E402
from peft_stand_ins import (  # noqa: E402
    KINDS,
    dense,
    experts_of,
    kind_of,
    model_with_adapters,
    wrappers,
)
from sample_gates import swapped  # noqa: E402
from tiny_transformers import routed, tiny_qwen3, with_gate  # noqa: E402

import moe_ops  # noqa: E402
import moe_ops.integrations.transformers as integration  # noqa: E402
from moe_ops.integrations import _peft  # noqa: E402
from moe_ops.training import ExpertLora  # noqa: E402


@pytest.fixture(params=KINDS)
def kind(request):
    return kind_of(request.param)


@pytest.fixture
def model(kind, device):
    return model_with_adapters(kind, device)


@pytest.fixture
def ids(device):
    return torch.arange(3, 14, device=device)[None]


def assert_runs(model, names, ids):
    """The model computes what weights ``W`` plus the named adapters do."""
    with torch.no_grad():
        expected = dense(model, names, ids.device)(ids).logits
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-5)


def test_gradients_are_those_of_merged_weights(model, ids):
    names = integration.adapt(model)
    assert len(names) == len(experts_of(model)) and integration.adapt(model) == []
    assert all(name.endswith(f"layers.{i}.mlp.experts") for i, name in enumerate(names))
    assert_gradients(model, ["a"], ids)


def assert_gradients(model, names, ids):
    adapters = [
        factor[name].weight
        for wrapper in wrappers(model) for name in names
        for factor in (wrapper.lora_A, wrapper.lora_B)
    ]  # fmt: skip
    for p in adapters:
        p.requires_grad_()
    ours = torch.autograd.grad(model(ids, labels=ids).loss, adapters)
    merged = dense(model, names, ids.device)
    theirs = torch.autograd.grad(merged(ids, labels=ids).loss, adapters)
    for a, b in zip(ours, theirs, strict=True):
        assert b.any()
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-6)


def test_adapters_are_switched(model, kind, ids):
    """Each by itself, both at once (PEFT adds them), none; ranks differ."""
    integration.adapt(model)
    for names in (["a"], ["b"], ["a", "b"], ["a"]):
        kind.set_adapters(model, names)
        assert_runs(model, names, ids)
    with kind.disabled(model):
        assert_runs(model, [], ids)
    assert_runs(model, ["a"], ids)


def test_gradients_of_two_active_adapters(model, kind, ids):
    integration.adapt(model)
    kind.set_adapters(model, ["a", "b"])
    assert_gradients(model, ["a", "b"], ids)


def test_merged_adapters(model, kind, ids):
    """The merged one is not added again; disabled adapters are taken out of the weights, too."""
    integration.adapt(model)
    kind.merge(model)
    assert_runs(model, ["a"], ids)
    kind.unmerge(model)
    assert_runs(model, ["a"], ids)
    kind.merge(model)
    with kind.disabled(model):
        assert_runs(model, [], ids)
    assert_runs(model, ["a"], ids)


def test_unloaded_adapters(model, kind, ids, device):
    integration.adapt(model)
    copied = copy.deepcopy(model)
    plain = kind.unload(model)
    assert not wrappers(plain) and not integration.check(plain)
    assert_runs(plain, [], ids)
    assert_runs(copied, ["a"], ids)
    kind.set_adapters(copied, ["b"])
    assert_runs(copied, ["b"], ids)


def test_adapters_of_quantized_experts(model, kind, ids):
    """Quantized after PEFT has wrapped them; merging says that it cannot, and why."""
    plain = tiny_qwen3(ids.device)
    for each in (plain, model):
        moe_ops.quantize_(each, "int8_w8a16", progress=False)
    integration.adapt(model)
    with torch.no_grad():
        seen = {}
        for names in (["a"], ["b"]):
            kind.set_adapters(model, names)
            seen[names[0]] = model(ids).logits
            near = dense(model, names, ids.device)(ids).logits
            torch.testing.assert_close(seen[names[0]], near, rtol=0, atol=0.02)
        assert (seen["a"] - seen["b"]).abs().max() > 0.1
        with kind.disabled(model):
            assert torch.equal(model(ids).logits, plain(ids).logits)
    for wrapper in wrappers(model):
        with pytest.raises(NotImplementedError, match="merge must be called with weights that are"):
            wrapper.merge()
    model.train()
    kind.set_adapters(model, ["a"])
    model(ids, labels=ids).loss.backward()
    assert all(w.lora_A["a"].weight.grad.any() for w in wrappers(model))


def test_adapters_of_experts_in_host_memory(model, ids):
    """Once adapted; a merge and its end reach the slots, which held the weights before."""
    moe_ops.offload_(model, resident=2, progress=False)
    reasons = {f.reason for f in integration.check(model)}
    assert reasons == {
        "PEFT's adapters cannot run beside experts in host memory: adapt(model) runs them"
    }
    integration.adapt(model)
    assert integration.check(model) == []
    assert_runs(model, ["a"], ids)
    with torch.no_grad():
        adapted = model(ids).logits
        for method in ("merge", "unmerge"):
            for wrapper in wrappers(model):
                getattr(wrapper, method)()
            torch.testing.assert_close(model(ids).logits, adapted, rtol=1e-4, atol=1e-5)


def test_another_implementation_runs_the_wrapper(model, ids, monkeypatch):
    """``set_experts_implementation`` after `adapt` decides, too."""
    integration.adapt(model)
    monkeypatch.setattr(_peft, "active", None)
    with pytest.raises(TypeError, match="not callable"):
        model(ids)
    for outer in experts_of(model):
        _peft.wrappers_of(outer)[1].config._experts_implementation = "eager"
    model(ids)


def test_what_is_refused(model, ids):
    integration.adapt(model)
    outer = experts_of(model)[0]
    x, slots = torch.zeros(2, 32, device=ids.device), torch.zeros(2, 2, device=ids.device)
    with pytest.raises(NotImplementedError, match="adapter_names must be None for adapters of exp"):
        outer(x, slots.long(), slots, adapter_names=["a", "b"])


def test_what_cannot_be_adapted_leaves_the_model_as_it_was(model, monkeypatch):
    """A later layer fails: no wrapper is adapted."""
    first, last = experts_of(model)[0], experts_of(model)[-1]
    experts = _peft.wrappers_of(last)[1]
    unknown = type("Float8Tensor", (torch.Tensor,), {})(experts.down_proj.shape)
    failures = [
        (last, {"parameter_name": "router"}, "must have adapters of .* got an adapter of router"),
        (experts, {"act_fn": torch.nn.Mish()}, "must have adapters of .* got another activation"),
        (experts, {"down_proj": unknown}, "must have supported weights, got"),
    ]
    for module, changes, match in failures:
        with monkeypatch.context() as patch:
            for name, value in changes.items():
                patch.setitem(module.__dict__, name, value)  # found before a parameter or module
            with pytest.raises(NotImplementedError, match=match):
                integration.adapt(model)
            assert "forward" not in first.__dict__ and "merge" not in first.__dict__
    last.forward = print
    with pytest.raises(ValueError, match="must not have a forward of its own"):
        integration.adapt(model)
    assert "forward" not in first.__dict__
    del last.forward
    assert len(integration.adapt(model)) == len(experts_of(model))


def test_adapters_of_fp8_experts():
    """Beside quantized weights of transformers, too; experts without gradients refuse them."""
    experts = fp8_transformers.experts(block_size=(32, 32))
    hidden, width, count = 160, 128, experts.num_experts
    g = torch.Generator().manual_seed(3)
    a1, b1 = (torch.randn(1, count, *n, generator=g) for n in ((2, hidden), (2 * width, 2)))
    x, ids = torch.randn(5, hidden, generator=g), torch.arange(10).view(5, 2) % count
    weights, lora = torch.rand(5, 2, generator=g), ExpertLora((a1, b1), None)
    run = partial(integration.moe_ops_fp8_experts, experts, x, ids, weights)
    with torch.no_grad():
        assert not torch.allclose(run(lora), run())
        none = lora._replace(w1=(a1, torch.zeros_like(b1)))
        torch.testing.assert_close(run(none), run())
    experts.activation_scheme = "static"
    with pytest.raises(NotImplementedError, match="lora must be None for experts with static sc"):
        run(lora)
    gated = with_gate(swapped)
    with pytest.raises(NotImplementedError, match="lora must be None for experts with an activat"):
        integration.moe_ops_experts(gated, *routed(3), lora=lora)
