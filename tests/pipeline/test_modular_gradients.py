"""Gradients through the modular kernel: those of `fused_experts`, in both formats."""

from dataclasses import replace

import pytest
import torch
from conftest import INTERPRETED
from differentiable_layers import FLOAT_INPUTS, assert_gradients, gradients, leaves
from hypothesis import given
from modular import BATCHED, EXPERTS, SEPARATE, setup
from strategies import problems
from torch._dynamo.testing import CompileCounterWithBackend

import moe_ops
from moe_ops.pipeline import PrepareResult
from moe_ops.pipeline.calls import Call, Pending
from moe_ops.pipeline.exchange.groups import RankGroup
from moe_ops.testing import Problem, call

KINDS = [k for k in EXPERTS if not k.is_monolithic() and k.has_gradients()]
STANDARD = [k for k in KINDS if k.activation_format() is not BATCHED]
BATCHES = [k for k in KINDS if k not in STANDARD]
PROBLEM = Problem(9, 8, 2, 32, 48, torch.bfloat16, has_bias=True, routing="holes")


def grad_of(problem, seed=5):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(problem.num_tokens, problem.hidden_size, generator=g).to(problem.dtype)


def differentiable(problem, kind, device, names=FLOAT_INPUTS, **options):
    """A kernel whose named inputs require grad; its experts hold the biases."""
    s = setup(problem, kind, device, **options)
    biases = ("w1_bias", "w2_bias")
    inputs = leaves(s.inputs._replace(**{n: getattr(s.config, n) for n in biases}), names)
    config = replace(s.config, **{n: getattr(inputs, n) for n in biases})
    s.kernel.fused_experts.quant_config = config
    return s._replace(inputs=inputs)


def test_who_has_gradients():
    found = {kind.__name__ for kind in KINDS}
    assert found == {
        "TritonExperts", "GroupedGemmExperts", "BatchedTritonExperts", "BatchedGroupedGemmExperts",
    }  # fmt: skip


@pytest.mark.kernel
@given(problem=problems())
@pytest.mark.parametrize("kind", BATCHES, ids=lambda k: k.__name__)
def test_gradients(kind, problem, device):
    """Against autograd in float64, by budget: a few router weights are too few numbers for it."""
    problem = problem.with_(num_tokens=max(21, min(23, problem.num_tokens)))
    if INTERPRETED:  # a batch has room for every token at each expert: minutes for 60 experts
        experts, local = min(problem.num_experts, 3), problem.num_local_experts
        local = None if local is None else min(local, experts)
        few = {"num_experts": experts, "num_local_experts": local}
        problem = problem.with_(top_k=min(problem.top_k, experts), **few)
    s, grad = differentiable(problem, kind, device), grad_of(problem)
    found = gradients(s.apply(), s.inputs, grad.to(device))
    assert_gradients(problem, s.inputs, found, grad, batched=True, rounds_product=kind in SEPARATE)


@pytest.mark.parametrize("on_input", [False, True])
@pytest.mark.parametrize("scheme", ["unquantized", "int4_w4a16_g32", "fp8_channel", "fp8_tensor"])
@pytest.mark.parametrize("kind", STANDARD, ids=lambda k: k.__name__)
def test_bits_of_the_functional_path(kind, scheme, on_input, device):
    problem = PROBLEM.with_(scheme=scheme, on_input=on_input, intermediate_size=64)
    frozen = scheme != "unquantized"
    names = ("hidden_states", "topk_weights") if frozen else FLOAT_INPUTS
    s, grad = differentiable(problem, kind, device, names), grad_of(problem).to(device)
    out = s.apply()
    config = s.kernel.fused_experts.quant_config if frozen else None
    near = call(moe_ops.fused_experts, problem, s.inputs, quant_config=config)
    assert torch.equal(out, near) == (kind not in SEPARATE)
    with torch.no_grad():
        assert torch.equal(out, s.apply())
    expected = gradients(near, s.inputs, grad)
    for name, actual in gradients(out, s.inputs, grad).items():
        assert torch.equal(actual, expected[name]), name


