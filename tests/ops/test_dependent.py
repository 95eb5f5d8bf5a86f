"""Kernels that are launched before the ones before them end give what kernels one by one give."""

from itertools import cycle, islice

import pytest
import torch
from conftest import HAS_CUDA
from dependent_launches import (
    QUEUE,
    assert_same,
    check_eager,
    check_graph,
    one_by_one,
)

import moe_ops
from moe_ops import ops
from moe_ops.pipeline.gemms import apart, expert_weights, gemm, gemm_then_sum, quantized
from moe_ops.pipeline.row_spaces import SlotRows
from moe_ops.scheme import FusedMoEQuantConfig, pack_weight, packs
from moe_ops.tensors import Routing
from moe_ops.testing import Problem, make_inputs, quantize_inputs

if HAS_CUDA:
    from moe_ops.kernels._runtime.launch import Launch

E, K, H, I = 16, 4, 512, 256  # noqa: E741
FEW = 2
"""Experts of a token for which the M = 1 kernels run: see `is_direct`."""
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


def layer_of(scheme, device):
    """Weights, packed if there is such a form, and their configuration."""
    problem = Problem(1, E, FEW, H, I, torch.bfloat16, scheme=scheme)
    (_, w1, w2, *_), config, _ = quantize_inputs(problem, make_inputs(problem, device))
    if not packs(config.scheme, H, I):
        return w1, w2, config
    q1, q2 = (pack_weight(q, scheme) for q in config.weights(w1, w2))
    return q1.data, q2.data, FusedMoEQuantConfig.from_weights(scheme, q1, q2)


def operators(scheme, device="cuda"):
    """Both GEMMs of one token, called one by one; PyTorch writes the ids between the two."""
    w1, w2, config = layer_of(scheme, device)
    weights, scheme = expert_weights(w1, w2, config), config.scheme

    def chain(x):
        seen = []
        for n in range(8):
            routing = Routing(*moe_ops.fused_topk(x, x[:, n : n + E], FEW, True))
            space = SlotRows.of(routing, E, scheme, x.dtype, False)
            rows = quantized(x, weights.a1_scale, weights.w1, space, scheme, FEW, "silu")
            h = gemm(rows, weights.w1, space, FEW, scheme, x.dtype, "silu")
            routing.topk_ids.copy_((routing.topk_ids + 1) % E)
            h = quantized(h, None, weights.w2, space, scheme)
            seen.append(gemm_then_sum(h, weights.w2, space, routing.topk_weights, scheme, x.dtype))
        return torch.cat(seen)

    return chain


ONE_TOKEN = ("unquantized", "fp8_block128", "mxfp4_w4a16")


@pytest.mark.parametrize("scheme", ONE_TOKEN)
def test_what_is_written_between_two_calls_is_read(scheme):
    chain = operators(scheme)
    check_eager(chain, batches(1))
    check_graph(chain, batches(1))


@pytest.mark.parametrize("scheme", ONE_TOKEN)
def test_the_pipeline_of_one_token_reads_early(scheme, monkeypatch):
    """Operators that are called one by one do not, with the same bits."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    w1, w2, config = layer_of(scheme, "cuda")
    early, launch = [], Launch.__call__

    def record(self, *given):
        early.extend(c.EARLY for c in self.constants.values() if hasattr(c, "EARLY"))
        launch(self, *given)

    monkeypatch.setattr(Launch, "__call__", record)
    x = batches(1)[0]
    call = (x, w1, w2, *moe_ops.fused_topk(x, x[:, :E], FEW, True))
    first = moe_ops.fused_experts(*call, quant_config=config)
    with apart():
        second = moe_ops.fused_experts(*call, quant_config=config)
    assert torch.equal(first, second) and first.any()
    assert early[-1] is False and sum(early) == 1, early


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
