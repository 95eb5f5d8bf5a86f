"""What has no derivative: forward passes run in grad mode, and nobody gets a wrong gradient."""

import re

import pytest
import torch
from modular import setup
from torch import nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import moe_ops
from moe_ops import ops
from moe_ops.pipeline.gated_experts import gated_experts
from moe_ops.testing import Problem, make_inputs, quantize_inputs

WAY_OUT = r'not implemented .*set_experts_implementation\("grouped_mm"\)'
T, E, K, H, I = 5, 4, 2, 16, 12  # noqa: E741


@pytest.fixture
def problem():
    return Problem(T, E, K, H, I, torch.float32, has_bias=True)


@pytest.fixture
def inputs(problem, device):
    return make_inputs(problem, device)


@pytest.fixture
def logits(device):
    return torch.randn(T, E, generator=torch.Generator().manual_seed(1)).to(device)


def assert_refused(run, x):
    """``run`` returns what it does under no_grad, and a gradient of ``x`` raises."""
    with torch.no_grad():
        expected = run()
    x.requires_grad_()
    result = run()
    if not isinstance(result, tuple):
        result, expected = (result,), (expected,)
    asked = [y for y in result if isinstance(y, torch.Tensor) and y.requires_grad]
    assert asked
    for a, b in zip(result, expected, strict=True):
        assert a is b is None or torch.equal(a.float(), b.float())
    for y in asked:
        with pytest.raises(NotImplementedError, match=WAY_OUT):
            torch.autograd.grad(y.float().sum(), x, allow_unused=True)


def gate(rows):
    """A gate that is no activation of this library."""
    return rows[:, :I] * rows[:, I:].cos()


def test_a_model_that_is_evaluated(inputs):
    """Weights of any model require grad; nobody asks for theirs here."""
    w1, w2 = nn.Parameter(inputs.w1), nn.Parameter(inputs.w2)
    out = gated_experts(inputs.hidden_states, w1, w2, *inputs[3:5], gate)
    with pytest.raises(NotImplementedError, match="gradients of gated_experts are " + WAY_OUT):
        (out * 2).sum().backward()
    assert w1.grad is None and w2.grad is None
    out = moe_ops.fused_experts(inputs.hidden_states, w1.detach(), w2.detach(), *inputs[3:5])
    assert not out.requires_grad


def quantized(scheme, device):
    problem = Problem(T, E, K, H, 16, scheme=scheme)
    inputs, config, _ = quantize_inputs(problem, make_inputs(problem, device))
    return inputs, config


@pytest.mark.parametrize("name", ["w1", "w1_scale"])
def test_quantized_weights_are_constants(name, device):
    (x, w1, w2, weights, ids, *_), config = quantized("fp8_channel", device)
    changed = w1 if name == "w1" else config.w1_scale
    run = lambda: moe_ops.fused_experts(x, w1, w2, weights, ids, quant_config=config)  # noqa: E731
    assert_refused(run, changed)
    with pytest.raises(NotImplementedError, match="quantized weights and their scales must not"):
        run().sum().backward()


def stages(x, weights, ids, logits):
    """Public functions with one float argument each, ``x``, ``weights`` or ``logits``."""
    permuted, _, offset, inverse, _ = moe_ops.moe_permute(x.detach(), None, ids, E)
    rows = torch.randn(T, K, H, device=x.device)
    fp8 = torch.float8_e4m3fn
    return {
        "quantize": (lambda: moe_ops.moe_kernel_quantize_input(x, None, fp8, True), x),
        "permute": (lambda: moe_ops.moe_permute(x, None, ids, E), x),
        "unpermute": (lambda: moe_ops.moe_unpermute(permuted, weights, inverse, offset), weights),
        "sum": (lambda: moe_ops.moe_fused_mul_sum(rows, weights), weights),
        "activation": (lambda: moe_ops.apply_moe_activation("silu", x), x),
    }


