"""FusedMoE: the module, and how much memory a call takes."""

import copy
import pickle
import warnings

import pytest
import torch
from live_memory import allocator_peaks

import moe_ops
from moe_ops.testing import Problem, call, make_inputs

E, K, H, I = 8, 2, 32, 24  # noqa: E741


def make_layer(device="cpu", **changes):
    layer = moe_ops.FusedMoE(E, K, H, I, device=device, **changes)
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return layer


def batch(device, tokens=9):
    g = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, H, generator=g).to(device)
    return x, torch.randn(tokens, E, generator=g).to(device)


@pytest.mark.kernel
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("activation", ["silu", "relu2_no_mul", moe_ops.Activation("situ", beta=2)])
def test_forward_is_routing_and_experts(has_bias, activation, device):
    layer = make_layer(
        device, has_bias=has_bias, activation=activation, scoring_func="sigmoid",
        routed_scaling_factor=2.5, apply_router_weight_on_input=True,
    )  # fmt: skip
    x, logits = batch(device)
    weights, ids = moe_ops.fused_topk(
        x, logits, K, True, scoring_func="sigmoid", routed_scaling_factor=2.5
    )
    expected = moe_ops.fused_experts(
        x, layer.w13_weight, layer.w2_weight, weights, ids, activation=activation,
        w1_bias=layer.w13_bias, w2_bias=layer.w2_bias, apply_router_weight_on_input=True,
    )  # fmt: skip
    assert torch.equal(layer(x, logits), expected)
    folded = layer(x.view(3, 3, H), logits.view(3, 3, E))
    assert torch.equal(folded, expected.view(3, 3, H))


def test_custom_routing_and_correction_bias(device):
    def always_last(hidden_states, logits, k, renormalize):
        ids = torch.full((logits.shape[0], k), E - 1, device=logits.device)
        return torch.full(ids.shape, 0.5, device=logits.device, dtype=torch.bfloat16), ids

    x, logits = batch(device)
    custom = make_layer(device, custom_routing_function=always_last)
    bias = torch.zeros(E, device=device)
    bias[E - 1] = 100.0
    biased = make_layer(device, e_score_correction_bias=bias)
    assert (biased.route(x, logits)[1][:, 0] == E - 1).all()
    assert custom(x, logits).shape == x.shape


def test_the_correction_bias_stays_float32(device):
    bias = torch.linspace(0, 1e-3, E)
    layer = make_layer("cpu", e_score_correction_bias=bias).to(device).to(torch.bfloat16)
    assert layer.w13_weight.dtype == torch.bfloat16
    assert torch.equal(layer.e_score_correction_bias.cpu(), bias)
    x, logits = batch(device)
    assert layer(x.bfloat16(), logits).dtype == torch.bfloat16


def test_copies_pickles_and_state(device):
    layer = make_layer(device, has_bias=True)
    x, logits = batch(device)
    expected = layer(x, logits)
    other = moe_ops.FusedMoE(E, K, H, I, device=device, has_bias=True)
    other.load_state_dict(layer.state_dict())
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), other):
        assert torch.equal(twin(x, logits), expected)
    assert layer.to(torch.bfloat16).w13_weight.dtype == torch.bfloat16
    assert layer(x.bfloat16(), logits).dtype == torch.bfloat16
    assert "num_experts=8, top_k=2" in repr(layer)


def test_no_warning_and_no_grad_needed():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_layer()(*batch("cpu"))


@pytest.mark.parametrize(
    ("arguments", "changes", "message"),
    [
        ((4, 5, H, I), {}, "top_k must be between 1 and the 4 experts, got 5"),
        ((4, 2, H, I), {"scoring_func": "tanh"}, "scoring_func must be one of"),
        ((4, 2, H, I), {"activation": "tanh"}, "activation must be one of"),
    ],
)
def test_errors(arguments, changes, message):
    with pytest.raises(ValueError, match=message):
        moe_ops.FusedMoE(*arguments, **changes)


def test_workspace_grows_with_what_is_allocated():
    """h and y together, then y and the output: never all three, and the plan."""
    T, dtype = 1024, torch.bfloat16
    sizes, cpu = (2048, 768, 128, 8, dtype), {"device": "cpu"}
    tall = moe_ops.workspace_nbytes(T, *sizes, **cpu)
    h, y, out = (2 * T * n for n in (8 * 768, 8 * 2048, 2048))
    plan = 4 * (8 * T + 128 * 127) + 4 * (8 * T + 128 * 15) // 16
    assert y + max(h, out) + plan <= tall <= y + max(h, out) + plan + 8 * 512
    assert moe_ops.workspace_nbytes(0, *sizes, **cpu) <= 512
    ungated = moe_ops.workspace_nbytes(T, *sizes, activation="relu2_no_mul", **cpu)
    assert ungated == tall


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 2048), (64, 2048), (4096, 1024), (300, 2880)])
def test_workspace_is_what_the_allocator_sees(tokens, hidden):
    problem = Problem(tokens, 32, 4, hidden, 768, torch.bfloat16)
    inputs = make_inputs(problem, "cuda")
    asked, held = allocator_peaks(lambda: call(moe_ops.fused_experts, problem, inputs))
    wanted = moe_ops.workspace_nbytes(tokens, hidden, 768, 32, 4, torch.bfloat16)
    assert 0.98 * asked <= wanted <= 1.02 * held
