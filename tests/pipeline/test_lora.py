"""Grouped LoRA beside both products, against plain PyTorch in float64."""

from itertools import product

import pytest
import torch
from conftest import INTERPRETED
from differentiable_layers import in_dtype, layer
from hypothesis import given
from hypothesis import strategies as st
from strategies import DTYPES

import moe_ops
from moe_ops.pipeline.lora import ExpertLora, expert_lora, pairs_of
from moe_ops.scheme import SCHEMES
from moe_ops.tensors import Routing
from moe_ops.testing import Problem, call, make_inputs, quantize_inputs

T, E, K, H, I, R, L = 9, 4, 2, 32, 48, 4, 3  # noqa: E741
NAMES = ("lora1_a", "lora1_b", "lora2_a", "lora2_b")
SCALING = (0.5, 2.0, 1.0)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / shape[-1] ** 0.5


def adapters(problem, inputs, dtype=torch.float32):
    """Factors of L adapters, and each token's adapter; some tokens have none."""
    local, n, hidden = inputs.w1.shape
    width = problem.intermediate_size
    shapes = ((local, R, hidden), (local, n, R), (local, R, width), (local, hidden, R))
    factors = {m: random(L, *s, seed=i).to(dtype) for i, (m, s) in enumerate(zip(NAMES, shapes))}  # noqa: B905
    g = torch.Generator().manual_seed(7)
    lora_ids = torch.randint(-1, L + 1, (problem.num_tokens,), generator=g)
    return factors, lora_ids


def exact_layer(problem, exact, factors, lora_ids, dtype):
    """The layer in plain PyTorch; in float32 weights are rounded, as ours are dequantized."""
    scaling = torch.tensor(SCALING, dtype=exact.w1.dtype).view(-1, 1, 1, 1)
    pairs = [f * (scaling if n[-1] == "b" else 1) for n, f in factors.items()]
    w1, w2 = (w.to(dtype).to(w.dtype) for w in (exact.w1, exact.w2))
    return layer(problem, exact._replace(w1=w1, w2=w2), dtype, None, (pairs, lora_ids))


def lora_of(factors, lora_ids, only=None):
    """The adapters beside both products, or beside ``only`` one of the weights."""
    first, second = tuple(factors.values())[:2], tuple(factors.values())[2:]
    scaling = torch.tensor(SCALING, device=lora_ids.device)
    both = (first if only != "w2" else None, second if only != "w1" else None)
    return ExpertLora(*both, lora_ids, scaling)


def check(problem, device, only=None, **more):
    """The output, and gradients of tokens, router weights and all factors.

    With ``only`` one adapter not of the router weights, which are small differences at k = 1.
    """
    inputs, config, exact = quantize_inputs(problem, make_inputs(problem, device))
    factors, lora_ids = adapters(problem, exact)
    if only is not None:
        factors = {n: f if n[4] == only[1] else f * 0 for n, f in factors.items()}
    g = torch.Generator().manual_seed(5)
    grad = torch.randn(problem.num_tokens, problem.hidden_size, generator=g).to(problem.dtype)
    mine = {n: f.to(device).requires_grad_() for n, f in factors.items()}
    x, weights = (t.clone().requires_grad_() for t in (inputs.hidden_states, inputs.topk_weights))
    lora = lora_of(mine, lora_ids.to(device), only)
    given = inputs._replace(hidden_states=x, topk_weights=weights)
    out = call(moe_ops.fused_experts, problem, given, quant_config=config, lora=lora, **more)
    trained = {"hidden_states": x, "topk_weights": weights, **mine}
    names = [n for n in trained if only is None or n == "hidden_states" or n[4:5] == only[1]]
    found = torch.autograd.grad(out, [trained[n] for n in names], grad.to(device))
    found = {"out": out.detach(), **dict(zip(names, found, strict=True))}
    both = []
    for dtype in (torch.float64, torch.float32):
        its = in_dtype(exact, dtype)
        own = {n: f.to(dtype).requires_grad_() for n, f in factors.items()}
        tokens = [t.requires_grad_() for t in (its.hidden_states, its.topk_weights)]
        its = its._replace(hidden_states=tokens[0], topk_weights=tokens[1])
        rounded = dtype if dtype == torch.float64 else problem.dtype
        result = exact_layer(problem, its, own, lora_ids, rounded)
        own |= {"hidden_states": tokens[0], "topk_weights": tokens[1]}
        its = torch.autograd.grad(result, [own[n] for n in names], grad.to(dtype))
        both.append([result.detach(), *its])
    for (name, actual), b, c in zip(found.items(), *both, strict=True):
        assert_near_as_a_whole(name, actual.cpu(), b, c, problem.dtype)


def assert_near_as_a_whole(name, actual, exact, reference, dtype):
    """The budget of `assert_matches_reference`, for norms: few numbers have few large errors."""
    error, allowed = ((x.double() - exact).norm() for x in (actual, reference))
    eps = torch.finfo(dtype).eps
    assert actual.shape == exact.shape, name
    assert error <= 2 * (allowed + eps * exact.norm()), (name, error, allowed, exact.norm())