@pytest.mark.parametrize("name", FLOAT_INPUTS)
@pytest.mark.parametrize("on_input", [False, True])
@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
def test_each_alone(kind, on_input, name, device):
    problem = PROBLEM.with_(on_input=on_input)
    s, grad = differentiable(problem, kind, device, (name,)), grad_of(problem)
    found = gradients(s.apply(), s.inputs, grad.to(device))
    assert [*found] == [name]
    assert_gradients(
        problem, s.inputs, found, grad, batched=kind in BATCHES, rounds_product=kind in SEPARATE
    )


@pytest.mark.parametrize(
    ("kind", "options"), [(k, {"chunk_size": 4}) for k in STANDARD] + [(KINDS[0], {})]
)
def test_parts_of_a_call(kind, options, device):
    """Chunks of tokens; parts of a batch that is larger than the Batched format has room for."""
    s, grad = differentiable(PROBLEM, kind, device, **options), grad_of(PROBLEM)
    if not options:
        s.kernel.prepare_finalize.max_num_tokens = 4
    found = gradients(s.apply(), s.inputs, grad.to(device))
    assert_gradients(
        PROBLEM, s.inputs, found, grad, batched=kind in BATCHES, rounds_product=kind in SEPARATE
    )


def test_micro_batches_and_shared_experts(device):
    s = differentiable(PROBLEM, moe_ops.pipeline.TritonExperts, device)
    parts = (s.kernel.prepare_finalize, s.kernel.fused_experts)
    kernel = moe_ops.FusedMoEKernel(*parts, lambda x: 2 * x)
    calls = [Call(**s.arguments()).tokens(slice(*part)) for part in ((0, 4), (4, 9))]
    outs = moe_ops.pipeline.run_micro_batches(kernel, calls)
    grad = grad_of(PROBLEM)
    found = gradients(torch.cat([routed for _, routed in outs]), s.inputs, grad.to(device))
    assert_gradients(PROBLEM, s.inputs, found, grad)
    assert outs[0][0].requires_grad


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
def test_autocast(kind, device):
    """Weights and tokens in float32 are cast with their gradients; tokens may be cast before."""
    problem = PROBLEM.with_(has_bias=False)
    s = differentiable(problem.with_(dtype=torch.float32), kind, device)
    near, grad = differentiable(problem, kind, device), grad_of(problem).to(device)
    for x, wide in zip(near.inputs, s.inputs, strict=True):
        if x is not None and x.requires_grad:
            x.data.copy_(wide.data)
    rows = s.inputs.hidden_states
    with torch.autocast(device, torch.bfloat16):
        out, narrow = s.apply(), s.apply(hidden_states=rows.bfloat16())
        parts = moe_ops.pipeline.run_micro_batches(s.kernel, [Call(**s.arguments())])
        with torch.no_grad():
            assert torch.equal(s.apply(), out)
            both = s.kernel.prepare_finalize, s.kernel.fused_experts
            inplace, x = moe_ops.FusedMoEKernel(*both, inplace=True), rows.detach().clone()
            calls = [Call(**s.arguments(hidden_states=x))]
            (written,) = moe_ops.pipeline.run_micro_batches(inplace, calls)
            assert written is x and torch.equal(x, out.float())
    expected = near.apply()
    assert torch.equal(out, expected) and torch.equal(narrow, out) and torch.equal(parts[0], out)
    expected = gradients(expected, near.inputs, grad)
    for name, actual in gradients(out, s.inputs, grad).items():
        assert actual.dtype == getattr(s.inputs, name).dtype
        assert torch.equal(actual.to(expected[name].dtype), expected[name]), name


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
def test_one_compilation(kind, device):
    torch._dynamo.reset()
    problem = Problem(100, 8, 2, 32, 48, torch.float32)
    s = differentiable(problem, kind, device, ("w1", "w2"))
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(s.kernel.apply, fullgraph=True, dynamic=True, backend=counter)
    with torch.fx.experimental._config.patch(backed_size_oblivious=True):
        for number, tokens in enumerate((7, 5, 100)):
            part = s.arguments()
            for name in ("hidden_states", "topk_weights", "topk_ids"):
                part[name] = part[name][:tokens].detach().clone()
            asked = [part["hidden_states"].requires_grad_(), s.inputs.w1, s.inputs.w2]
            asked.append(part["topk_weights"].requires_grad_())
            with torch.compiler.set_stance("fail_on_recompile" if number else "default"):
                found = torch.autograd.grad(run(**part).square().sum(), asked)
            near = torch.autograd.grad(s.kernel.apply(**part).square().sum(), asked)
            for a, b in zip(found, near, strict=True):
                assert torch.equal(a, b)
    assert counter.frame_count == 1


