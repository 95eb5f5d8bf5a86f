"""Kernels that are launched before the ones before them end give what kernels one by one give."""

from itertools import cycle, islice

import pytest
import torch
from dependent_launches import (
    QUEUE,
    assert_same,
    check_eager,
    check_graph,
    one_by_one,
)

import moe_ops
from moe_ops import ops
from moe_ops.testing import Problem, make_inputs, quantize_inputs

E, K, H, I = 16, 4, 512, 256  # noqa: E741
SCHEMES = ("unquantized", "fp8_channel", "fp8_block128", "int8_tensor", "int4_w4a16_g128", "mxfp4")

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def back_to_back():
    """No kernel between two of the library: fresh memory is not filled."""
    torch.utils.deterministic.fill_uninitialized_memory = False
    yield
    torch.utils.deterministic.fill_uninitialized_memory = True


def layers(scheme, device="cuda"):
    """A chain of layers: tokens of one are those of the next, or one of them is."""
    problem = Problem(4, E, K, H, I, torch.bfloat16, scheme=scheme)
    inputs = make_inputs(problem, device)
    inputs = inputs._replace(w2=inputs.w2 * 3)  # rows stay about as large as they are
    (_, w1, w2, *_), config, _ = quantize_inputs(problem, inputs)

    def layer(x):
        weights, ids = moe_ops.fused_topk(x, x[:, :E], K, True)
        return moe_ops.fused_experts(x, w1, w2, weights, ids, quant_config=config)

    def chain(x):
        last = []
        for _ in range(3):
            x = layer(x)
            last.append(layer(x[-1:]))
        return torch.cat([x, *last])

    return chain


def copies(rows, device="cuda"):
    """A chain of copies: of many rows, of one of those, and of that one many times."""
    generator = torch.Generator().manual_seed(rows)

    def table(index):
        offset = torch.tensor([0, len(index)], device=device)
        return index.to(torch.int32).to(device), offset, 1

    mixed = table(torch.randperm(rows, generator=generator))
    one, same = table(torch.tensor([rows - 1])), table(torch.zeros(rows, dtype=torch.int64))

    def chain(x):
        seen = []
        for _ in range(20):
            x = ops.gather_rows(x, *mixed)
            seen.append(ops.gather_rows(x, *one))
            seen.append(ops.gather_rows(seen[-1], *same)[-1:])
        return torch.cat([x, *seen])

    return chain


def batches(tokens, device="cuda"):
    generator = torch.Generator().manual_seed(tokens)
    return [torch.randn(tokens, H, generator=generator).bfloat16().to(device) for _ in range(4)]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("tokens", [1, 4, 64, 1500])
def test_layers(scheme, tokens):
    chain = layers(scheme)
    check_eager(chain, batches(tokens))
    check_graph(chain, batches(tokens))


@pytest.mark.parametrize("rows", [1, 300, 20000])
def test_copies(rows):
    chain = copies(rows)
    check_eager(chain, batches(rows))
    check_graph(chain, batches(rows))


@pytest.mark.parametrize("scheme", ["unquantized", "fp8_block128"])
@pytest.mark.parametrize("tokens", [(700, 1), (1, 700)])
def test_beside_another_stream(scheme, tokens):
    """Two chains at once, eagerly and as two branches of a graph, which fork and join."""
    chain, side = layers(scheme), torch.cuda.Stream()
    inputs = [*zip(*map(batches, tokens), strict=True)]

    def both(pair):
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            there = chain(pair[1])
        here = chain(pair[0])
        main.wait_stream(side)
        return torch.cat([here, there])

    want = [torch.cat([one_by_one(chain, x) for x in pair]) for pair in inputs]
    torch.cuda._sleep(QUEUE)
    assert_same([both(pair) for pair in islice(cycle(inputs), 40)], want)
    fixed, graph, got = [x.clone() for x in inputs[0]], torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        out = both(fixed)
    for pair in islice(cycle(inputs), 40):
        for old, new in zip(fixed, pair, strict=True):
            old.copy_(new)
        graph.replay()
        got.append(out.clone())
    assert_same(got, want)
