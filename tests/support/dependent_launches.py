"""Chains of kernels, checked against the same kernels one by one."""

from itertools import cycle, islice

import pytest
import torch
from legs import HAS_CUDA

if HAS_CUDA:
    from moe_ops.kernels._hopper.gemm import HopperGemm
    from moe_ops.kernels._runtime.launch import Launch

QUEUE = 20_000_000
"""Clock cycles for which the GPU is busy while launches gather behind."""


def waiting(launch):
    """``launch`` with nothing before and after it."""

    def alone(*arguments):
        torch.cuda.synchronize()
        launch(*arguments)
        torch.cuda.synchronize()

    return alone


def one_by_one(function, *arguments):
    """What ``function`` returns if every kernel of the library runs alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Launch, "__call__", waiting(Launch.__call__))
        patch.setattr(HopperGemm, "__call__", waiting(HopperGemm.__call__))
        return function(*arguments)


def expected(chain, inputs):
    want = [one_by_one(chain, x) for x in inputs]
    assert all(torch.isfinite(x).all() and x.any() for x in want)
    return want


def assert_same(got, want):
    torch.cuda.synchronize()
    for n, (a, b) in enumerate(zip(got, cycle(want), strict=False)):
        assert torch.equal(a, b), f"run {n}"


def check_eager(chain, inputs):
    want = expected(chain, inputs)
    torch.cuda._sleep(QUEUE)
    assert_same([chain(x) for x in islice(cycle(inputs), 40)], want)


def check_graph(chain, inputs):
    want, x = expected(chain, inputs), inputs[0].clone()
    graph, got = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        out = chain(x)
    torch.cuda._sleep(QUEUE)
    for new in islice(cycle(inputs), 40):
        x.copy_(new)
        graph.replay()
        got.append(out.clone())
    assert_same(got, want)
