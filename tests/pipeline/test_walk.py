"""How many functions of the library one eager call on the CPU enters: its walk to the operators."""

import inspect
import re

import pytest
import torch
from conftest import HAS_CUDA, INTERPRETED
from walks import BELOW, E, H, I, K, call_of, followed, own_calls, weights

import moe_ops
from moe_ops.pipeline.forward import forward
from moe_ops.testing import run_ranks


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
        skipped = any(part in name for part in BELOW)
        own = "/moe_ops/" in name and not skipped and not skipping
        count, skipping = count + own, skipping + skipped
        stack.append((own, skipped))
        if own and name.endswith("/moe_ops/ops.py"):
            deepest = max(deepest, sum(mine for mine, _ in stack[:-1]))

    followed(call, follow)
    return count, deepest


@pytest.mark.skipif(HAS_CUDA or INTERPRETED, reason="what the CPU's operators do")
@pytest.mark.parametrize(
    ("kind", "most", "depth"), [("unquantized", 28, 5), ("fp8_block128", 44, 5)]
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
    assert count <= 42 and deepest <= 10, (count, deepest)


STEPS = ("route", "send", "gather", "GEMM", "activate", "GEMM", "combine", "return", "sum")


def test_the_body_reads_in_the_order_of_its_steps():
    """One function of at most 60 lines has all of them, each named where it is."""
    _, _, body = inspect.getsource(forward).rpartition('"""')
    lines = [x for x in body.splitlines() if x.strip() and not x.strip().startswith("#")]
    named = [word for line in lines for word in re.findall(r"\w+", line.partition("  # ")[2])]
    assert tuple(word for word in named if word in STEPS) == STEPS and len(lines) <= 60


def body_entered(call):
    """How often a call enters `forward`, asks for gradients, and checks its arguments."""
    names = own_calls(call)
    doors = sum(name.endswith(": _enter") for name in names)
    return names.count("pipeline/forward.py: forward"), doors, names.count("gradients.py: wanted")


@pytest.mark.skipif(HAS_CUDA or INTERPRETED, reason="one way for every device")
def test_every_forward_steps_into_the_body():
    """Functions, layers of one rank and of many, kernels, and the node with gradients.

    What gradients there are is asked once, also by two ranks that exchange tokens.
    """
    x, logits = torch.randn(5, H).bfloat16(), torch.randn(5, E)
    w1, w2, _ = weights("unquantized")
    topk_weights, topk_ids = moe_ops.fused_topk(x, logits, K, True)
    method = moe_ops.RoutingMethodType.Renormalize
    config = moe_ops.FusedMoEConfig(E, K, H, I, E, "silu", "cpu", method)

    def kernel(experts):
        made = moe_ops.select_kernel(config, "unquantized", experts=experts)
        return lambda: made.apply(x, w1, w2, topk_weights, topk_ids)

    def rank(r, group):
        return body_entered(
            call_of("layer", dp_size=2, dp_rank=r, ep_size=2, ep_rank=r, tp_group=group)
        )

    calls = {
        "fused_moe": lambda: moe_ops.fused_moe(x, w1, w2, logits, K),
        "fused_experts": lambda: moe_ops.fused_experts(x, w1, w2, topk_weights, topk_ids),
        "TritonExperts": kernel(moe_ops.pipeline.TritonExperts),
        "GroupedGemmExperts": kernel(moe_ops.pipeline.GroupedGemmExperts),
        "layer": call_of("layer"),
    }
    with torch.no_grad():
        found = {name: body_entered(call) for name, call in calls.items()}
        found["dp+ep"] = run_ranks(2, rank)[0]
    assert found == dict.fromkeys(found, (1, 1, 0))
    w1.requires_grad_()
    trained = {name: body_entered(call) for name, call in calls.items()}
    trained["dp+ep"] = run_ranks(2, rank)[0]
    # The body is entered for the call, and again by the node of the graph.
    assert trained == dict.fromkeys(found, (2, 1, 1))
