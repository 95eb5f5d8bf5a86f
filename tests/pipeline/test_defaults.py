"""Results do not depend on PyTorch's default dtype and default device, which callers change."""

from contextlib import contextmanager

import pytest
import torch
from operator_samples import COPIED, cached_samples, keywords, outputs, overload
from table_items import every_row
from torch.utils._pytree import tree_leaves

import moe_ops
from moe_ops.testing import Problem, bounded_oracle, make_inputs, oracle, quantize_inputs

E, K, H, I = 4, 2, 128, 128  # noqa: E741


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


DEFAULTS = {
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float64": lambda: default_dtype(torch.float64),
    "meta": lambda: torch.device("meta"),
}
"""What transformers and vLLM set while they make a model, and what users may leave set."""


@pytest.fixture(params=DEFAULTS)
def default(request):
    return DEFAULTS[request.param]


def assert_same(actual, expected):
    for x, y in zip(tree_leaves(actual), tree_leaves(expected), strict=True):
        if not isinstance(x, torch.Tensor):
            assert x == y
            continue
        assert (x.dtype, x.device, x.shape) == (y.dtype, y.device, y.shape)
        assert torch.equal(x.reshape(-1).view(torch.uint8), y.reshape(-1).view(torch.uint8))


@every_row("qualified", COPIED)
def test_operators(qualified, default):
    for arguments in cached_samples("cpu")[qualified]:

        def run(arguments=arguments, context=default):
            # What an operator writes to is this call's own.
            own = [x.clone() if isinstance(x, torch.Tensor) else x for x in arguments]
            written = keywords(qualified, own)
            with context():
                result = overload(qualified)(*own, **written)
            return own, written, outputs(result)

        assert_same(run(), run(context=torch.no_grad))


def test_quantized_weights(default):
    w = torch.randn(E, 2 * I, H, generator=torch.Generator().manual_seed(0))
    for scheme in moe_ops.SCHEMES.values():
        if scheme.weight is None:
            continue
        q = moe_ops.quantize_weight(w, scheme)
        expected = (q, moe_ops.dequantize_weight(q, scheme))
        with default():
            actual = moe_ops.quantize_weight(w, scheme)
            assert_same((actual, moe_ops.dequantize_weight(q, scheme)), expected)


def test_workspaces(default):
    for scheme in moe_ops.SCHEMES:
        sizes = (16, H, I, E, K, torch.bfloat16)
        expected = moe_ops.workspace_nbytes(*sizes, scheme=scheme)
        with default():
            assert moe_ops.workspace_nbytes(*sizes, scheme=scheme) == expected, scheme


def batch():
    g = torch.Generator().manual_seed(0)
    return torch.randn(9, H, generator=g).bfloat16(), torch.randn(9, E, generator=g)


def new_layer():
    layer = moe_ops.FusedMoE(E, K, H, I, device="cpu", params_dtype=torch.bfloat16)
    g = torch.Generator().manual_seed(0)
    for p in layer.parameters():
        p.data.normal_(0, 0.1, generator=g)
    return layer.requires_grad_(False)


MADE = {
    "offloaded": lambda layer: moe_ops.offload_(layer, resident=3, progress=False),
    "calibrated": lambda layer: moe_ops.quantize_(
        layer, "nvfp4", calibrate=lambda layer: layer(*x_and_logits), progress=False
    ),
    "warmed": lambda layer: [layer.warmup([1, 3]), layer][1],
}
x_and_logits = batch()


@every_row("change", MADE)
def test_layers(change, default):
    expected = MADE[change](new_layer())
    with default():
        actual = MADE[change](new_layer())
        assert_same(actual.state_dict(), expected.state_dict())
        result = actual(*x_and_logits)
    assert_same(result, expected(*x_and_logits))


def test_simulations_and_problems(default):
    def balance():
        return moe_ops.parallel.simulate_balance(16, 8, 2, 4, 2)

    def problem():
        problem = Problem(5, E, K, H, I, torch.float32, routing="holes", scheme="fp8_tensor_static")
        exact = quantize_inputs(problem, make_inputs(problem)).exact
        return exact, oracle(problem, exact), bounded_oracle(problem, exact).value

    expected = balance(), problem()
    with default():
        assert_same((balance(), problem()), expected)
