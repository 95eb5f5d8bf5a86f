"""Routing kernels compiled for every architecture, without a GPU: many experts, every method."""

import pytest
import torch
from conftest import INTERPRETED

if INTERPRETED:
    pytest.skip("compiles kernels: not in the interpreter", allow_module_level=True)
pytest.importorskip("triton")

import aot  # noqa: E402
import aot_launches  # noqa: E402
from stage_launches import launch_adjustments, launch_topk  # noqa: E402

from moe_ops.kernels import routing, routing_adjust
from moe_ops.kernels._routing import grouped_topk  # noqa: E402
from moe_ops.routing import SCORING_FUNCS  # noqa: E402

pytestmark = [pytest.mark.aot, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def no_other_driver():
    aot.forget_kernels(routing, routing_adjust, grouped_topk)


CASES = [(90, 160, 6, 8), *((arch, 4096, 22, 64) for arch in aot_launches.ARCHITECTURES)]


SCORED = [
    pytest.param(*case, s, marks=[pytest.mark.exhaustive] * ((i + (case[1] == 4096)) % 2))
    for i, s in enumerate(SCORING_FUNCS)
    for case in CASES
    if case[0] == 90
] + [(*case, s) for s in SCORING_FUNCS for case in CASES if case[0] != 90]
"""On sm_90 few experts or many with each function, unless everything is compiled."""


@pytest.mark.parametrize(("arch", "experts", "k", "groups", "scoring"), SCORED)
def test_routing_kernels(arch, experts, k, groups, scoring, one_of_two):
    """In turns of scoring functions, one kind of choice has a bias, unless all are compiled."""
    turn = one_of_two([*SCORING_FUNCS].index(scoring))
    kernels = aot.compile_launch(arch, launch_topk(experts, k, groups, scoring, turn))
    aot_launches.check_resources(kernels, arch)
    assert len({kernel.metadata.name for kernel in kernels}) == 3


@pytest.mark.parametrize(("arch", "experts", "k", "groups"), CASES)
def test_other_kernels(arch, experts, k, groups):
    kernels = aot.compile_launch(arch, launch_adjustments(experts, k))
    aot_launches.check_resources(kernels, arch)
    assert len({kernel.metadata.name for kernel in kernels}) == 3


@pytest.mark.parametrize("scoring", SCORING_FUNCS)
@pytest.mark.parametrize(("experts", "maxima"), [(512, 12), (256, 2 * 11)])
def test_many_tokens(experts, maxima, scoring):
    """A maximum is one instruction of a warp, also of four finalists; few registers."""

    def launch(empty):
        vector = None if scoring == "softmax" else empty(experts, dtype=torch.float32)
        routing.fused_topk(empty(4096, experts), vector, 10, True, scoring, 1.0)

    (kernel,) = aot.compile_launch(90, launch)
    used = aot.resources(kernel, 90)
    assert used["registers"] <= routing.REGISTERS
    quick = kernel.asm["ptx"].split("redux.sync.min")[0]
    assert quick.count("redux.sync.max") == maxima
    assert "bar.sync" not in quick


@pytest.mark.parametrize(
    ("experts", "tokens", "scoring"),
    [(512, 1, "sigmoid"), (256, 2, "sigmoid"),
     *(pytest.param(*case, "sqrtsoftplus", marks=pytest.mark.exhaustive)
       for case in ((512, 1), (256, 2)))],
)  # fmt: skip
def test_many_tokens_of_groups(experts, tokens, scoring):
    """Rounds of groups are maxima of a warp, too; what lanes exchange are its shuffles."""

    def launch(empty):
        bias = empty(experts, dtype=torch.float32)
        routing.grouped_topk(empty(4096, experts), bias, 8, True, scoring, 1.0, 8, 4)

    (kernel,) = aot.compile_launch(90, launch)
    assert aot.resources(kernel, 90)["registers"] <= routing.REGISTERS
    quick = kernel.asm["ptx"].split("redux.sync.min")[0]
    assert quick.count("redux.sync.max") == tokens * (5 + 9)
    pairs, dealt = 2 * 2, experts // 32
    assert quick.count("shfl.sync.idx") >= tokens * (pairs + dealt)
    assert "bar.sync" not in quick
