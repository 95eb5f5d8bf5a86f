"""Every architecture whose experts transformers dispatches, through "moe_ops" and through eager."""

import collections
import copy

import pytest
import torch

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()

import tiny_transformers as tiny  # noqa: E402

import moe_ops.integrations.transformers as integration  # noqa: E402
from moe_ops.integrations import _forwards  # noqa: E402

CLASSES = tiny.decorated_classes()
NAMES = [name for _, name in CLASSES]

PATHS = {"MuseSparkExperts": "normed_experts"}
"""Classes that another function runs than `fused_experts`."""
FLOAT32 = {"Inkling2TopKRouter", "Inkling2LoopTopKRouter"}
"""Modules that cast what comes in to float32, so that their weights must stay it."""


def test_the_classes_were_found():
    assert len(CLASSES) >= 54
    assert {"Qwen3MoeExperts", "GptOssExperts", "NemotronHExperts"} <= set(NAMES)


@pytest.fixture
def paths(monkeypatch):
    """Counts of the pipeline functions that ran; ``mute`` makes them return zeros."""
    counts = collections.Counter()

    def spy(name):
        original = getattr(_forwards, name)

        def spied(*args, **kwargs):
            counts[name] += 1
            out = original(*args, **kwargs)
            return torch.zeros_like(out) if counts["mute"] else out

        monkeypatch.setattr(_forwards, name, spied)

    spy("fused_experts")
    spy("gated_experts")
    spy("normed_experts")
    return counts


@torch.no_grad()
def output(model, implementation, arguments):
    model.set_experts_implementation(implementation)
    return model(**arguments)[0]


def exact(model, arguments):
    """Eager in float64, as far as the model's own casts let it."""
    arguments = {
        k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v
        for k, v in arguments.items()
    }
    model = copy.deepcopy(model).double()
    for module in model.modules():
        if type(module).__name__ in FLOAT32:
            module.float()
    return output(model, "eager", arguments)


def calls_of_experts(model):
    counts = []
    for experts in tiny.experts_of(model):
        experts.register_forward_hook(lambda *_: counts.append(1))
    return counts


@pytest.mark.parametrize(("module", "name"), CLASSES, ids=NAMES)
def test_logits_equal_eager(module, name, paths, device):
    """Four times eager's own error against float64, once for each experts module called."""
    model, arguments = tiny.build(module, name, device)
    eager = output(model, "eager", arguments)
    oracle = exact(model, arguments)
    budget = 4 * (eager - oracle).abs().max()
    assert 0 < budget < 1e-3 * oracle.abs().max()
    assert not +paths

    calls = calls_of_experts(model)
    error = (output(model, "moe_ops", arguments) - oracle).abs().max()
    assert error <= budget
    assert integration.check(model) == []
    assert paths == {PATHS.get(name, "fused_experts"): len(calls)}
    assert len(calls) >= 1

    paths["mute"] = 1
    assert (output(model, "moe_ops", arguments) - oracle).abs().max() > 100 * budget
