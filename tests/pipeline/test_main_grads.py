"""Gradients of weights that backward passes add to float32 main gradients."""

import pytest
import torch
from differentiable_layers import FLOAT_INPUTS, gradients, leaves
from graphs import capture
from modular import setup
from table_items import every_row
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import moe_ops
from moe_ops.pipeline import BatchedTritonExperts, GroupedGemmExperts, TritonExperts
from moe_ops.testing import Problem, call, make_inputs
from moe_ops.training import with_main_grad

E, K, H, I = 8, 2, 32, 24  # noqa: E741
WEIGHTS = ("w1", "w2", "w1_bias", "w2_bias")
OTHERS = tuple(name for name in FLOAT_INPUTS if name not in WEIGHTS)
PROBLEM = Problem(40, E, K, H, I, torch.bfloat16, has_bias=True, routing="holes")


def grad_of(problem, device, seed=5):
    g = torch.Generator().manual_seed(seed)
    grad = torch.randn(problem.num_tokens, problem.hidden_size, generator=g)
    return grad.to(device, problem.dtype)


def zeros(inputs, fill=0.0):
    return {n: torch.full_like(getattr(inputs, n), fill, dtype=torch.float32) for n in WEIGHTS}


def joined(inputs, mains):
    """The inputs of a call that adds the gradients of weights to ``mains``."""
    return inputs._replace(**{n: with_main_grad(getattr(inputs, n), mains[n]) for n in mains})


def step(problem, inputs, mains, grad):
    """A backward pass; returns the gradients that are not added."""
    call(moe_ops.fused_experts, problem, joined(inputs, mains)).backward(grad)
    assert all(getattr(inputs, n).grad is None for n in mains)
    found = {n: getattr(inputs, n).grad for n in OTHERS}
    for n in OTHERS:
        getattr(inputs, n).grad = None
    return found


def sums_of(problem, inputs, grad):
    """The float32 sums of one backward pass."""
    mains = zeros(inputs)
    step(problem, inputs, mains, grad)
    return mains


def idle(inputs):
    """Which experts have no slot."""
    experts = torch.arange(E, device=inputs.topk_ids.device)
    return ~(inputs.topk_ids[..., None] == experts).flatten(0, 1).any(0)


@pytest.mark.kernel
@pytest.mark.parametrize("on_input", [False, True])
@pytest.mark.parametrize(("num_tokens", "routing"), [(1, "uniform"), (40, "holes")])
def test_sums_are_rounded_by_the_addition_alone(num_tokens, routing, on_input, device):
    """With a plan and without one; the rounded sums are the gradients of a call without them."""
    problem = PROBLEM.with_(num_tokens=num_tokens, on_input=on_input, routing=routing)
    inputs, grad = leaves(make_inputs(problem, device)), grad_of(problem, device)
    inputs.topk_ids[inputs.topk_ids == 3] = -1
    plain = gradients(call(moe_ops.fused_experts, problem, inputs), inputs, grad)
    sums = sums_of(problem, inputs, grad)
    for name, total in sums.items():
        assert torch.equal(total.to(problem.dtype), plain[name]), name
        assert name.endswith("bias") or not torch.equal(total, plain[name].float()), name
    starts = {n: torch.randn_like(x) for n, x in sums.items()}
    mains = {n: x.clone() for n, x in starts.items()}
    without = idle(inputs)
    assert without[3] and not without.all()
    for name in ("w1", "w2"):
        mains[name][without] = torch.nan  # never read
    others = step(problem, inputs, mains, grad)
    for name, total in mains.items():
        used = slice(None) if name.endswith("bias") else ~without
        assert torch.equal(total[used], (starts[name] + sums[name])[used]), name
        assert total[~used].isnan().all() if name in ("w1", "w2") else True
    assert all(torch.equal(others[n], plain[n]) for n in OTHERS)


def test_the_second_weight_alone(device):
    """Nothing goes through it, so the activation is computed without its derivative."""
    inputs, grad = leaves(make_inputs(PROBLEM, device), ("w2",)), grad_of(PROBLEM, device)
    plain = gradients(call(moe_ops.fused_experts, PROBLEM, inputs), inputs, grad)["w2"]
    mains = {"w2": torch.zeros_like(plain, dtype=torch.float32)}
    call(moe_ops.fused_experts, PROBLEM, joined(inputs, mains)).backward(grad)
    assert torch.equal(mains["w2"].to(PROBLEM.dtype), plain) and inputs.w2.grad is None
    assert not torch.equal(mains["w2"], plain.float())