@pytest.mark.kernel
@given(
    dtype=st.sampled_from(DTYPES),
    activation=st.sampled_from(("silu", "swigluoai", "gelu_no_mul")),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    tokens=st.sampled_from((1, 3, T) if INTERPRETED else (1, 3, T, 40)),
    top_k=st.sampled_from((2, 3)),
)
def test_unquantized(dtype, activation, flags, tokens, top_k, device):
    has_bias, on_input, mapped = flags
    check(
        Problem(
            tokens, E, top_k, H, I, dtype, activation=activation, has_bias=has_bias,
            on_input=on_input, num_local_experts=3 if mapped else None, routing="holes",
        ),
        device,
    )  # fmt: skip


def test_pairs_of_adapter_and_expert():
    """Local expert e of adapter l is pair ``l * E + e``; all else has none."""
    every = range(-2, 8)
    for local in (None, [0, -1, 2, -1, 1, 3, 4]):  # 4: an expert that the weights do not have
        ids = torch.tensor(every).repeat(L + 3, 1)
        chosen = torch.tensor([-1, *range(L + 1), 2**40])
        expert_map = None if local is None else torch.tensor(local, dtype=torch.int32)
        for lora_ids in (None, chosen):
            known = [0] * len(chosen) if lora_ids is None else chosen.tolist()
            held = dict(enumerate(local if local is not None else range(E)))
            held = {i: e for i, e in held.items() if 0 <= e < E}
            expected = [
                [a * E + held[i] if 0 <= a < L and i in held else -1 for i in every] for a in known
            ]
            found = pairs_of(Routing(ids, ids, expert_map), E, lora_ids, L)
            assert found.dtype == torch.int32 and found.tolist() == expected


def test_adapters_of_one_product(device):
    """At even and odd k, for weights on the input and on the output."""
    for only, top_k, on_input in product(("w1", "w2"), (1, 2, 3), (False, True)):
        has_bias = top_k == 2
        sizes = (T, E, top_k, H, I, torch.bfloat16)
        check(Problem(*sizes, on_input=on_input, has_bias=has_bias, routing="holes"), device, only)


@pytest.mark.parametrize("only", [None, "w1", "w2"])
def test_each_factor_alone(only, device):
    """A gradient has the same bits whatever else is trained."""
    problem = Problem(T, E, 3, H, I, torch.bfloat16, routing="holes")
    inputs = make_inputs(problem, device)
    factors, lora_ids = adapters(problem, inputs, torch.bfloat16)
    factors = {name: f.to(device) for name, f in factors.items()}

    def gradients(names):
        mine = {name: f.clone().requires_grad_(name in names) for name, f in factors.items()}
        lora = lora_of(mine, lora_ids.to(device), only)
        out = call(moe_ops.fused_experts, problem, inputs, lora=lora)
        return torch.autograd.grad(out.float().square().sum(), [mine[name] for name in names])

    names = [name for name in NAMES if only in (None, f"w{name[4]}")]
    everything = dict(zip(names, gradients(names), strict=True))
    for name in names:
        assert everything[name].any() and torch.equal(*gradients([name]), everything[name]), name


@pytest.mark.kernel
@pytest.mark.parametrize("scheme", [s for s in SCHEMES if SCHEMES[s].activation is None])
def test_over_frozen_weights(scheme, device):
    if scheme != "unquantized":
        check(Problem(T, E, K, H, I, torch.bfloat16, scheme=scheme), device)


def test_quantized_rows(device):
    """fp8 rows and weights: the adapters read the rows before they are quantized."""
    problem = Problem(T, E, K, H, I, torch.float32, scheme="fp8_channel")
    inputs, config, _ = quantize_inputs(problem, make_inputs(problem, device))
    factors, lora_ids = adapters(problem, make_inputs(problem))
    zero = {n: f.to(device) * (n[-1] != "b") for n, f in factors.items()}
    pairs = tuple(zero.values())
    lora = ExpertLora(pairs[:2], pairs[2:], lora_ids.to(device))
    out = call(moe_ops.fused_experts, problem, inputs, quant_config=config, lora=lora)
    plain = call(moe_ops.fused_experts, problem, inputs, quant_config=config)
    torch.testing.assert_close(out, plain)


