"""What makes compile tests quicker changes nothing that they see."""

from contextlib import nullcontext

import pytest
from conftest import INTERPRETED

if INTERPRETED:
    pytest.skip("compiles kernels: not in the interpreter", allow_module_level=True)
triton = pytest.importorskip("triton")

import aot  # noqa: E402
import quick_compiler  # noqa: E402
from token_layers import Layer  # noqa: E402

from moe_ops.kernels import routing  # noqa: E402
from moe_ops.kernels._hopper import one_token  # noqa: E402

pytestmark = [pytest.mark.aot, pytest.mark.filterwarnings("ignore")]


def launch(empty):
    """A kernel in Triton's language, and one in Gluon's with partitions and nested loops."""
    routing.fused_topk(empty(4096, 256), None, 8, True, "softmax", 1.0)
    Layer(empty, (32, 272, 144, 3), "fp8_channel").rows()


def sources():
    """What Triton makes of the kernels' Python now, whatever its caches have."""
    aot.forget_kernels(routing, one_token)
    kernels = aot.compile_launch(90, launch, until="ttgir")
    assert [k.metadata.name for k in kernels] == ["_fused_topk_kernel", "hopper_token_kernel"]
    return [kernel.asm["source"] for kernel in kernels]


def test_the_code_is_the_same(monkeypatch):
    monkeypatch.setattr(triton.knobs.compilation, "always_compile", True)
    quick = sources()
    monkeypatch.setattr(quick_compiler, "quicker", nullcontext)
    assert sources() == quick


def test_a_part_of_a_kernel_is_not_taken_for_the_whole():
    """Where a test reads no machine code, none is left for a test that does."""

    def small(empty):
        routing.fused_topk(empty(1, 64), None, 2, True, "sigmoid", 1.0)

    (part,), (whole,) = (aot.compile_launch(90, small, until=stage) for stage in ("ttir", ""))
    assert part.hash == whole.hash and part.asm["ttir"] == whole.asm["ttir"]
    assert not part.asm["ttgir"] and whole.asm["ttgir"] and whole.asm["cubin"]
    assert aot.resources(whole, 90)["registers"]
