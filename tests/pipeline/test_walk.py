"""How many functions of the library one eager call on the CPU enters: its walk to the operators."""

import pytest
import torch
from conftest import HAS_CUDA, INTERPRETED
from walks import BELOW, call_of, followed


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