def routing(x, weights, ids, logits):
    """What has gradients, but no forward-mode derivatives."""
    table = torch.zeros(3, K, dtype=torch.int32, device=x.device)
    words = torch.zeros(T, dtype=torch.int32, device=x.device)
    return {
        "hash_topk": (lambda: moe_ops.routing.hash_topk(x, logits, words, table, True), logits),
        "sparsemixer": (lambda: moe_ops.routing.sparsemixer(x, logits), logits),
        "adjust": (lambda: moe_ops.routing.adjust_routing(weights, ids, E), weights),
        "zero": (lambda: moe_ops.routing.zero_experts(x, weights, ids, 2), x),
    }


STAGES = tuple(stages(torch.zeros(T, H), *make_inputs(Problem(T, E, K, H, I))[3:5], None))


@pytest.mark.parametrize("name", STAGES)
def test_stages(name, inputs, logits):
    run, x = stages(*inputs[:1], *inputs[3:5], logits)[name]
    assert_refused(run, x)


@pytest.mark.parametrize("name", [*STAGES, "hash_topk", "sparsemixer", "adjust", "zero"])
def test_forward_mode(name, inputs, logits):
    """Kernels do not see tangents: they would be dropped."""
    given = (*inputs[:1], *inputs[3:5], logits)
    run, x = {**stages(*given), **routing(*given)}[name]
    with forward_ad.dual_level():
        forward_ad.make_dual(x, x)
        with pytest.raises(NotImplementedError, match="forward-mode derivatives of .*" + WAY_OUT):
            run()


def test_transforms(problem, inputs):
    x, w1, w2, weights, ids = inputs[:5]

    def run(x):
        return moe_ops.fused_experts(x, w1, w2, weights, ids)

    def trained(x):
        return moe_ops.fused_experts(x, nn.Parameter(w1), w2, weights, ids)

    func, many = torch.func, torch.stack([x, 2 * x])
    reverse, forward = r"torch\.func\.grad .*backward\(\)", r"torch\.func\.jvp .*reverse mode"
    cases = {
        "grad": (lambda: func.grad(lambda x: run(x).sum())(x), reverse),
        "vjp": (lambda: func.vjp(run, x), reverse),
        "jacrev": (lambda: func.jacrev(run)(x), reverse),
        "jacfwd": (lambda: func.jacfwd(run)(x), "in reverse mode"),
        "jvp": (lambda: func.jvp(trained, (x,), (x,)), forward),
        "jvp, inference": (lambda: torch.no_grad()(func.jvp)(run, (x,), (x,)), "in reverse mode"),
        "vmap": (lambda: torch.vmap(trained)(many), r"torch\.vmap .*torch\.no_grad\(\)"),
        "functionalize": (lambda: func.functionalize(trained)(x), "functionalize: .*torch.compile"),
    }
    wrong = {}
    for name, (call, text) in cases.items():
        with pytest.raises(NotImplementedError) as error:
            call()
        if not re.search(text, str(error.value)):
            wrong[name] = str(error.value)
    assert not wrong
    expected = torch.stack([run(x), run(2 * x)])
    with torch.no_grad():  # what the errors advise
        assert torch.equal(torch.vmap(trained)(many), expected)
        assert torch.equal(func.functionalize(trained)(x), expected[0])
    assert torch.equal(torch.vmap(run)(many), expected)


def test_what_is_passed_on_keeps_its_gradient(inputs):
    x = inputs.hidden_states.requires_grad_()
    same, _ = moe_ops.moe_kernel_quantize_input(x, None, None, False)
    same.sum().backward()
    assert x.grad.eq(1).all()


def test_an_output_to_write_into(inputs):
    rows, out = torch.randn(T, K, H, device=inputs.w1.device), torch.empty_like(inputs[0])
    weights = inputs.topk_weights.requires_grad_()
    with pytest.raises(NotImplementedError, match=WAY_OUT):
        moe_ops.moe_fused_mul_sum(rows, weights, out)
    with torch.no_grad():
        moe_ops.moe_fused_mul_sum(rows, weights, out)