def refused(kernel, s, text):
    out = kernel.apply(**s.arguments())
    with pytest.raises(NotImplementedError, match=text):
        out.sum().backward()


class Doubled(moe_ops.pipeline.TritonExperts):
    """Overrides ``apply``, so what the base class differentiates is another function."""

    def apply(self, *arguments, **keywords):
        """Twice the result."""
        return super().apply(*arguments, **keywords) * 2


def test_what_has_none_is_named(device):
    s = differentiable(PROBLEM, moe_ops.pipeline.TritonExperts, device)
    prepare, experts = s.kernel.prepare_finalize, s.kernel.fused_experts
    doubled = Doubled(experts.moe_config, experts.quant_config)
    refused(moe_ops.FusedMoEKernel(prepare, doubled), s, "fused_experts must have .*, got Doubled")
    beside = moe_ops.pipeline.AsyncPrepareAndFinalize(prepare)
    assert beside.has_gradients()
    prepare.has_gradients = lambda: False
    text = "prepare_finalize must have .*, got AsyncPrepareAndFinalize"
    refused(moe_ops.FusedMoEKernel(beside, experts), s, text)
    del prepare.has_gradients
    given = s.arguments(hidden_states=s.inputs.hidden_states.detach())
    out = moe_ops.FusedMoEKernel(prepare, experts, inplace=True).apply(**given)
    with pytest.raises(NotImplementedError, match="inplace must be False"):
        out.sum().backward()
    frozen = setup(PROBLEM.with_(scheme="int8_channel"), moe_ops.pipeline.TritonExperts, device)
    frozen.config.w1_scale.requires_grad_()
    with pytest.raises(NotImplementedError, match="quantized weights and their scales must not"):
        frozen.apply().sum().backward()


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
def test_one_scale_of_all_tokens(kind, device):
    """Experts would quantize other rows together than prepare does."""
    options = {} if kind in BATCHES else {"chunk_size": 4}
    problem = PROBLEM.with_(scheme="fp8_tensor")
    s = differentiable(problem, kind, device, ("hidden_states",), **options)
    refused(s.kernel, s, "must not have one scale for all tokens, .*got fp8_tensor")


class OneWay(moe_ops.pipeline.AllGatherPrepareAndFinalize):
    """An exchange that cannot send gradients of results."""

    def has_gradients(self):
        """False."""
        return False


@pytest.mark.parametrize(
    ("kind", "scheme", "text"),
    [
        (OneWay, "unquantized", "got OneWay"),
        (
            moe_ops.pipeline.AllGatherPrepareAndFinalize,
            "fp8_tensor",
            "must not have one scale for all tokens.*got fp8_tensor",
        ),
    ],
)
def test_exchanges_that_have_none(kind, scheme, text):
    """Without ranks: tokens arrive as they are."""
    part = kind(RankGroup(2))
    s = setup(PROBLEM.with_(scheme=scheme), moe_ops.pipeline.TritonExperts)
    kernel = moe_ops.FusedMoEKernel(part, s.kernel.fused_experts)
    x = s.inputs.hidden_states.requires_grad_()
    arrived = PrepareResult(x.detach(), None, None, None, None)
    _, rows = kernel.run_experts(Call(**s.arguments()), Pending(None, lambda: arrived))
    with pytest.raises(NotImplementedError, match=text):
        rows.sum().backward()
