"""`FusedMoE` whose backward passes add to the ``main_grad`` of its parameters."""

import pytest
import torch
from pairwise import half_exhaustive
from small_layers import E, H, I, K, batch, make
from table_items import every_row

import moe_ops
from moe_ops.training import ExpertLora

NAMES = ("w13_weight", "w2_weight", "w13_bias", "w2_bias")


def adding(**options):
    """A layer whose parameters of experts have main gradients."""
    layer = make(fuse_wgrad_accumulation=True, **options)
    for p in layer.parameters():
        p.main_grad = torch.zeros_like(p, dtype=torch.float32)
    return layer


def gradients(layer):
    """The gradients of experts' parameters, and the others; each parameter has one kind."""
    found = {}
    for name, p in layer.named_parameters():
        main = getattr(p, "main_grad", None)
        adds = name in NAMES and main is not None
        assert (p.grad is None) == adds, name
        found[name] = main if adds else p.grad
    return found


WAYS = {
    "plain": {},
    "biases": {"has_bias": True},
    "chunks": {"chunk_size": 4, "has_bias": True},
    "on the input": {"apply_router_weight_on_input": True},
    "gated shared": {"n_shared_experts": 2, "shared_expert_gate": True},
    "invariant": {"batch_invariant": True},
}


@pytest.mark.parametrize(
    ("way", "compiled"), half_exhaustive(["plain", "biases", "chunks"], [False, True])
)
def test_two_micro_batches(way, compiled):
    """The optimizer finds the sum in ``main_grad``."""
    layer, same = adding(**WAYS[way]), make(**WAYS[way])
    run = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    for number in (1, 2):
        x, logits = batch()
        run(x * number, logits).square().sum().backward()
        same(x * number, logits).square().sum().backward()
    for name, found in gradients(layer).items():
        torch.testing.assert_close(found, gradients(same)[name])


@pytest.mark.parametrize("way", WAYS)
def test_bits(way):
    """Float32 weights: what is added are the bits of the gradient."""
    layer, same = adding(**WAYS[way]), make(**WAYS[way])
    for each in (layer, same):
        each(*batch()).square().sum().backward()
    expected = gradients(same)
    assert len(expected) == len(gradients(layer)) > 1
    for name, found in gradients(layer).items():
        assert torch.equal(found, expected[name]) or "chunk_size" in WAYS[way], name


def test_an_optimizer_of_main_gradients():
    """As Megatron's: float32 copies of the weights are what the optimizer steps."""
    layer = adding(params_dtype=torch.bfloat16)
    masters = [p.detach().float().requires_grad_() for p in layer.parameters()]
    optimizer, losses = torch.optim.Adam(masters, lr=1e-2), []
    x, logits = (t.bfloat16() for t in batch())
    for _ in range(15):
        for _ in range(2):
            loss = (layer(x, logits) - x).float().square().mean() / 2
            loss.backward()
        for master, p in zip(masters, layer.parameters(), strict=True):
            master.grad = p.main_grad
        optimizer.step()
        for master, p in zip(masters, layer.parameters(), strict=True):
            p.data.copy_(master)
            p.main_grad.zero_()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


def test_what_is_frozen_adds_nothing():
    """Also below adapters, which keep gradients of their own."""
    layer = make(fuse_wgrad_accumulation=True)
    layer.w2_weight.requires_grad_(False)
    layer.w13_weight.main_grad = torch.zeros_like(layer.w13_weight)
    layer(*batch()).sum().backward()
    assert layer.w13_weight.main_grad.any() and layer.w2_weight.grad is None

    layer = make(fuse_wgrad_accumulation=True).requires_grad_(False)
    a, b = torch.randn(1, E, 4, H, requires_grad=True), torch.randn(1, E, 2 * I, 4) / 8
    layer(*batch(), lora=ExpertLora((a, b), None)).sum().backward()
    assert a.grad.any()
    with torch.no_grad():
        adding()(*batch())
        make(fuse_wgrad_accumulation=True)(*batch())


def test_a_kernel_that_was_set():
    """Weights add through it; its biases are its own."""
    layer, same = adding(), make()
    for each in (layer, same):
        experts = moe_ops.pipeline.TritonExperts(
            each.moe_config, moe_ops.FusedMoEQuantConfig("unquantized")
        )
        alone = moe_ops.pipeline.MoEPrepareAndFinalizeNoEP()
        each.kernel = moe_ops.FusedMoEKernel(alone, experts)
        each(*batch()).square().sum().backward()
    for name, found in gradients(layer).items():
        assert torch.equal(found, gradients(same)[name]), name
    biased = adding(has_bias=True)
    biases = {"w1_bias": biased.w13_bias, "w2_bias": biased.w2_bias}
    config = moe_ops.FusedMoEQuantConfig("unquantized", **biases)
    biased.kernel = moe_ops.select_kernel(biased.moe_config, config)
    with pytest.raises(NotImplementedError, match="w13_bias and w2_bias must not require grad"):
        biased(*batch())


@every_row(
    ("options", "message"),
    [
        ({"scheme": "fp8_block128"}, "scheme must be left out with fuse_wgrad.*got fp8_block128"),
        ({"enable_eplb": True}, "enable_eplb must be left out with fuse_wgrad_accumulation"),
        ({"resident_experts": 2}, "resident_experts must be left out with fuse_wgrad_accum"),
    ],
)
def test_options_that_contradict(options, message):
    with pytest.raises(NotImplementedError, match=message):
        moe_ops.FusedMoE(E, K, 128, 128, fuse_wgrad_accumulation=True, **options)


@every_row(
    ("main_grad", "error", "message"),
    [
        (None, TypeError, r"w2_weight.main_grad must be a Tensor, got NoneType"),
        (torch.zeros(E, H, I).half(), TypeError, r"w2_weight.main_grad must have a dtype of"),
        (torch.zeros(E, I, H), ValueError, r"w2_weight.main_grad must have the shape of w2_weight"),
    ],
)
def test_main_gradients_that_are_refused(main_grad, error, message):
    """Before anything runs, so that no other main gradient has changed."""
    layer = adding()
    layer.w2_weight.main_grad = main_grad
    with pytest.raises(error, match=message):
        layer(*batch())


def test_the_option_is_shown():
    assert "fuse_wgrad_accumulation=True" in repr(adding())
    assert "fuse_wgrad_accumulation" not in repr(make())
    with pytest.raises(TypeError, match="fuse_wgrad_accumulation must be a bool"):
        make(fuse_wgrad_accumulation=1)