def test_micro_batches(device):
    """Both forward passes may come before both backward passes."""
    inputs = leaves(make_inputs(PROBLEM, device))
    grads = [grad_of(PROBLEM, device, seed) for seed in range(2)]
    first, second = (sums_of(PROBLEM, inputs, grad) for grad in grads)
    mains = zeros(inputs)
    outs = [call(moe_ops.fused_experts, PROBLEM, joined(inputs, mains)) for _ in grads]
    for out, grad in zip(outs, grads, strict=True):
        out.backward(grad)
    for name, total in mains.items():
        assert torch.equal(total, first[name] + second[name]), name
        assert not torch.equal(first[name], second[name])


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_add_once(use_reentrant, device):
    inputs, grad = leaves(make_inputs(PROBLEM, device)), grad_of(PROBLEM, device)
    mains = zeros(inputs)

    def layer(x):
        given = joined(inputs, mains)
        return call(moe_ops.fused_experts, PROBLEM, given._replace(hidden_states=x))

    checkpoint(layer, inputs.hidden_states, use_reentrant=use_reentrant).backward(grad)
    for name, total in sums_of(PROBLEM, inputs, grad).items():
        assert torch.equal(total, mains[name]), name


@pytest.mark.parametrize("kind", [TritonExperts, GroupedGemmExperts, BatchedTritonExperts])
def test_modular_kernels(kind, device):
    """Rows in any order of the slots; the sums are rounded to the weights' dtype nowhere."""
    s = setup(PROBLEM.with_(has_bias=False), kind, device)
    inputs, grad = leaves(s.inputs, ("w1", "w2")), grad_of(PROBLEM, device)
    plain = gradients(s._replace(inputs=inputs).apply(), inputs, grad)
    mains = {n: torch.zeros_like(getattr(inputs, n)).float() for n in ("w1", "w2")}
    s._replace(inputs=joined(inputs, mains)).apply().backward(grad)
    for name, total in mains.items():
        assert torch.equal(total.to(PROBLEM.dtype), plain[name]), name
        assert not torch.equal(total, plain[name].float()), name


def test_autocast(device):
    """Weights that are cast keep their main gradients, to which float32 sums are added."""
    inputs, grad = make_inputs(PROBLEM, device), grad_of(PROBLEM, device)
    sums = sums_of(PROBLEM, leaves(inputs), grad)
    wide = leaves(inputs._replace(w1=inputs.w1.float(), w2=inputs.w2.float()))
    mains = zeros(wide)
    with torch.autocast(device, torch.bfloat16):
        out = call(moe_ops.fused_experts, PROBLEM, joined(wide, mains))
    out.backward(grad)
    assert all(torch.equal(mains[n], sums[n]) for n in WEIGHTS)


def test_weights_that_experts_do_not_read_themselves(device):
    """A part of a weight, and a use elsewhere: added too, after rounding to the weight's dtype."""
    inputs, grad = leaves(make_inputs(PROBLEM, device)), grad_of(PROBLEM, device)
    plain = gradients(call(moe_ops.fused_experts, PROBLEM, inputs), inputs, grad)
    mains = {"w2": zeros(inputs)["w2"]}
    with_main_grad(inputs.w2, mains["w2"]).float().sum().backward()
    assert (mains["w2"] == 1).all()
    given = joined(inputs, mains)
    call(moe_ops.fused_experts, PROBLEM, given._replace(w2=given.w2[:])).backward(grad)
    assert torch.equal(mains["w2"], 1 + plain["w2"].float())
    assert inputs.w2.grad is None


def test_without_gradients(device):
    inputs = leaves(make_inputs(PROBLEM, device))
    mains = zeros(inputs)
    with torch.no_grad():
        assert joined(inputs, mains).w1 is inputs.w1
    w1 = with_main_grad(inputs.w1, mains["w1"])
    w1.float().square().sum().backward(create_graph=True)
    assert mains["w1"].any() and not mains["w1"].requires_grad


WEIGHT = torch.zeros(3, 8, 4, requires_grad=True)


