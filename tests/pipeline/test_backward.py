"""Gradients of the layer against autograd in float64, by budget; compiled, recomputed, repeated."""

from dataclasses import replace

import pytest
import torch
from conftest import HAS_CUDA, INTERPRETED
from differentiable_layers import FLOAT_INPUTS, assert_gradients, gradients, leaves
from hypothesis import given
from pairwise import half_exhaustive
from strategies import layers, problems
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import moe_ops
from moe_ops.scheme import SCHEMES
from moe_ops.testing import Problem, call, make_inputs, quantize_inputs

E, K, H, I = 4 if INTERPRETED else 8, 2, 32, 24  # noqa: E741


def grad_of(problem, seed=5):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(problem.num_tokens, problem.hidden_size, generator=g).to(problem.dtype)


def run(problem, inputs, grad, names=FLOAT_INPUTS, **more):
    given = leaves(inputs, names)
    out = call(moe_ops.fused_experts, problem, given, **more)
    return out, gradients(out, given, grad)


@pytest.mark.kernel
@given(problem=problems())
def test_gradients(problem, device):
    """Any sizes, routing, activation, dtype, experts on other ranks; all inputs have gradients."""
    if INTERPRETED:
        problem = problem.with_(num_tokens=min(problem.num_tokens, 9))
    inputs, grad = make_inputs(problem, device), grad_of(problem)
    out, found = run(problem, inputs, grad.to(device))
    assert out.dtype == problem.dtype and out.is_contiguous()
    assert_gradients(problem, inputs, found, grad)


def quantized_run(problem, device, **more):
    """The gradients of a quantized problem's inputs, and what they are compared with."""
    inputs, config, exact = quantize_inputs(problem, make_inputs(problem, device))
    x, weights = (t.clone().requires_grad_() for t in (inputs.hidden_states, inputs.topk_weights))
    wanted = {"hidden_states": x, "topk_weights": weights}
    for name in ("w1_bias", "w2_bias") if problem.has_bias else ():
        wanted[name] = getattr(config, name).requires_grad_()
    given, grad = inputs._replace(hidden_states=x, topk_weights=weights), grad_of(problem)
    out = call(moe_ops.fused_experts, problem, given, quant_config=config, **more)
    found = torch.autograd.grad(out, [*wanted.values()], grad.to(device))
    found = dict(zip(wanted, found, strict=True))
    for name in found:
        wanted[name].requires_grad_(False)
    moved = {k: v.cpu() if torch.is_tensor(v) else v for k, v in vars(config).items()}
    return exact, found, grad, moe_ops.FusedMoEQuantConfig(**moved)


@pytest.mark.kernel
@given(problem=layers(schemes=tuple(s for s in SCHEMES if s != "unquantized")))
def test_frozen_weights_of_every_scheme(problem, device):
    """Dequantized weights, rounded to the tokens' dtype; quantized rows pass their gradient."""
    if problem.num_tokens:
        exact, found, grad, config = quantized_run(problem, device)
        assert_gradients(problem, exact, found, grad, config)


@pytest.mark.kernel
@pytest.mark.parametrize("scheme", SCHEMES)
def test_each_scheme(scheme, device):
    """More slots than are computed without a plan."""
    if scheme == "unquantized":
        return
    problem = Problem(9, 4, 2, 32, 48, torch.bfloat16, scheme=scheme, routing="holes")
    exact, found, grad, config = quantized_run(problem, device)
    assert_gradients(problem, exact, found, grad, config)


def test_scales_have_no_gradient(device):
    """Every tensor of quantized weights but the biases."""
    for scheme in ("int4_w4a16_g128_zp", "nvfp4", "int4_w4a8_g128", "fp8_tensor_static"):
        problem = Problem(3, E, K, 128, 128, torch.bfloat16, scheme=scheme, has_bias=True)
        inputs, config, _ = quantize_inputs(problem, make_inputs(problem, device))
        given = {name: x for name, x in vars(config).items() if isinstance(x, torch.Tensor)}
        assert len(given) > 2
        for name, x in given.items():
            if x.dtype not in (torch.float32, torch.bfloat16):
                continue
            trained = replace(config, **{name: x.clone().requires_grad_()})
            out = call(moe_ops.fused_experts, problem, inputs, quant_config=trained).float().sum()
            if name.endswith("bias"):
                out.backward()
                continue
            with pytest.raises(NotImplementedError, match="their scales must not require grad"):
                out.backward()


@pytest.mark.kernel
@pytest.mark.skipif(INTERPRETED, reason="sizes for a processor")
@pytest.mark.parametrize(
    ("scheme",),
    half_exhaustive(
        ["int4_w4a16_g128_zp", "mxfp4_w4a16", "fp8_block128", "nvfp4"], where=not HAS_CUDA
    ),
)
def test_real_sizes_of_frozen_weights(scheme, device):
    problem = Problem(40, 3, 2, 2880, 704, torch.bfloat16, scheme=scheme)
    exact, found, grad, config = quantized_run(problem, device)
    assert_gradients(problem, exact, found, grad, config)


