"""Gradients of routers that look experts up or compare them, and of adjustments to a routing."""

from functools import partial
from itertools import product

import pytest
import torch
from conftest import INTERPRETED
from hypothesis import given
from hypothesis import strategies as st
from strategies import DTYPES

import moe_ops
from moe_ops.reference.routing import topk_backward
from moe_ops.routing import (
    SCORING_FUNCS,
    adjust_routing,
    gemma4_routing,
    hash_topk,
    select_experts,
    sparsemixer,
    zero_experts,
)
from moe_ops.testing import assert_matches_reference

T, E, K, H = 9, 6, 3, 8
pytestmark = pytest.mark.kernel


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def slots(seed=1):
    """Experts of tokens: also none, and numbers that are no experts."""
    g = torch.Generator().manual_seed(seed)
    return torch.randint(-1, E + 2, (T, K), generator=g, dtype=torch.int32)


def compare(run, inputs, exact, device, dtype=torch.float32):
    """The values in grad mode, and gradients against autograd of ``exact`` in float64."""
    given = [x.to(device).requires_grad_() for x in inputs]
    wide, near = (
        [x.detach().to(d).requires_grad_() for x in inputs] for d in (torch.float64, dtype)
    )
    out = run(*given)
    with torch.no_grad():
        assert torch.equal(out, run(*given))
    grad = random(*out.shape, seed=9).bfloat16().float()  # a number of every dtype
    found = torch.autograd.grad(out, given, grad.to(out))
    expected = torch.autograd.grad(exact(*wide), wide, grad.double())
    rounded = torch.autograd.grad(exact(*(x.float() for x in near)), near, grad)
    for actual, a, b in zip(found, expected, rounded, strict=True):
        rows = (1, -1) if actual.dim() == 1 else actual.shape
        assert_matches_reference(
            actual.cpu().reshape(rows), a.reshape(rows), b.to(actual.dtype).reshape(rows)
        )


@given(
    how=st.tuples(st.booleans(), st.sampled_from(SCORING_FUNCS), st.sampled_from((1.0, 2.5))),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 20),
)
def test_hash_topk(how, dtype, seed, device):
    """Words outside of the table and entries that are no experts have no gradient."""
    table = torch.stack([torch.randperm(E + 2)[:K] - 1 for _ in range(5)])
    words = torch.randint(-1, 6, (T,), generator=torch.Generator().manual_seed(seed))
    logits, grad = random(T, E, seed=seed, dtype=dtype), random(T, K, seed=2)
    given = logits.to(device).requires_grad_()
    x = torch.zeros(T, H, device=device)
    weights, ids = hash_topk(x, given, words.to(device), table.to(device), *how)
    assert weights.requires_grad and not ids.requires_grad
    weights.backward(grad.to(device))
    wide = topk_backward(grad, logits.double(), ids.cpu(), *how)
    near = topk_backward(grad, logits, ids.cpu(), *how)
    assert_matches_reference(given.grad.cpu(), wide, near)


@given(dtype=st.sampled_from(DTYPES), jitter=st.sampled_from((0.01, 0.3)), seed=st.integers(0, 20))
def test_sparsemixer(dtype, jitter, seed, device):
    """Each weight is a softmax; logits that are not finite have no gradient."""
    logits = random(T, E, seed=seed, dtype=dtype)
    logits[0, 0], logits[1], logits[2, 1:] = torch.nan, torch.nan, -torch.inf
    x = torch.zeros(T, H, device=device)
    given = logits.to(device).requires_grad_()
    weights, ids = sparsemixer(x, given, jitter_eps=jitter)
    grad = random(T, 2, seed=3)
    weights.backward(grad.to(device))
    found, ids, near = given.grad.cpu(), ids.cpu().long(), logits.float()
    for t in range(T):
        x = logits[t].double().requires_grad_()
        left, total = logits[t].isfinite(), x.new_zeros(())
        for j in range(2):
            e = ids[t, j]
            peak = near[t, e]
            far = (peak - near[t]) / near[t].abs().clamp(min=peak) > 2 * jitter
            kept = left & ~far
            if kept[e]:
                total = total + grad[t, j] * x[kept].softmax(0)[kept[:e].sum()]
            left = left.index_fill(0, e, False)
        expected = torch.zeros(E).double()
        if total.requires_grad:
            expected = torch.autograd.grad(total, x)[0]
        torch.testing.assert_close(found[t], expected.to(dtype))
    assert not found[~logits.isfinite()].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("shared", [0, 2])
