"""A layer with a modular kernel: dtypes of ids, shared experts beside it, room for its tokens."""

import pytest
import torch
from modular import Recorder
from small_layers import (
    KINDS,
    E,
    H,
    Int64Only,
    T,
    arguments,
    batch,
    filled,
    kernel_of,
    make,
    one_expert,
)
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import moe_ops


@pytest.mark.parametrize("kind", ["plain", "grouped", "identity", "balanced"])
def test_ids_have_the_dtype_that_the_kernel_asks_for(kind):
    layer = filled(**KINDS[kind])
    (x, logits), _ = arguments(layer)
    expected = layer(x, logits)
    layer.kernel = kernel_of(layer, Int64Only())
    torch.testing.assert_close(layer(x, logits), expected)
    assert layer.route(x, logits).topk_ids.dtype == torch.int64


class Shared(nn.Module):
    """Counts its calls, and notes them among the events."""

    def __init__(self, events):
        super().__init__()
        self.events = events

    def forward(self, x):
        self.events.append(f"shared {tuple(x.shape)}")
        return x * 2


@pytest.mark.parametrize("chunk_size", [None, 4])
@pytest.mark.parametrize("where", ["layer", "kernel", "both"])
def test_shared_experts_run_once_while_rows_come_back(where, chunk_size):
    events = []
    shared = Shared(events)
    layer = make(shared_experts=None if where == "kernel" else shared, chunk_size=chunk_size)
    x, logits = batch()
    routed = make()(x, logits)
    part = Recorder(moe_ops.pipeline.MoEPrepareAndFinalizeNoEP(), events)
    options = {} if where == "layer" else {"shared_experts": shared}
    layer.kernel = kernel_of(layer, part, **options)
    beside, out = layer(x, logits)
    torch.testing.assert_close(out, routed)
    assert torch.equal(beside, x * 2)
    steps = [e for e in events if not e.startswith("hook") and "prepare" not in e]
    assert steps[:3] == ["start finalize 0", f"shared ({T}, {H})", "receive finalize 0"]
    assert sum(e.startswith("shared") for e in events) == 1
    latent = torch.ones(3, 5, 7)
    beside, out = layer(x.view(3, 3, H), logits.view(3, 3, E), latent)
    assert torch.equal(beside, latent * 2) and out.shape == (3, 3, H)
    if where == "both":
        layer.shared_experts = Shared(events)
        with pytest.raises(ValueError, match="layer.kernel.shared_experts must be None or the lay"):
            layer(x, logits)


def test_shared_experts_read_tokens_that_a_kernel_overwrites():
    layer, (x, logits) = make(shared_experts=Shared([])), batch()
    layer.kernel = kernel_of(layer, inplace=True)
    expected = make()(x, logits), 2 * x
    shared, out = layer(x, logits)
    torch.testing.assert_close((out, shared), expected)


@pytest.mark.parametrize("room", [1, 2, 4, T, 100])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_batched_kernel_takes_any_number_of_tokens(room, asynchronous):
    """All to one expert: as many rows of it as there are tokens."""
    layer, (x, logits) = make(custom_routing_function=one_expert), batch()
    expected = layer(x, logits)
    part = moe_ops.pipeline.BatchedPrepareAndFinalize(room, E, 1, 0)
    part = moe_ops.pipeline.AsyncPrepareAndFinalize(part) if asynchronous else part
    layer.quant_method.maybe_make_prepare_finalize = lambda: part
    layer.quant_method.init_prepare_finalize(layer)
    layer.shared_experts = shared = Shared([])
    beside, out = layer(x, logits)
    torch.testing.assert_close(out, expected)
    assert torch.equal(beside, 2 * x) and len(shared.events) == 1


def test_a_batched_kernel_that_others_wait_for_says_its_room():
    layer = make(custom_routing_function=one_expert)
    part = moe_ops.pipeline.BatchedPrepareAndFinalize(4, E, 2, 0)
    layer.quant_method.maybe_make_prepare_finalize = lambda: part
    layer.quant_method.init_prepare_finalize(layer)
    with pytest.raises(ValueError, match="must have at most max_num_tokens = 4 tokens.* got 9"):
        layer(*batch())
    layer.chunk_size = 4
    torch.testing.assert_close(layer(*batch()), make(custom_routing_function=one_expert)(*batch()))


def test_a_compiled_batched_kernel_says_its_room():
    """Nothing is asked of the number of tokens while it is traced."""
    torch._dynamo.reset()
    layer = make(custom_routing_function=one_expert)
    layer.quant_method.maybe_make_prepare_finalize = lambda: (
        moe_ops.pipeline.BatchedPrepareAndFinalize(7, E, 1, 0)
    )
    layer.quant_method.init_prepare_finalize(layer)
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    torch.testing.assert_close(compiled(*batch(5)), layer(*batch(5)))
    torch.testing.assert_close(compiled(*batch(7)), layer(*batch(7)))
    with pytest.raises(ValueError, match="must have at most max_num_tokens = 7 tokens, got 9"):
        compiled(*batch())
    assert counter.frame_count == 1