@pytest.mark.kernel
@pytest.mark.parametrize("by_slot", [False, True])
def test_alone(by_slot, device):
    """`expert_lora` and its gradients; zeros for slots without an expert or an adapter."""
    ids = torch.tensor([[0, 3], [-1, 2], [1, 7], [2, 3]])
    lora_ids = torch.tensor([1, 0, -1, 2])
    rows = random(8 if by_slot else 4, H, seed=3)
    a, b = random(L, E, R, H, seed=1), random(L, E, 20, R, seed=2)
    given = [t.to(device).requires_grad_() for t in (rows, a, b)]
    out = expert_lora(*given, ids.to(device), lora_ids.to(device), 1.5)
    wide = [t.double().requires_grad_() for t in (rows, a, b)]
    x = wide[0] if by_slot else wide[0].repeat_interleave(2, 0)
    parts = []
    for slot, e in enumerate(ids.flatten().tolist()):
        adapter, real = int(lora_ids[slot // 2]), 0 <= e < E and lora_ids[slot // 2] >= 0
        low = wide[2][adapter, e] @ (wide[1][adapter, e] @ x[slot]) if real else x[slot][:20] * 0
        parts.append(1.5 * low)
    expected = torch.stack(parts)
    torch.testing.assert_close(out.cpu(), expected.float())
    grad = random(8, 20, seed=4)
    found = torch.autograd.grad(out, given, grad.to(device))
    exact = torch.autograd.grad(expected, wide, grad.double())
    for number, (actual, near) in enumerate(zip(found, exact, strict=True)):
        torch.testing.assert_close(actual.cpu(), near.float())
        one = [t.detach().requires_grad_(i == number) for i, t in enumerate(given)]
        out = expert_lora(*one, ids.to(device), lora_ids.to(device), 1.5)
        assert torch.equal(*torch.autograd.grad(out, one[number], grad.to(device)), actual)


@pytest.mark.parametrize("scheme", ["int8_w8a16", "nvfp4_w4a16"])
def test_one_compilation(scheme, device):
    torch._dynamo.reset()
    problem = Problem(4, E, K, H, I, torch.float32, scheme=scheme)
    inputs, config, exact = quantize_inputs(problem, make_inputs(problem, device))
    factors, _ = adapters(problem, exact)
    pairs = [f.to(device).requires_grad_() for f in factors.values()]

    def run(x, weights, ids, lora_ids):
        lora = ExpertLora((pairs[0], pairs[1]), (pairs[2], pairs[3]), lora_ids, 0.5)
        w1, w2 = inputs.w1, inputs.w2
        return moe_ops.fused_experts(x, w1, w2, weights, ids, quant_config=config, lora=lora)

    with torch.fx.experimental._config.patch(backed_size_oblivious=True):
        compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
        for number, tokens in enumerate((7, 5, 1, 0, 100)):
            its = make_inputs(problem.with_(num_tokens=tokens), device)
            x, lora_ids = its.hidden_states.requires_grad_(), torch.arange(tokens) % (L + 1)
            arguments = (x, its.topk_weights, its.topk_ids, lora_ids.to(device))
            with torch.compiler.set_stance("fail_on_recompile" if number else "default"):
                found = torch.autograd.grad(compiled(*arguments).square().sum(), (x, *pairs))
            near = torch.autograd.grad(run(*arguments).square().sum(), (x, *pairs))
            for a, b in zip(found, near, strict=True):
                assert torch.equal(a, b)


@pytest.mark.parametrize("by_slot", [False, True])
def test_alone_compiled_for_any_number_of_tokens(by_slot, device):
    a, b = random(L, E, R, H, seed=1).to(device), random(L, E, 20, R, seed=2).to(device)
    compiled = torch.compile(expert_lora, fullgraph=True, dynamic=True, backend="aot_eager")
    for number, tokens in enumerate((5, 7, 40)):
        rows = random(tokens * (2 if by_slot else 1), H, seed=3).to(device)
        ids = (torch.arange(2 * tokens, device=device) % E).view(tokens, 2)
        with torch.compiler.set_stance("fail_on_recompile" if number else "default"):
            out = compiled(rows, a, b, ids)
        assert torch.equal(out, expert_lora(rows, a, b, ids))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w1": (torch.zeros(L, E, R, H), torch.zeros(L, E, H, R))}, "lora.w1's lora_b must be"),
        ({"w1": (torch.zeros(L, E, 0, H), torch.zeros(L, E, H, 0))}, "lora.w1's rank must be at"),
        ({"w2": (torch.zeros(2, E, R, I), torch.zeros(2, E, H, R))}, "lora.w2's L must be L of"),
        ({"lora_ids": torch.zeros(3, dtype=torch.int64)}, "lora.lora_ids must have the 9 tokens"),
        ({"scaling": torch.ones(2)}, r"scaling.numel\(\) must be the number of adapters = 3"),
    ],
)
def test_errors(change, message):
    assert_refused(change, ValueError, message)


def assert_refused(change, error, message):
    problem = Problem(T, E, K, H, I, torch.float32)
    inputs = make_inputs(problem)
    factors, lora_ids = adapters(problem, inputs)
    pairs = tuple(factors.values())
    lora = ExpertLora(pairs[:2], pairs[2:], lora_ids)._replace(**change)
    with pytest.raises(error, match=message):
        call(moe_ops.fused_experts, problem, inputs, lora=lora)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.bool])
def test_scalings_are_real_numbers(dtype):
    change = {"scaling": torch.ones(L, dtype=dtype)}
    assert_refused(change, TypeError, "scaling must have a dtype")