@pytest.mark.parametrize("name", ["hidden_states", "w2", "topk_weights", "w1_bias"])
def test_modular_kernels(name, problem, device):
    """A kernel whose experts have no gradients raises; test_modular_gradients.py has the others."""
    s = setup(problem, moe_ops.pipeline.NaiveBatchedExperts, device)
    tensors = s.config if name == "w1_bias" else s.inputs
    assert_refused(s.apply, getattr(tensors, name))


def test_monolithic_kernels(problem, logits, device):
    s = setup(problem, moe_ops.pipeline.MonolithicExperts, device)
    x, w1, w2 = s.inputs[:3]
    run = lambda: s.kernel.apply_monolithic(x, w1, w2, logits, "silu", E, None, False)  # noqa: E731
    assert_refused(run, logits)


def test_shared_experts_have_gradients(problem, device):
    s = setup(problem, moe_ops.pipeline.NaiveBatchedExperts, device)
    shared = nn.Linear(H, H, device=device)
    parts = (s.kernel.prepare_finalize, s.kernel.fused_experts)
    x, w1, w2, weights, ids = s.inputs[:5]
    kernel = moe_ops.FusedMoEKernel(*parts, shared)
    ours, routed = kernel.apply(x.requires_grad_(), w1, w2, weights, ids)
    ours.sum().backward()
    assert shared.weight.grad is not None and x.grad is not None
    calls = [moe_ops.pipeline.Call(x, w1, w2, weights, ids)] * 2
    for _, out in moe_ops.pipeline.run_micro_batches(kernel, calls):
        assert torch.equal(out, routed)
        with pytest.raises(NotImplementedError, match=WAY_OUT):
            out.sum().backward()


@pytest.mark.filterwarnings("ignore:moe_ops..fused_topk. an autograd kernel was not registered")
def test_operators_by_themselves(logits):
    def run(x):
        return ops.fused_topk(x, None, K, True, "softmax", 1.0)[0]

    torch._dynamo.reset()
    logits.requires_grad_()
    for bare in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
        with pytest.raises(NotImplementedError, match="gradients of fused_topk are " + WAY_OUT):
            bare(logits).sum().backward()
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(run, (logits.detach(),), (logits.detach(),))


class Block(nn.Module):
    """Weights require grad, as they do in any model."""

    def __init__(self, inputs):
        super().__init__()
        self.w1, self.w2 = nn.Parameter(inputs.w1), nn.Parameter(inputs.w2)

    def forward(self, x, logits):
        weights, ids = moe_ops.fused_topk(x, logits, K, True)
        return gated_experts(x, self.w1, self.w2, weights, ids, gate)


def test_compiled(inputs, logits):
    """The joint graph is traced; its backward pass raises where it runs."""
    torch._dynamo.reset()
    block, x = Block(inputs), inputs.hidden_states
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (T, 3):
        out = compiled(x[:tokens], logits[:tokens])
        assert torch.equal(out, block(x[:tokens], logits[:tokens]))
        with pytest.raises(NotImplementedError, match="gradients of gated_experts are " + WAY_OUT):
            out.sum().backward()
    assert block.w1.grad is None


def test_exported(inputs, logits):
    block, x = Block(inputs), inputs.hidden_states
    sizes = ({0: torch.export.Dim("tokens")},) * 2
    program = torch.export.export(block, (x, logits), dynamic_shapes=sizes)
    for module in (program.module(), program.run_decompositions().module()):
        out = module(x[:3], logits[:3])
        assert torch.equal(out, block(x[:3], logits[:3]))
        with pytest.raises(NotImplementedError, match=WAY_OUT):
            out.sum().backward()


def test_nothing_is_added_without_grad_mode(inputs, logits):
    block = Block(inputs)
    with torch.no_grad():
        graph = make_fx(block)(inputs.hidden_states, logits).graph
        assert not block(inputs.hidden_states, logits).requires_grad
    assert not [node for node in graph.nodes if "no_gradient" in str(node.target)]
