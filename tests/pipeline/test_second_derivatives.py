"""A second derivative raises wherever a backward pass is this library's: it is never zero."""

import pytest
import torch
from modular import EXPERTS as KERNELS
from modular import setup
from torch.autograd.functional import hessian, hvp, jacobian, jvp
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

import moe_ops
from moe_ops.routing import adjust_routing, hash_topk, sparsemixer, zero_experts
from moe_ops.training import ExpertLora, expert_lora, load_balance_loss, router_z_loss

T, E, K, H, I, R = 5, 4, 2, 16, 8, 3  # noqa: E741
REFUSED = "second derivatives of .* are not implemented"


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / 2


IDS = torch.tensor([[0, 1], [1, 3], [-1, 2], [3, 0], [2, 1]], dtype=torch.int32)
X, LOGITS, WEIGHTS = random(T, H), random(T, E, seed=1), random(T, K, seed=2).abs()
W1, W2 = random(E, 2 * I, H, seed=3), random(E, H, I, seed=4)
B1, B2 = random(E, 2 * I, seed=5), random(E, H, seed=6)
LORA = [random(1, E, *s, seed=7) for s in ((R, H), (2 * I, R), (R, I), (H, R))]
EXPERTS = (X, W1, W2, WEIGHTS)


def experts(*given, **more):
    x, w1, w2, weights = given[:4]
    if len(given) > 4:
        names = ("w1_bias", "w2_bias")
        biases = dict(zip(names, given[4:], strict=True))
        more["quant_config"] = moe_ops.FusedMoEQuantConfig("unquantized", **biases)
    return moe_ops.fused_experts(x, w1, w2, weights, IDS, **more)


def quantized(scheme):
    """Adapters over frozen weights of a scheme."""
    w1, w2 = (moe_ops.quantize_weight(w, scheme) for w in (W1, W2))
    config = moe_ops.FusedMoEQuantConfig.from_weights(scheme, w1, w2)

    def run(x, weights, *factors):
        lora = ExpertLora(factors[:2], factors[2:])
        given = (x, w1.data, w2.data, weights, IDS)
        return moe_ops.fused_experts(*given, quant_config=config, lora=lora)

    return run, (X, WEIGHTS, *LORA)


def kernel(kind):
    s = setup(moe_ops.testing.Problem(T, E, K, H, I, torch.float32), kind, "cpu")
    names = ("hidden_states", "w1", "w2", "topk_weights")

    def run(*tensors):
        inputs = s.inputs._replace(**dict(zip(names, tensors, strict=True)))
        return s._replace(inputs=inputs).apply()

    return run, [getattr(s.inputs, name) for name in names]


def layer():
    moe = moe_ops.FusedMoE(E, K, H, I, params_dtype=torch.float32)
    values = (W1.view(*moe.w13_weight.shape), W2.view(*moe.w2_weight.shape))
    for p, value in zip(moe.parameters(), values, strict=True):
        p.data.copy_(value)
    names = [n for n, _ in moe.named_parameters()]

    def run(x, logits, *values):
        return torch.func.functional_call(moe, dict(zip(names, values, strict=True)), (x, logits))

    return run, (X, LOGITS, *values)


CASES = {
    "FusedMoE": layer(),
    "fused_experts": (experts, EXPERTS),
    "biases": (experts, (*EXPERTS, B1, B2)),
    "on the input": (lambda *a: experts(*a, apply_router_weight_on_input=True), EXPERTS),
    "fused_moe": (lambda *a: moe_ops.fused_moe(*a, K, True), (X, W1, W2, LOGITS)),
    "adapters over int8": quantized("int8_w8a16"),
    "expert_lora": (lambda x, a, b, s: expert_lora(x, a, b, IDS, None, s),
                    (X, *LORA[:2], torch.ones(1))),
    "fused_topk": (lambda z: moe_ops.fused_topk(X, z, K, False)[0], (LOGITS,)),
    "grouped_topk": (lambda z: moe_ops.grouped_topk(X, z, K, True, 2, 1)[0][:, 0], (LOGITS,)),
    "hash_topk": (lambda z: hash_topk(X, z, torch.arange(T), IDS.long(), False)[0], (LOGITS,)),
    "sparsemixer": (lambda z: sparsemixer(X, z, jitter_eps=0.3)[0], (LOGITS,)),
    "adjust_routing": (lambda w, s: adjust_routing(w, IDS, E, per_expert_scale=s)[0],
                       (WEIGHTS, random(E))),
    "zero_experts": (lambda x, w: zero_experts(x, w, IDS, 2)[2], (X, WEIGHTS)),
}  # fmt: skip
CASES |= {
    kind.__name__: kernel(kind)
    for kind in KERNELS
    if not kind.is_monolithic() and kind.has_gradients()
}
"""Functions by name, with the inputs that they have gradients of."""