@pytest.mark.skipif(INTERPRETED, reason="sizes for a processor")
@pytest.mark.parametrize(
    "problem",
    [
        pytest.param(
            Problem(20, 3, 2, 2880, 704, torch.bfloat16, activation="swigluoai", has_bias=True),
            marks=[pytest.mark.exhaustive] * (not HAS_CUDA),
        ),
        Problem(60, 257, 10, 64, 48, torch.bfloat16),
        Problem(1, 8, 8, 256, 1408, torch.float32),
    ],
    ids=str,
)
def test_real_sizes(problem, device):
    inputs, grad = make_inputs(problem, device), grad_of(problem)
    assert_gradients(problem, inputs, run(problem, inputs, grad.to(device))[1], grad)


@pytest.mark.kernel
@pytest.mark.parametrize("on_input", [False, True])
@pytest.mark.parametrize("names", [(n,) for n in FLOAT_INPUTS] + [("w2", "w2_bias")], ids=str)
def test_each_alone(names, on_input, device):
    """A gradient has the same bits whatever else is asked for."""
    problem = Problem(
        9, E, K, H, I, torch.bfloat16, has_bias=True, on_input=on_input, routing="holes"
    )
    inputs, grad = make_inputs(problem, device), grad_of(problem).to(device)
    everything = run(problem, inputs, grad)[1]
    found = run(problem, inputs, grad, names)[1]
    assert set(found) == set(names)
    for name, actual in found.items():
        if name != "w2":  # then the activation is computed without its derivative
            assert torch.equal(actual, everything[name])
    assert_gradients(problem, inputs, found, grad)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("hidden_states",), {"expert_product": 2, "moe_activation_backward": 1,
                              "moe_fused_mul_sum": 1}),
        (("w2",), {"activation": 1, "expert_wgrad": 1}),
        (("w1",), {"expert_product": 1, "moe_activation_backward": 1, "expert_wgrad": 1}),
        (("topk_weights",), {"expert_product": 1, "moe_activation_backward": 1}),
        (("w1_bias",), {"expert_product": 1, "moe_activation_backward": 1, "expert_bias_grad": 1}),
        (("w2_bias",), {"expert_bias_grad": 1}),
    ],
)  # fmt: skip
def test_what_is_frozen_costs_nothing(names, expected):
    problem = Problem(9, E, K, H, I, torch.float32, has_bias=names[0].endswith("bias"))
    given = leaves(make_inputs(problem), names)
    out = call(moe_ops.fused_experts, problem, given)
    with torch.autograd.set_multithreading_enabled(mode=False), Dispatched() as seen:
        out.sum().backward()
    assert seen.count == expected


