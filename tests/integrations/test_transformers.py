"""Transformers models through "moe_ops": equal to eager, compiled whole, clear about the rest."""

import pytest
import torch
from compilations import Compilations

transformers = pytest.importorskip("transformers")

from tiny_transformers import QWEN3, tiny_qwen3  # noqa: E402

import moe_ops.integrations.transformers as integration  # noqa: E402
from moe_ops.integrations import _forwards  # noqa: E402


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


def tokens(device, length=13, batch=2):
    g = torch.Generator().manual_seed(length)
    return torch.randint(0, 64, (batch, length), generator=g).to(device)


@torch.no_grad()
def logits(model, implementation, ids):
    model.set_experts_implementation(implementation)
    return model(ids).logits


@pytest.mark.parametrize("hidden_act", ["silu", "gelu", "gelu_pytorch_tanh", "relu2"])
def test_logits_equal_eager(hidden_act, device):
    model = tiny_qwen3(device, hidden_act=hidden_act)
    ids = tokens(device)
    difference = logits(model, "moe_ops", ids) - logits(model, "eager", ids)
    assert difference.abs().max() <= 1e-5


def test_our_function_really_ran(device, monkeypatch):
    model, calls = tiny_qwen3(device), []
    original = _forwards.fused_experts

    def counted(*args, **kwargs):
        calls.append(1)
        return original(*args, **kwargs)

    monkeypatch.setattr(_forwards, "fused_experts", counted)
    logits(model, "eager", tokens(device))
    assert not calls
    logits(model, "moe_ops", tokens(device))
    assert len(calls) == QWEN3["num_hidden_layers"]


def test_generate_writes_what_eager_writes(device):
    model, ids = tiny_qwen3(device), tokens(device, 6)
    texts = []
    for implementation in ("eager", "moe_ops"):
        model.set_experts_implementation(implementation)
        texts.append(model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0))
    assert torch.equal(*texts)


@torch.no_grad()
def compilations(model, implementation, lengths, device, backend):
    """Frames compiled after each length, and the logits."""
    torch._dynamo.reset()
    model.set_experts_implementation(implementation)
    backend = Compilations(backend)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=backend)
    frames, results = [], []
    for length in lengths:
        ids = tokens(device, length)
        torch._dynamo.mark_dynamic(ids, 1)
        results.append(compiled(input_ids=ids, use_cache=False).logits)
        frames.append(backend.count)
    return frames, results


def tiny_gpt_oss(device):
    """One layer: interleaved, transposed, with biases and a gate of its own."""
    torch.manual_seed(0)
    sizes = {**QWEN3, "num_local_experts": QWEN3["num_experts"], "num_hidden_layers": 1}
    return transformers.GptOssForCausalLM(transformers.GptOssConfig(**sizes)).to(device).eval()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "backend"),
    [(tiny_qwen3, "eager"), (tiny_gpt_oss, "aot_eager")],
    ids=["qwen3_moe", "gpt_oss"],
)
def test_model_compiles_whole_for_every_length(make, backend, device):
    """fullgraph and dynamic: no compilation beyond transformers' own, equal to eager to 1e-5.

    Frames of transformers' own are only counted: behind them nothing is compiled. A layer of Qwen3
    is compiled by Inductor below.
    """
    model, lengths = make(device), (7, 5, 64, 2, 33)
    theirs, _ = compilations(model, "grouped_mm", lengths, device, "eager")
    ours, results = compilations(model, "moe_ops", lengths, device, backend)
    assert ours == theirs
    assert ours == ours[:1] * len(lengths)
    for length, actual in zip(lengths, results, strict=True):
        expected = logits(model, "eager", tokens(device, length))
        assert (actual - expected).abs().max() <= 1e-5


@pytest.mark.slow
@pytest.mark.exhaustive  # `make demo` compiles a whole model with Inductor
@torch.no_grad()
def test_decoder_layer_compiles_with_inductor(device):
    model = tiny_qwen3(device)
    model.set_experts_implementation("moe_ops")
    layer = model.model.layers[0]
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for length in (7, 5, 20):
        x = torch.randn(1, length, 32, device=device)
        torch._dynamo.mark_dynamic(x, 1)
        position = model.model.rotary_emb(x, torch.arange(length, device=device)[None])
        for part in position:
            torch._dynamo.mark_dynamic(part, 1)
        actual = compiled(x, position_embeddings=position)
        expected = layer(x, position_embeddings=position)
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


def test_sentinel_ids_of_expert_parallelism_are_skipped(device):
    experts = tiny_qwen3(device).model.layers[0].mlp.experts
    x = torch.randn(3, 32, device=device)
    ids = torch.tensor([[0, 8], [8, 8], [1, 2]], device=device)
    weights = torch.tensor([[0.5, torch.nan], [0.0, 0.0], [0.1, 0.9]], device=device)
    with torch.no_grad():
        out = integration.moe_ops_experts(experts, x, ids, weights)
    assert out.isfinite().all()
    assert (out[1] == 0).all()


@pytest.mark.parametrize("act_fn", [torch.nn.SiLU(), torch.nn.Mish()], ids=["fused", "unfused"])
@torch.no_grad()
def test_a_rank_with_fewer_experts_than_slots(act_fn, device):
    """What expert parallelism leaves of a layer: one expert here, and sentinels for the rest."""
    experts = tiny_qwen3(device, num_experts=1, num_experts_per_tok=1).model.layers[0].mlp.experts
    experts.act_fn = act_fn
    x = torch.randn(4, 32, device=device)
    ids = torch.tensor([[1, 0], [0, 1], [1, 1], [2, 7]], device=device)
    weights = torch.rand(4, 2, device=device)
    out = integration.moe_ops_experts(experts, x, ids, weights)
    alone = integration.moe_ops_experts(
        experts, x[:2], ids.new_zeros(2, 1), weights[[0, 1], [1, 0]][:, None]
    )
    torch.testing.assert_close(out[:2], alone, rtol=0, atol=0)
    assert (out[2:] == 0).all()


class Scaled(torch.nn.Module):
    """An activation with a parameter."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, x):
        return torch.nn.functional.silu(x) * self.scale


def test_whatever_requires_grad(device):
    """Also where the experts' weights do not."""
    experts = tiny_qwen3(device).requires_grad_(False).model.layers[0].mlp.experts
    experts.act_fn = Scaled().to(device)
    x, ids = torch.randn(4, 32, device=device), torch.zeros(4, 1, dtype=torch.long, device=device)
    weights = torch.ones(4, 1, device=device)
    scale = experts.act_fn.scale.requires_grad_(False)
    for asked in (x, weights, scale):
        out = integration.moe_ops_experts(experts, x, ids, weights)
        assert not out.requires_grad
        asked.requires_grad_()
        out = integration.moe_ops_experts(experts, x, ids, weights)
        with pytest.raises(NotImplementedError, match="gradients of unfused_experts are not"):
            out.sum().backward()
        asked.requires_grad_(False)