@pytest.mark.parametrize("padded", [False, True])
def test_adjust_routing(dtype, scaled, shared, padded, device):
    ids = slots()
    padding = torch.arange(T) % 4 == 1 if padded else None
    known = (ids >= 0) & (ids < E)

    def run(weights, scale=None):
        more = {"num_shared_experts": shared, "per_expert_scale": scale}
        mask = None if padding is None else padding.to(device)
        out, left = adjust_routing(weights, ids.to(device), E, is_padding=mask, **more)
        assert not left.requires_grad
        return out

    def exact(weights, scale=None):
        if scale is not None:
            each = scale[torch.where(known, ids, 0).long()]
            weights = weights * torch.where(known, each, 1)
        out = torch.cat([weights, weights.new_ones(T, shared)], 1)
        return out if padding is None else torch.where(padding[:, None], 0, out)

    inputs = [random(T, K, dtype=dtype)] + ([random(E, seed=4, dtype=dtype)] if scaled else [])
    compare(run, inputs, exact, device)


@pytest.mark.parametrize("count", [0, 1, 300])
def test_scales_of_many_experts(count, device):
    ids = torch.arange(count * 2, dtype=torch.int32).view(count, 2) % 257
    weights, scale = random(count, 2), random(257, seed=4).to(device).requires_grad_()
    out, _ = adjust_routing(weights.to(device), ids.to(device), 257, per_expert_scale=scale)
    (found,) = torch.autograd.grad(out.sum(), scale)
    expected = torch.zeros(257).index_add(0, ids.flatten().long(), weights.flatten())
    torch.testing.assert_close(found.cpu(), expected)


def test_padding_that_is_not_a_number(device):
    """Neither padded weights nor their gradients are read."""
    weights, ids = random(T, K), slots().clamp(0, E - 1)
    padding = torch.arange(T) == 2
    weights[2] = torch.nan
    given = weights.to(device).requires_grad_()
    scale = torch.ones(E, device=device, requires_grad=True)
    more = {"per_expert_scale": scale, "is_padding": padding.to(device)}
    out, _ = adjust_routing(given, ids.to(device), E, **more)
    grad = random(T, K, seed=5)
    grad[2] = torch.nan
    out.backward(grad.to(device))
    assert given.grad.isfinite().all() and not given.grad[2].any() and scale.grad.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_experts(dtype, device):
    ids = slots()
    identity = ids >= E

    def run(x, weights):
        given, left, result = zero_experts(x, weights, ids.to(device), E)
        assert not left.requires_grad
        return torch.cat([given, result.float()], 1)

    def exact(x, weights):
        result = torch.where(identity, weights, 0).sum(1, keepdim=True) * x
        return torch.cat([torch.where(identity, 0, weights), result], 1)

    compare(run, [random(T, H, dtype=dtype), random(T, K, seed=3)], exact, device)


WIDE = partial(sparsemixer, jitter_eps=0.5)
"""More than one expert takes part in a softmax."""


def routers(layer):
    table = torch.stack([torch.arange(2), torch.tensor([3, 1]), torch.tensor([2, 5])])
    words = torch.tensor([0, 1, 2, 2, 1, 0, 7, 1, 0])
    return {
        "hash": ({"hash_indices_table": table}, {"input_ids": words}),
        "sparsemixer": ({"custom_routing_function": WIDE, "renormalize": False}, {}),
        "padding": ({}, {"is_padding": torch.arange(T) % 3 == 0}),
        "identity": ({"zero_expert_num": 2, "zero_expert_type": "identity"}, {}),
        "fused shared": ({"n_shared_experts": 1}, {}),
    }[layer]


