"""A norm of every expert's row before the weighted sum: values, gradients, skipped slots."""

from functools import partial

import pytest
import torch
from activation_formulas import FORMULAS, halves
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import moe_ops
from moe_ops.pipeline import normed_experts as module
from moe_ops.pipeline.fused_experts import expert_rows
from moe_ops.pipeline.gated_experts import gated_experts
from moe_ops.pipeline.normed_experts import normed_experts
from moe_ops.tensors import Routing
from moe_ops.testing import Problem, call, make_inputs, quantize_inputs
from moe_ops.training import ExpertLora

SMALL = Problem(9, 6, 3, 64, 32, has_bias=True, num_local_experts=4, routing="holes")
LEAVES = ("hidden_states", "w1", "w2", "topk_weights", "w1_bias", "w2_bias")


class Norm(nn.Module):
    """Scales, then divides by the root of the mean square, as Muse Spark does."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-0.5, 0.5, width))

    def forward(self, x):
        wide = torch.promote_types(x.dtype, torch.float32)
        out = x.to(wide) * (1 + self.weight).to(wide)
        return (out * torch.rsqrt(out.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def run(problem, inputs, norm, **more):
    x, w1, w2, weights, ids, expert_map, b1, b2 = inputs
    return normed_experts(
        x, w1, w2, Routing(weights, ids, expert_map), norm, activation=problem.activation,
        w1_bias=b1, w2_bias=b2, **more,
    )  # fmt: skip


def with_nan(inputs):
    """Router weights of skipped slots are NaN."""
    local = [i for i, e in enumerate(inputs.expert_map.tolist()) if e >= 0]
    kept = torch.isin(inputs.topk_ids.cpu(), torch.tensor(local)).to(inputs.topk_ids.device)
    return inputs._replace(topk_weights=inputs.topk_weights.masked_fill(~kept, torch.nan)), kept


def exact(problem, inputs, kept, norm):
    """In the dtype of the inputs, slot by slot, in plain PyTorch."""
    x, w1, w2, weights, ids, expert_map, b1, b2 = inputs
    key, out = problem.activation, torch.zeros_like(x)
    for t, j in kept.nonzero().tolist():
        e = int(expert_map[ids[t, j]])
        product = w1[e] @ x[t] + b1[e]
        h = FORMULAS[key](*halves(product[None], key))[0]
        out = out.index_add(0, torch.tensor([t]), weights[t, j] * norm((w2[e] @ h + b2[e])[None]))
    return out


@pytest.mark.kernel
@pytest.mark.parametrize("scheme", ["unquantized", "int8_channel", "int4_w4a16_g32", "fp8_block32"])
def test_without_a_norm_it_is_fused_experts(scheme, device):
    """To the bit, with the passes of inference and with those that have gradients."""
    for tokens, holes in ((1, False), (9, True)):
        problem = SMALL.with_(num_tokens=tokens, scheme=scheme, dtype=torch.bfloat16)
        if not holes:  # the token has experts
            problem = problem.with_(routing="uniform", num_local_experts=None)
        stored = quantize_inputs(problem, make_inputs(problem, device))
        more = {"quant_config": stored.config}
        for grad in (False, True):
            inputs = stored.inputs._replace(hidden_states=stored.inputs.hidden_states.clone())
            inputs.hidden_states.requires_grad_(grad)
            expected = call(moe_ops.fused_experts, problem, inputs, **more)
            found = run(problem, inputs, nn.Identity(), **more)
            assert found.requires_grad == grad
            assert torch.equal(found, expected)


@pytest.mark.parametrize("activation", ["silu", "situ(beta=1.5,linear_beta=2.0)", "relu2_no_mul"])
def test_gradients(activation, device):
    """All inputs' and the norm's, with NaN in whatever skipped slots have."""
    problem = SMALL.with_(activation=activation)
    inputs, kept = with_nan(make_inputs(problem, device))
    norm, found = Norm(64).to(device), {}
    grad = torch.randn(9, 64, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    for dtype, where in ((torch.float32, device), (torch.float64, "cpu")):
        leaves = {k: getattr(inputs, k).to(where, dtype).requires_grad_() for k in LEAVES}
        others = {k: getattr(inputs, k).to(where) for k in ("topk_ids", "expert_map")}
        own, given = Norm(64).to(where, dtype), inputs._replace(**leaves, **others)
        own.load_state_dict(norm.state_dict())
        if dtype == torch.float32:
            out = run(problem, given, own)
        else:
            out = exact(problem, given, kept.cpu(), own)
        wanted = {**leaves, "norm": own.weight}
        gradients = torch.autograd.grad(out, [*wanted.values()], grad.to(where, dtype))
        found[dtype] = out.detach(), *gradients
    with torch.no_grad():
        assert torch.equal(run(problem, inputs, norm), found[torch.float32][0])
    for name, a, b in zip(("out", *LEAVES, "norm"), *found.values(), strict=True):
        a, b = a.cpu().double(), b.nan_to_num()
        assert (a - b).abs().max() <= 1e-5 * b.abs().max(), name
        assert b.any()


def test_rows_of_skipped_slots_are_not_read(device, monkeypatch):
    """They are memory that nothing was written to: no gradient may see it, the norm's either."""
    inputs, kept = with_nan(make_inputs(SMALL, device))
    found = []
    for poison in (0.0, torch.nan):

        def poisoned(*given, number=poison, **named):
            return expert_rows(*given, **named).masked_fill(~kept.view(-1, 1), number)

        monkeypatch.setattr(module, "expert_rows", poisoned)
        norm = Norm(64).to(device)
        leaves = {k: getattr(inputs, k).clone().requires_grad_() for k in LEAVES}
        out = run(SMALL, inputs._replace(**leaves), norm)
        found.append((out, *torch.autograd.grad(out.sum(), [*leaves.values(), norm.weight])))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_adapters(device):
    """Adapters give what merged weights give."""
    problem = SMALL.with_(has_bias=False, num_local_experts=None)
    inputs, norm = make_inputs(problem, device), Norm(64).to(device)
    g = torch.Generator().manual_seed(1)
    pairs = [
        [torch.randn(1, 6, *shape, generator=g).to(device) * 0.2 for shape in ((2, k), (n, 2))]
        for n, k in (inputs.w1.shape[1:], inputs.w2.shape[1:])
    ]
    merged = [w + (b @ a)[0] for w, (a, b) in zip(inputs[1:3], pairs, strict=True)]
    expected = run(problem, inputs._replace(w1=merged[0], w2=merged[1]), norm)
    found = run(problem, inputs, norm, lora=ExpertLora(*map(tuple, pairs)))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_compiled_with_backward(device):
    """One compilation of forward and backward serves other numbers of tokens."""
    torch._dynamo.reset()
    norm, counter = Norm(64).to(device), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend=counter)
    for number, tokens in enumerate((7, 5, 20)):
        problem = SMALL.with_(num_tokens=tokens)
        inputs, found = make_inputs(problem, device), []
        with torch.compiler.set_stance("fail_on_recompile" if number else "default"):
            for function in (compiled, run):
                x = inputs.hidden_states.clone().requires_grad_()
                out = function(SMALL, inputs._replace(hidden_states=x), norm)
                found.append(torch.autograd.grad(out.square().sum(), (x, norm.weight)))
        assert all(map(torch.equal, *found))
    assert counter.frame_count == 1