class Dispatched(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts calls of the library's operators."""

    def __init__(self):
        super().__init__()
        self.count = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Count, then call."""
        if func.namespace == "moe_ops":
            name = func.name().split("::")[1]
            self.count[name] = self.count.get(name, 0) + 1
        return func(*args, **kwargs or {})


def test_memory_for_backward():
    """Tokens, the product of the first GEMM and the routing: no other row per slot is kept."""
    problem = Problem(64, E, K, H, I, torch.float32)
    given = leaves(make_inputs(problem))
    known = {getattr(given, n).data_ptr() for n in ("hidden_states", "w1", "w2", "topk_weights")}
    kept = []

    def pack(x):
        if x.data_ptr() not in known:
            kept.append((tuple(x.shape), x.dtype))
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        call(moe_ops.fused_experts, problem, given)
    floats = [shape for shape, dtype in kept if dtype.is_floating_point]
    assert floats == [(64 * K, 2 * I)]


def test_transposed_weights(device):
    """transformers' transposed layouts: gradients lie as the parameters do."""
    problem = Problem(40, E, K, H, I, torch.float32)
    inputs = make_inputs(problem, device)
    turned = [w.transpose(1, 2).contiguous() for w in (inputs.w1, inputs.w2)]
    parameters = [torch.nn.Parameter(w) for w in turned]
    w1, w2 = (p.transpose(1, 2) for p in parameters)
    out = moe_ops.fused_experts(inputs.hidden_states, w1, w2, *inputs[3:5])
    grad = grad_of(problem).to(device)
    out.backward(grad)
    expected = run(problem, inputs, grad, ("w1", "w2"))[1]
    for p, name in zip(parameters, ("w1", "w2"), strict=True):
        assert p.grad.is_contiguous()
        torch.testing.assert_close(p.grad.transpose(1, 2), expected[name])


def pipeline(w1, w2):
    def layer(x, logits):
        return moe_ops.fused_moe(x * 2, w1, w2, logits, K)

    return layer


def batch(tokens, device, dtype=torch.float32):
    g = torch.Generator().manual_seed(tokens)
    x, logits = torch.randn(tokens, H, generator=g), torch.randn(tokens, E, generator=g)
    return [t.to(device, dtype).requires_grad_() for t in (x, logits)]


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_one_compilation_of_forward_and_backward(backend, device):
    torch._dynamo.reset()
    inputs = leaves(make_inputs(Problem(4, E, K, H, I, torch.float32), device))
    layer, counter = pipeline(inputs.w1, inputs.w2), CompileCounterWithBackend(backend)

    def step(function, tokens):
        given = batch(tokens, device)
        out = function(*given)
        return [out, *torch.autograd.grad(out.square().sum(), (*given, inputs.w1, inputs.w2))]

    with torch.fx.experimental._config.patch(backed_size_oblivious=True):
        compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
        for number, tokens in enumerate((7, 5, 64, 1, 2, 0, 1024)):
            stance = "fail_on_recompile" if number else "default"
            with torch.compiler.set_stance(stance):
                actual = step(compiled, tokens)
            for a, b in zip(actual, step(layer, tokens), strict=True):
                assert torch.equal(a, b)
    assert counter.frame_count == 1


def test_checkpointing_and_accumulation_are_bitwise(device):
    inputs = leaves(make_inputs(Problem(4, E, K, H, I, torch.bfloat16), device))
    layer = pipeline(inputs.w1, inputs.w2)
    given = batch(33, device, torch.bfloat16)
    wanted = (*given, inputs.w1, inputs.w2)
    plain = torch.autograd.grad(layer(*given).float().square().sum(), wanted)
    again = checkpoint(layer, *given, use_reentrant=False)
    for a, b in zip(torch.autograd.grad(again.float().square().sum(), wanted), plain, strict=True):
        assert torch.equal(a, b)
    for _ in range(2):
        layer(*given).float().square().sum().backward()
    assert torch.equal(inputs.w1.grad, plain[2] + plain[2])


def test_a_layer_trains(device):
    """Adam on `FusedMoE` and its router; padding tokens have no gradient."""
    moe = moe_ops.FusedMoE(E, K, H, I, device=device, params_dtype=torch.float32, has_bias=True)
    router = torch.nn.Linear(H, E, device=device)
    for p in moe.parameters():
        torch.nn.init.normal_(p, std=0.1).requires_grad_()
    x = torch.randn(64, H, device=device)
    target = torch.randn(64, H, device=device) * 0.1
    optimizer = torch.optim.Adam([*moe.parameters(), *router.parameters()], lr=1e-2)
    losses = []
    for _ in range(30):
        loss = (moe(x, router(x)) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        assert router.weight.grad.any() and all(p.grad.any() for p in moe.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


def test_autocast(device):
    """Weights in float32 are cast with their gradients; also in calls without gradients."""
    moe = moe_ops.FusedMoE(E, K, H, I, device=device, params_dtype=torch.float32)
    for p in moe.parameters():
        torch.nn.init.normal_(p, std=0.2).requires_grad_()
    x, logits = batch(33, device)
    same = moe_ops.FusedMoE(E, K, H, I, device=device, params_dtype=torch.bfloat16)
    same.load_state_dict(moe.state_dict())
    same.requires_grad_(True)
    grad = torch.randn(33, H, device=device).bfloat16()
    with torch.autocast(device, torch.bfloat16):
        out = moe(x, logits)
        with torch.no_grad():
            assert torch.equal(moe(x.bfloat16(), logits), same(x.bfloat16(), logits))
    out.backward(grad)
    near = x.detach().bfloat16().requires_grad_()
    same(near, logits).backward(grad)
    assert moe.w2_weight.grad.dtype == torch.float32
    assert torch.equal(moe.w2_weight.grad, same.w2_weight.grad.float())
    assert torch.equal(x.grad, near.grad.float())


@pytest.mark.gpu
def test_captured_with_another_routing():
    problem = Problem(256, E, K, 128, 64)
    inputs = leaves(make_inputs(problem, "cuda"))
    names = [n for n in FLOAT_INPUTS if getattr(inputs, n) is not None]
    grad = grad_of(problem).cuda()

    def step():
        out = call(moe_ops.fused_experts, problem, inputs)
        return torch.autograd.grad(out, [getattr(inputs, n) for n in names], grad)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    inputs.topk_ids.copy_(make_inputs(problem.with_(routing="skewed"), "cuda", 3).topk_ids)
    graph.replay()
    for a, b in zip(found, step(), strict=True):
        assert torch.equal(a, b)
