"""Routing replay: experts that are given, their weights and gradients, in layers of every kind."""

from functools import partial

import pytest
import torch
from conftest import INTERPRETED
from small_layers import KINDS, E, H, K, T, arguments, batch, filled, make
from torch._dynamo.testing import CompileCounterWithBackend

from moe_ops.routing import (
    gemma4_routing,
    llama4_routing,
    select_experts,
    simulate,
    sparsemixer,
    topk_softmax,
)
from moe_ops.routing.replay import given_topk

SCORES = {
    "softmax": lambda x: x.softmax(-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda x: torch.nn.functional.softplus(x).sqrt(),
}


def other_experts(device="cpu", experts=E, seed=3):
    """Distinct experts of each token that no router chose; some slots name none."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(experts, generator=g)[:K] for _ in range(T)])
    ids[1, 0], ids[4, K - 1], ids[7] = -1, experts + 3, -1
    return ids.to(device, torch.int32)


@pytest.mark.kernel
@pytest.mark.parametrize("kind", KINDS)
def test_a_recorded_routing_can_be_given_back(kind, device):
    """The result has the bits of the call that was recorded; words are not needed."""
    layer = filled(device, **KINDS[kind])
    (x, logits), words = arguments(layer, device)
    seen = []
    layer.set_capture_fn(seen.append)
    expected = layer(x, logits, **words)
    ids = seen[0].clone()
    if layer.eplb_state is not None:  # replicas depend on the number of calls
        layer.eplb_step.zero_()
    out = layer(x, logits, topk_ids=ids)
    assert torch.equal(out, expected) and torch.equal(seen[1], ids)
    few = INTERPRETED and [*KINDS].index(kind) % 4  # there kinds share the kernels of these
    if layer.eplb_state is None and not few:
        assert torch.equal(layer(x, logits, topk_ids=ids.long()), expected)
        folded = layer(x.view(3, 3, H), logits.view(3, 3, -1), topk_ids=ids.view(3, 3, K))
        assert torch.equal(folded.view_as(out), expected)


@pytest.mark.kernel
@pytest.mark.parametrize("scoring_func", SCORES)
@pytest.mark.parametrize("renormalize", [True, False])
def test_weights_of_other_experts(scoring_func, renormalize, device):
    """They are the scores of the experts that exist, and the gradient is that of these scores."""
    (x, logits), ids = (t.to(device) for t in batch()), other_experts(device)
    logits = logits.float().requires_grad_()
    how = dict(renormalize=renormalize, scoring_func=scoring_func, routed_scaling_factor=2.5)
    # A bias and groups only choose.
    bias = torch.linspace(-1, 1, E, device=device)
    weights, found, _ = select_experts(
        x, logits, K, use_grouped_topk=True, num_expert_group=2, topk_group=1,
        e_score_correction_bias=bias, topk_ids=ids, **how,
    )  # fmt: skip
    known = (ids >= 0) & (ids < E)
    assert torch.equal(found, torch.where(known, ids, -1)) and found.dtype == torch.int32
    exact = logits.detach().double().requires_grad_()
    chosen = SCORES[scoring_func](exact).gather(1, ids.long().clamp(0, E - 1)) * known
    if renormalize:
        chosen = chosen / chosen.sum(1, keepdim=True).clamp(min=1e-30)
    torch.testing.assert_close(weights.double(), chosen * 2.5, rtol=1e-6, atol=0)
    grad = torch.randn(T, K, generator=torch.Generator().manual_seed(1)).to(device)
    (of_logits,) = torch.autograd.grad(weights, logits, grad)
    (expected,) = torch.autograd.grad(chosen * 2.5, exact, grad.double())
    torch.testing.assert_close(of_logits.double(), expected, rtol=1e-5, atol=1e-7)


def test_padding_comes_after_given_experts():
    layer, (x, logits), ids = filled(), batch(), other_experts()
    padded = torch.arange(T) % 4 == 2
    out = layer(x, logits, topk_ids=ids, is_padding=padded)
    expected = layer(x, logits, topk_ids=ids.masked_fill(padded[:, None], -1))
    assert torch.equal(out, expected) and not out[padded].any() and out[~padded].any()
    assert not out[7].any(), "a token without experts"


def test_chunks_and_no_tokens():
    layer, (x, logits), ids = filled(), batch(), other_experts()
    chunked = filled(chunk_size=4)
    chunked.load_state_dict(layer.state_dict())
    expected = layer(x, logits, topk_ids=ids)
    torch.testing.assert_close(chunked(x, logits, topk_ids=ids), expected)
    assert layer(x[:0], logits[:0], topk_ids=ids[:0]).shape == (0, H)


def test_one_compilation_reads_the_ids():
    torch._dynamo.reset()
    layer, (x, logits) = filled(), batch()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    for seed in range(3):
        ids = other_experts(seed=seed)
        assert torch.equal(compiled(x, logits, topk_ids=ids), layer(x, logits, topk_ids=ids))
    assert counter.frame_count == 1


@pytest.mark.parametrize("unbacked", [False, True])
def test_one_compilation_for_any_number_of_tokens(unbacked):
    torch._dynamo.reset()
    layer = filled().requires_grad_(False)
    oblivious = torch.fx.experimental._config.patch(backed_size_oblivious=not unbacked)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    for number, tokens in enumerate((7, 64, 1, 0)):
        x, logits = batch(tokens)
        ids = batch(tokens)[1].topk(K).indices.roll(1, 0)
        if unbacked and not number:
            for given in (x, logits, ids):
                torch._dynamo.decorators.mark_unbacked(given, 0)
        stance = torch.compiler.set_stance("fail_on_recompile" if number else "default")
        with torch.no_grad(), oblivious, stance:
            out = compiled(x, logits, topk_ids=ids)
        assert torch.equal(out, layer(x, logits, topk_ids=ids))


def test_no_tokens_are_checked_as_others():
    x, logits = batch(0)
    ids = torch.zeros(0, K, dtype=torch.int64)
    weights, found = given_topk(x, logits, ids, renormalize=True)
    assert weights.shape == found.shape == (0, K) and weights.dtype == torch.float32
    weighing = (True, "softmax", 1.0)
    _, found = torch.ops.moe_ops.hash_topk(batch(2)[1], ids.new_zeros(2), ids, *weighing)
    assert found.shape == (2, K) and (found == -1).all(), "a table without rows"
    with pytest.raises(ValueError, match="scoring_func"):
        given_topk(x, logits, ids, renormalize=True, scoring_func="nope")


@pytest.mark.parametrize(
    ("function", "renormalize"),
    [(topk_softmax, True), (llama4_routing, False), (llama4_routing, True),
     (partial(gemma4_routing, per_expert_scale=torch.linspace(0.5, 2, E)), True)],
)  # fmt: skip
def test_routers_of_models_take_given_experts(function, renormalize):
    x, logits = batch()
    chosen = function(x, logits, K, renormalize)
    given = select_experts(
        x, logits, K, False, renormalize, custom_routing_function=function, topk_ids=chosen[1]
    )
    assert torch.equal(given.topk_weights, chosen[0])
    assert torch.equal(given.topk_ids, chosen[1].int())


def test_routers_that_cannot_weight_given_experts():
    (x, logits), ids = batch(), other_experts()
    for function in (sparsemixer, simulate.uniform_random):
        with pytest.raises(NotImplementedError, match="must have a parameter topk_ids"):
            select_experts(x, logits, K, False, True, custom_routing_function=function,
                           topk_ids=ids)  # fmt: skip


def test_wrong_ids():
    layer, (x, logits), ids = make(), batch(), other_experts()
    rows = [
        (ids.float(), TypeError, "topk_ids must have a dtype of"),
        ([[0]], TypeError, "topk_ids must be a Tensor"),
        (ids[:, 1:], ValueError, r"topk_ids.shape\[1\] must be top_k"),
        (ids[1:], ValueError, "topk_ids"),
        (ids.view(3, 3, K).transpose(0, 1)[:2], ValueError, "topk_ids must be"),
        (ids.to("meta"), ValueError, "topk_ids"),
    ]
    wrong = []
    for value, kind, text in rows:
        try:
            layer(x, logits, topk_ids=value)
            wrong.append((text, "no error"))
        except kind as error:
            if not pytest.raises(kind, match=text).matches(error):
                wrong.append((text, str(error)))
    assert not wrong
    with pytest.raises(ValueError, match="topk_ids"):
        given_topk(x, logits, ids[:1], renormalize=True)