def test_checkpoints_have_the_same_bits(device):
    """Also those that run the forward pass without grad mode first."""
    inputs, norm = make_inputs(SMALL.with_(dtype=torch.bfloat16), device), Norm(64).to(device)
    norm = norm.bfloat16()
    found = []
    for reentrant in (None, False, True):
        x = inputs.hidden_states.clone().requires_grad_()

        def layer(x):
            return run(SMALL, inputs._replace(hidden_states=x), norm)

        out = layer(x) if reentrant is None else checkpoint(layer, x, use_reentrant=reentrant)
        out.float().square().sum().backward()
        found.append((out, x.grad))
    assert all(
        torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True)
    )


def test_behind_a_gate_of_python(device):
    """`gated_experts` takes a norm, too."""
    inputs, norm = make_inputs(SMALL, device), Norm(64).to(device)
    x, w1, w2, weights, ids, expert_map, b1, b2 = inputs
    with torch.no_grad():
        out = gated_experts(
            x, w1, w2, weights, ids, partial(moe_ops.apply_moe_activation, "silu"), norm=norm,
            expert_map=expert_map, w1_bias=b1, w2_bias=b2,
        )  # fmt: skip
        torch.testing.assert_close(out, run(SMALL, inputs, norm), rtol=1e-4, atol=1e-5)


def test_what_is_refused(device):
    inputs = make_inputs(SMALL, device)
    for norm, match in (
        (lambda rows: rows[:, 1:], r"norm\(rows\).shape\[1\] must be the rows of w2 = 64, got 63"),
        (lambda rows: rows[0], r"norm\(rows\) must have 2 axes"),
    ):
        with pytest.raises(ValueError, match=match):
            run(SMALL, inputs, norm)
    x = inputs.hidden_states.requires_grad_()
    out = run(SMALL, inputs, nn.Identity())
    (first,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives of"):
        first.sum().backward()
    empty = make_inputs(SMALL.with_(num_tokens=0), device)
    assert run(SMALL, empty, Norm(64).to(device)).shape == (0, 64)