@pytest.mark.parametrize("name", ["hash", "sparsemixer", "padding", "identity", "fused shared"])
def test_a_layer(name, device):
    """Gradients of tokens and logits, the same bits compiled full-graph."""
    torch._dynamo.reset()
    options, call = routers(name)
    layer = moe_ops.FusedMoE(E, 2, H, 16, params_dtype=torch.float32, **options).to(device)
    for i, p in enumerate(layer.parameters()):
        p.data.copy_(random(*p.shape, seed=i))
    call = {n: x.to(device) for n, x in call.items()}
    given = [random(T, n, seed=n).to(device).requires_grad_() for n in (H, layer.num_logits)]
    again = layer
    if not INTERPRETED:
        again = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    both = []
    for run in (layer, again):
        out = run(*given, **call)
        both.append([out, *torch.autograd.grad(out.square().sum(), given)])
    for a, b in zip(*both, strict=True):
        assert torch.equal(a, b) and a.any()


def test_identity_experts_of_a_sum_over_ranks():
    """One rank adds their output to its part, so the gradients of ranks would differ."""
    options = {"zero_expert_num": 2, "zero_expert_type": "identity", "reduce_results": True}
    layer = moe_ops.FusedMoE(E, 2, H, 16, ep_size=2, ep_rank=0, **options)
    layer.maybe_all_reduce_tensor_model_parallel = lambda out: out
    x = random(T, H).requires_grad_()
    out = layer(x, random(T, E + 2, seed=1))
    with pytest.raises(NotImplementedError, match="zero_expert_num must be 0"):
        out.sum().backward()


def weighed_by_states(x, logits, k, renormalize):
    weights, ids = (logits * x[:, :E]).float().softmax(-1).topk(k)
    return weights / weights.sum(-1, keepdim=True), ids.to(torch.int32)


ROUTERS = {
    "fused_topk": {},
    "sigmoid": {"scoring_func": "sigmoid"},
    "grouped_topk": {"use_grouped_topk": True, "num_expert_group": 2, "topk_group": 1},
    "hash_topk": {"hash_indices_table": torch.arange(2 * T).view(T, 2) % E,
                  "input_ids": torch.arange(T)},
    "shared experts": {"num_fused_shared_experts": 1},
    "a function in PyTorch": {"custom_routing_function": weighed_by_states},
    "sparsemixer": {"custom_routing_function": sparsemixer, "renormalize": False},
}  # fmt: skip


def test_padding_has_no_gradient_whatever_it_holds(device):
    """Gradients of every router, and of tokens that a function reads, are zeros in padding rows."""
    padding = torch.arange(T, device=device) % 3 == 0
    scale = torch.ones(E, device=device)
    routers = {**ROUTERS, "gemma4": {
        "custom_routing_function": partial(gemma4_routing, per_expert_scale=scale)
    }}  # fmt: skip
    for (name, options), bad in product(routers.items(), (torch.nan, torch.inf, -torch.inf)):
        options = {k: v.to(device) if torch.is_tensor(v) else v for k, v in options.items()}
        results = []
        for value in (0.0, bad):
            x, logits = random(T, H).to(device), random(T, E, seed=1).to(device)
            x[padding], logits[padding, :4] = value, value
            given = [x.requires_grad_(), logits.requires_grad_()]
            how = {"use_grouped_topk": False, "renormalize": True, **options}
            weights = select_experts(*given, 2, is_padding=padding, **how).topk_weights
            grads = torch.autograd.grad(weights.square().sum(), given, allow_unused=True)
            results.append([weights, *(g for g in grads if g is not None)])
            assert not any(r[padding].any() for r in results[-1]), name
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), (name, bad)