def leaves(tensors):
    return [x.clone().requires_grad_() for x in tensors]


def refuses(run, tensors):
    """Whether each gradient that has history raises when it is differentiated."""
    given = leaves(tensors)
    plain = torch.autograd.grad(run(*given).sum(), given)
    found = torch.autograd.grad(run(*given).sum(), given, create_graph=True)
    for a, b in zip(found, plain, strict=True):
        assert torch.equal(a, b) and not b.requires_grad
    kept = [g for g in found if g.requires_grad]
    for g in kept:
        with pytest.raises(NotImplementedError, match=REFUSED):
            torch.autograd.grad(g.sum(), given, allow_unused=True, retain_graph=True)
    return bool(kept)


def test_gradients_have_no_derivative():
    """Whether the result's gradient has history (a square) or not (a sum)."""
    for name, (run, tensors) in CASES.items():
        assert refuses(run, tensors), name
        assert refuses(lambda *a, f=run: f(*a).square(), tensors), name


def test_each_input_alone():
    """With one input that requires grad: also where the others are constants."""
    for name in ("fused_experts", "BatchedTritonExperts", "FusedMoE", "adapters over int8"):
        run, tensors = CASES[name]
        for i, x in enumerate(tensors):
            before, after = tensors[:i], tensors[i + 1 :]
            assert refuses(lambda t, a=before, b=after, f=run: f(*a, t, *b), [x]), (name, i)


def test_transforms_of_autograd():
    """`torch.autograd.functional`, one row at a time and vectorized; the first derivative works."""
    run = lambda x: experts(x, *EXPERTS[1:])  # noqa: E731
    total = lambda x: run(x).sum()  # noqa: E731
    expected = jacobian(run, X)
    for vectorize in (False, True):
        first = jacobian(run, X.clone().requires_grad_(), create_graph=True, vectorize=vectorize)
        torch.testing.assert_close(first, expected)
        with pytest.raises(NotImplementedError, match=REFUSED):
            first.sum().backward()
    x = X.clone().requires_grad_()
    y, basis = run(x), torch.eye(T * H).view(-1, T, H)
    row = lambda v: torch.autograd.grad(y, x, v, retain_graph=True, create_graph=True)[0]  # noqa: E731
    rows = torch.func.vmap(row)(basis)
    torch.testing.assert_close(rows.view(T, H, T, H), expected)
    with pytest.raises(NotImplementedError, match=REFUSED):
        rows.sum().backward()
    for second in (
        lambda: hessian(total, X),
        lambda: hessian(total, X, vectorize=True),
        lambda: hvp(total, X, X),
        lambda: jvp(run, X, X),  # differentiates a gradient by the gradient that it is given
    ):
        with pytest.raises(NotImplementedError, match=REFUSED):
            second()


def test_saved_tensors_that_are_packed():
    """Checkpoints and hooks give the saved tensors back once, with their history."""
    run, tensors = CASES["fused_experts"]
    assert refuses(lambda *a: checkpoint(run, *a, use_reentrant=False), tensors)
    with save_on_cpu():
        assert refuses(run, tensors)


def test_compiled():
    """AOTAutograd refuses in its own words, for every backend that uses it."""
    run, tensors = CASES["fused_experts"]
    given = leaves(tensors)
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    plain = torch.autograd.grad(run(*given).sum(), given)
    found = torch.autograd.grad(compiled(*given).sum(), given, create_graph=True)
    for a, b in zip(found, plain, strict=True):
        torch.testing.assert_close(a, b)
        with pytest.raises(RuntimeError, match="does not currently support double backward"):
            torch.autograd.grad(a.sum(), given, allow_unused=True, retain_graph=True)


def test_losses_have_second_derivatives():
    """Losses of routers are plain PyTorch: theirs is right."""
    ids = IDS.clamp(min=0)
    for loss in (lambda z: load_balance_loss(z, ids), router_z_loss):
        assert torch.autograd.gradgradcheck(
            lambda z, f=loss: f(z.float()).double(), LOGITS.double().requires_grad_(),
            eps=1e-2, atol=1e-3, rtol=1e-2,
        )  # fmt: skip