@every_row(
    ("weight", "main_grad", "error", "message"),
    [
        (WEIGHT, None, TypeError, "main_grad must be a Tensor, got NoneType"),
        (WEIGHT, torch.zeros(3, 8, 4).bfloat16(), TypeError, "dtype of .*float32.*, got .*bfloat"),
        (WEIGHT, torch.zeros(3, 8, 5), ValueError, r"the shape of weight, \(3, 8, 4\), got"),
        (WEIGHT, torch.zeros(3, 8, 4, device="meta"), ValueError, "main_grad must be on the dev"),
        (WEIGHT, torch.zeros(3, 4, 8).mT, ValueError, "main_grad must be contiguous, got strides"),
        (WEIGHT, torch.ones_like(WEIGHT, requires_grad=True), ValueError, "must not require grad"),
        (WEIGHT, WEIGHT.detach(), ValueError, "must not share memory with weight"),
        (WEIGHT.detach(), torch.zeros(3, 8, 4), ValueError, "weight must require grad"),
        (WEIGHT.detach().int(), torch.zeros(3, 8, 4), TypeError, "weight must have a dtype"),
    ],
)
def test_what_is_refused(weight, main_grad, error, message):
    with pytest.raises(error, match=message):
        with_main_grad(weight, main_grad)


def test_memory_that_is_shared():
    """One buffer may have the weight and its main gradient side by side."""
    buffer = torch.zeros(2 * WEIGHT.numel())
    halves = [x.view(WEIGHT.shape) for x in buffer.chunk(2)]
    assert with_main_grad(halves[0].requires_grad_(), halves[1].detach()) is not None
    moved = buffer[WEIGHT.numel() - 1 : -1].view(WEIGHT.shape)
    for main_grad in (moved, buffer[: WEIGHT.numel()].view(WEIGHT.shape)):
        with pytest.raises(ValueError, match="must not share memory with weight"):
            with_main_grad(halves[0].detach().requires_grad_(), main_grad.detach())


def test_transforms_are_refused():
    def loss(w):
        return with_main_grad(w, torch.zeros(3)).sum()

    with pytest.raises(NotImplementedError, match="with_main_grad does not take torch.func.grad"):
        torch.func.grad(loss)(torch.ones(3, requires_grad=True))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled(backend, device):
    """One graph for all numbers of tokens, with the bits of eager calls, in any order of passes."""
    torch._dynamo.reset()
    counter, mains = CompileCounterWithBackend(backend), []

    def layer(x, inputs, mains):
        given = joined(inputs._replace(hidden_states=x * 2), mains)
        return moe_ops.fused_experts(
            *given[:3], given.topk_weights[: len(x)], given.topk_ids[: len(x)],
            w1_bias=given.w1_bias, w2_bias=given.w2_bias,
        )  # fmt: skip

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    for run in (layer, compiled):
        inputs = leaves(make_inputs(PROBLEM, device), WEIGHTS)
        mains.append(zeros(inputs))
        for tokens in ((7,), (40, 33)):
            outs = [run(inputs.hidden_states[:count], inputs, mains[-1]) for count in tokens]
            for out in outs:
                out.float().square().sum().backward()
        assert all(getattr(inputs, n).grad is None for n in WEIGHTS)
    for name, total in mains[0].items():
        assert total.any() and torch.equal(total, mains[1][name]), name
    assert counter.frame_count == 1


@pytest.mark.gpu
def test_captured():
    """Each replay adds the sums of a backward pass to the same memory."""
    problem = PROBLEM.with_(num_tokens=256, hidden_size=128, intermediate_size=64)
    inputs, grad = leaves(make_inputs(problem, "cuda"), WEIGHTS), grad_of(problem, "cuda")
    names, mains = [*WEIGHTS], zeros(inputs)
    sums = sums_of(problem, leaves(make_inputs(problem, "cuda")), grad)

    def run():
        call(moe_ops.fused_experts, problem, joined(inputs, mains)).backward(grad)

    with torch.cuda.stream(torch.cuda.Stream()):
        run()
    torch.cuda.synchronize()
    graph, _ = capture(run)
    for name in names:
        mains[name].zero_()
    expected = zeros(inputs)
    for _ in range(3):
        graph.replay()
        for name in names:
            expected[name] += sums[name]
            assert torch.equal(mains[name], expected[name]), name
