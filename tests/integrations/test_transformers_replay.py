"""Routing of transformers' models, recorded and replayed."""

import pytest
import torch

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()

import tiny_transformers as tiny  # noqa: E402
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402

from moe_ops.integrations.transformers import record_routing, replay_routing  # noqa: E402

E = tiny.EXPERTS
ROUTERS = {
    "Qwen3MoeExperts": "values of a softmax",
    "GptOssExperts": "a softmax of the values",
    "GraniteMoeExperts": "a method of logits",
    "Cohere2MoeExperts": "logits",
    "DeepseekV3Experts": "groups and a bias, gathered",
    "DeepseekV4Experts": "a table in the first layers",
    "Gemma4TextExperts": "beside the experts, with a scale per expert",
    "Lfm2MoeExperts": "scores with a bias",
    "NemotronHExperts": "without a gate",
}
"""Experts of transformers -> how their router chooses and weights."""


def built(name, device="cpu"):
    (module,) = [module for module, known in tiny.decorated_classes() if known == name]
    model, arguments = tiny.build(module, name, device)
    model.set_experts_implementation("moe_ops")
    return model, arguments


def others(routing):
    """Other experts, one tensor a module, in other places."""
    return {name: (ids[0].flip(-1) + 1) % E for name, ids in routing.items() if ids}


def called_with(model, routing, arguments):
    """Ids and weights that the first module of a routing is called with in a replay."""
    calls = []
    with replay_routing(model, routing):  # whose own hook runs first
        hook = model.get_submodule(next(iter(routing))).register_forward_pre_hook(
            lambda _, args, kwargs: calls.append(kwargs), with_kwargs=True
        )
        model(**arguments)
    hook.remove()
    return calls[0]["top_k_index"], calls[0]["top_k_weights"]


@torch.no_grad()
def test_every_kind_of_router(device):
    """A recorded routing gives the same bits; other experts are those that run."""
    wrong = []
    for name, kind in ROUTERS.items():
        model, arguments = built(name, device)
        with record_routing(model) as routing:
            expected = model(**arguments)[0]
        with replay_routing(model, routing):
            if not torch.equal(model(**arguments)[0], expected):
                wrong.append((name, kind, "the recorded routing"))
        given = others(routing)
        with replay_routing(model, given), record_routing(model) as seen:
            out = model(**arguments)[0]
        ran = all(torch.equal(ids, seen[module][0]) for module, ids in given.items())
        if not ran or torch.equal(out, expected) or not out.isfinite().all():
            wrong.append((name, kind, "other experts"))
        if not torch.equal(model(**arguments)[0], expected):
            wrong.append((name, kind, "afterwards"))
    assert not wrong


@torch.no_grad()
@pytest.mark.parametrize("name", ["MixtralExperts", "GptOssExperts", "DeepseekV3Experts"])
def test_slots_without_an_expert(name):
    """They are skipped, and the weights of a token's other slots are as if it had only these."""
    model, arguments = built(name)
    with record_routing(model) as routing:
        model(**arguments)
    whole, part = others(routing), others(routing)
    first = next(iter(part))
    part[first][2, 0], part[first][3, 1], part[first][5] = -1, E + 2, -1
    full = called_with(model, whole, arguments)[1]
    ids, weights = called_with(model, part, arguments)
    skipped = (part[first] < 0) | (part[first] >= E)
    assert (ids[skipped] == E).all() and not weights[skipped].any()
    assert torch.equal(ids[~skipped], part[first][~skipped].long())
    kept = ~skipped.any(1)
    assert torch.equal(weights[kept], full[kept])
    # Each of these routers renormalizes: one expert that is left has all of the weight.
    torch.testing.assert_close(weights[2, 1], full[2].sum())
    torch.testing.assert_close(weights[3, 0], full[3].sum())


def test_one_compilation():
    """Its graph reads the tensors in each call."""
    torch._dynamo.reset()
    model, arguments = built("Qwen3MoeExperts")
    with record_routing(model) as routing:
        model(**arguments)
    given, counter = others(routing), CompileCounterWithBackend("eager")
    with replay_routing(model, given), torch.no_grad():
        compiled = torch.compile(model, backend=counter, fullgraph=True)
        for _ in range(2):
            assert torch.equal(compiled(**arguments)[0], model(**arguments)[0])
            for ids in given.values():
                ids.copy_((ids + 2) % E)
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", ["Qwen3MoeExperts", "GptOssExperts", "DeepseekV3Experts"])
def test_routers_get_gradients(name):
    """The weights of given experts have gradients, also where a checkpoint runs again."""
    model, arguments = built(name)
    with record_routing(model) as routing:
        model(**arguments)
    given = others(routing)
    given[next(iter(given))][3, 0], given[next(iter(given))][5] = -1, -1
    ends = ("gate.weight", "router.weight")
    gates = [p for n, p in model.named_parameters() if n.endswith(ends)]
    with replay_routing(model, given):
        expected = torch.autograd.grad(model(**arguments)[0].square().sum(), gates)
        model.gradient_checkpointing_enable()
        model.train()
        found = torch.autograd.grad(model(**arguments)[0].square().sum(), gates)
    for grad in expected:
        assert grad.isfinite().all() and grad.any()
    torch.testing.assert_close(found, expected)


@torch.no_grad()
def test_a_tensor_for_each_forward():
    model, arguments = built("Qwen3MoeExperts")
    backward = {**arguments, "input_ids": arguments["input_ids"].flip(-1)}
    with record_routing(model) as routing:
        expected = [model(**given)[0] for given in (arguments, backward)]
    with replay_routing(model, routing):
        for given, out in zip((arguments, backward), expected, strict=True):
            assert torch.equal(model(**given)[0], out)
    with replay_routing(model, {name: ids[::-1] for name, ids in routing.items()}):
        assert not torch.equal(model(**arguments)[0], expected[0])


def test_what_is_refused():
    model, arguments = built("Qwen3MoeExperts")
    with record_routing(model) as routing:
        model(**arguments)
    name = next(iter(routing))
    block = model.get_submodule(name.rpartition(".")[0])
    ids = routing[name][0]
    rows = [
        ({"mlp": ids}, ValueError, "a name of routing"),
        ({name: ids.float()}, TypeError, "routing"),
        ({name: ids[1:]}, ValueError, "must be the number of tokens"),
        ({name: ids[:, :1]}, NotImplementedError, "leave it out"),
        ({name: []}, ValueError, "must have a tensor for each forward"),
    ]
    for given, kind, text in rows:
        with pytest.raises(kind, match=text), replay_routing(model, given):
            model(**arguments)
        assert "forward" not in vars(block)
    none = record_routing(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="experts that transformers dispatches"), none:
        pass
