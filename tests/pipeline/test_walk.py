"""How many functions of the library one eager call on the CPU enters: its walk to the operators."""

import sys

import pytest
import torch
from conftest import HAS_CUDA, INTERPRETED

import moe_ops

T, E, K, H, I = 33, 8, 2, 256, 128  # noqa: E741


def weights(scheme):
    w1, w2 = torch.randn(E, 2 * I, H).bfloat16() / 16, torch.randn(E, H, I).bfloat16() / 11
    if scheme == "unquantized":
        return w1, w2, None
    q1, q2 = (moe_ops.quantize_weight(w, scheme) for w in (w1, w2))
    return q1.data, q2.data, moe_ops.FusedMoEQuantConfig.from_weights(scheme, q1, q2)


def call_of(kind):
    x, logits = torch.randn(T, H).bfloat16(), torch.randn(T, E)
    if kind == "layer":
        layer = moe_ops.FusedMoE(E, K, H, I, params_dtype=torch.bfloat16)
        for p in layer.parameters():
            p.data.normal_(0, 0.05)
        return lambda: layer(x, logits.bfloat16())
    w1, w2, config = weights(kind)
    return lambda: moe_ops.fused_moe(x, w1, w2, logits, K, quant_config=config)


def entered(call):
    """Calls of functions outside of references and fakes, and of what those call; and the most of
    them that are under way when an operator begins."""
    count, skipping, stack, deepest = 0, 0, [], 0

    def follow(frame, event, _):
        nonlocal count, skipping, deepest
        name = frame.f_code.co_filename
        if event == "return":
            own, skipped = stack.pop() if stack else (False, False)
            skipping -= skipped
        if event != "call":
            return
        skipped = "/reference/" in name or "/fake_impls/" in name
        own = "/moe_ops/" in name and not skipped and not skipping
        count, skipping = count + own, skipping + skipped
        stack.append((own, skipped))
        if own and name.endswith("/moe_ops/ops.py"):
            deepest = max(deepest, sum(mine for mine, _ in stack[:-1]))

    previous = sys.getprofile()
    sys.setprofile(follow)
    try:
        call()
    finally:
        sys.setprofile(previous)
    return count, deepest


@pytest.mark.skipif(HAS_CUDA or INTERPRETED, reason="what the CPU's operators do")
@pytest.mark.parametrize(
    ("kind", "most", "depth"), [("unquantized", 42, 5), ("fp8_block128", 68, 6)]
)
@torch.no_grad()
def test_a_function(kind, most, depth):
    """At the second call; ``depth`` functions lie between the caller and an operator."""
    call = call_of(kind)
    call()
    count, deepest = entered(call)
    assert count <= most and deepest <= depth, (count, deepest)


@pytest.mark.skipif(HAS_CUDA or INTERPRETED, reason="what the CPU's operators do")
@torch.no_grad()
def test_a_layer():
    call = call_of("layer")
    call()
    count, deepest = entered(call)
    assert count <= 60 and deepest <= 10, (count, deepest)
