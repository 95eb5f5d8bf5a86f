"""Gradients of layers of several ranks are those of one rank with all tokens."""

import pytest
import torch
from rank_layers import H, T, batch, held, layer_of, ways
from ranks import BACKENDS, BACKENDS_OF_FOUR, compiled_on, spawn
from torch.utils.checkpoint import checkpoint

import moe_ops
from moe_ops.training import clip_grad_norm_

KINDS = {
    "plain": {},
    "biases": {"has_bias": True},
    "on the input": {"apply_router_weight_on_input": True},
    "chunks": {"chunk_size": 4},
    "gated shared": {"n_shared_experts": 1, "shared_expert_gate": True},
    "int8_w8a16": {"scheme": "int8_w8a16"},
    "fp8_channel": {"scheme": "fp8_channel", "apply_router_weight_on_input": True},
}


def step(layer, rows, **more):
    """The result, and the gradients of tokens, logits and parameters."""
    x, logits, grad = rows
    given = [x.clone().requires_grad_(), logits.clone().requires_grad_()]
    params = {n: p for n, p in layer.named_parameters() if p.requires_grad}
    out = layer(*given, **more)
    found = torch.autograd.grad(out, [*given, *params.values()], grad)
    return {"out": out.detach(), **dict(zip(("x", "logits", *params), found, strict=True))}


def check(rank, ranks):
    for name, options in KINDS.items():
        if ranks == 4 and name not in ("plain", "on the input"):
            continue
        rows = batch()
        kept = {k: v for k, v in options.items() if k != "chunk_size"}
        expected = step(layer_of(kept), rows)
        for way, spread, tokens in ways(rank, ranks):
            layer = layer_of(options, **spread)
            if layer.moe_parallel_config.tp_size > 1 and name == "fp8_channel":
                continue  # each rank's part of a row between the GEMMs has its own scale
            found = step(layer, [x[tokens] for x in rows])
            if name == "biases":
                check_norm(layer, expected, rows, tokens)
            for what, actual in found.items():
                near = expected[what]
                if what == "shared_expert_gate_weight":
                    if layer.exchanges_tokens:  # each rank has the sum over its own tokens
                        torch.distributed.all_reduce(actual)
                    torch.testing.assert_close(actual, near)
                    continue
                whole = what not in ("out", "x", "logits")
                near = held(layer, what, near) if whole else near[tokens]
                if near is not None:
                    text = (name, way, what)
                    torch.testing.assert_close(actual, near, msg=lambda m, t=text: f"{t}: {m}")


def check_norm(layer, expected, rows, tokens):
    """Each number counts once: of the ranks that cut an expert, one alone has its down bias."""
    first = layer.moe_parallel_config.tp_rank == 0
    assert layer.w2_bias.requires_grad == first
    x, logits, grad = (x[tokens] for x in rows)
    layer(x, logits).backward(grad)
    whole = [x for what, x in expected.items() if what not in ("out", "x", "logits")]
    norm = torch.linalg.vector_norm(torch.cat([x.flatten() for x in whole]))
    torch.testing.assert_close(clip_grad_norm_(layer, 1e9), norm)


COMPILED = ("fixed_capacity", "symmetric", "sequence", "parts")
"""Exchanges, parts of tokens, and parts of weights."""


def check_compiled(rank, ranks, names=COMPILED):
    """One graph for all numbers of tokens, forward and backward, with the same bits."""
    for turn, (way, spread, tokens) in enumerate(ways(rank, ranks)):
        if way not in names:
            continue
        own_room = tokens == slice(None) or "max_num_tokens" in spread
        room = {} if own_room else {"max_num_tokens": 8}
        layer, eager = (layer_of(room, **spread) for _ in range(2))
        rows = batch()
        layer(*(x[tokens] for x in rows[:2]))  # compares and connects ranks, which a graph cannot
        torch._dynamo.reset()
        compiled = compiled_on(turn, layer, dynamic=True, backend="aot_eager")
        for number, count in enumerate((4, 2)):
            part = [x[tokens][:count] for x in rows]
            with torch.compiler.set_stance("fail_on_recompile" if number else "default"):
                found = step(compiled, part)
            for a, b in zip(found.values(), step(eager, part).values(), strict=True):
                assert torch.equal(a, b), way


def check_windows(layer, rows, expected):
    """What was not sent is not read, and gradients of overlapping calls are an error."""
    exchange = layer.kernel.prepare_finalize
    (windows,) = exchange.connect(rows[0].device)

    def poisoned(send):
        def run(*arguments):
            windows.own[windows.layout.parts.rows : windows.layout.parts.sums] = 255  # NaN
            torch.distributed.barrier()
            return send(*arguments)

        return run

    for name in ("send", "send_again"):
        setattr(exchange, name, poisoned(getattr(exchange, name)))
    for a, b in zip(step(layer, rows).values(), expected, strict=True):
        assert torch.equal(a, b)
    del exchange.send, exchange.send_again
    x, logits, _ = rows
    y, sums = x.new_zeros(T, H), x.new_zeros(2 * T, H)
    first, second = (torch.zeros(2 * T, 1, dtype=torch.int32, device=x.device) for _ in range(2))
    for between in (lambda: exchange.send_again(y, second), lambda: layer(x, logits)):
        exchange.send_again(y, first)
        between()
        with pytest.raises(RuntimeError, match="gradients travel at the same time, got 1"):
            exchange.send_gradients_back(sums, None, first)
    exchange.send_again(y, first)
    exchange.send_gradients_back(sums, None, first)
    with pytest.raises(RuntimeError, match="gradients travel at the same time, got 1"):
        exchange.send_gradients_back(sums, None, first)  # once
    torch.testing.assert_close(layer(x, logits), expected[0])


def check_symmetric(rank, ranks):
    """Windows give the bits of the all-gather, whatever is asked for, also after other calls."""
    found = {}
    for way, spread, tokens in ways(rank, ranks, (4, 7)):
        if way not in ("allgather_reducescatter", "symmetric"):
            continue
        layer, rows = layer_of({}, **spread), [x[tokens] for x in batch()]
        x, logits = (x.clone().requires_grad_() for x in rows[:2])
        outs = [layer(x, logits), layer(x.detach(), logits), layer(x, logits.detach())]
        (of_w2,) = torch.autograd.grad(outs.pop(), [layer.w2_weight], rows[2])  # no rows come back
        (of_logits,) = torch.autograd.grad(outs.pop(), [logits], rows[2])
        found[way] = [of_w2, of_logits, *torch.autograd.grad(outs.pop(), [x, logits], rows[2])]
        found[way] += step(layer, rows).values()
        kernel = layer.kernel
        beside = moe_ops.pipeline.AsyncPrepareAndFinalize(kernel.prepare_finalize)
        layer.kernel = moe_ops.FusedMoEKernel(beside, kernel.fused_experts)
        for a, b in zip(step(layer, rows).values(), found[way][4:], strict=True):
            assert torch.equal(a, b), way
        layer.kernel = kernel
        if way == "symmetric":
            check_windows(layer, rows, found[way][4:])
    for a, b in zip(*found.values(), strict=True):
        assert torch.equal(a, b)

    parts = {"max_num_tokens": T, "dp_size": ranks, "dp_rank": rank}  # rows travel to all ranks
    backends = ("allgather_reducescatter", "symmetric")
    layers = [layer_of({}, **parts, all2all_backend=backend) for backend in backends]
    for a, b in zip(*(step(layer, rows).values() for layer in layers), strict=True):
        assert torch.equal(a, b)


class Recomputed(torch.nn.Module):
    """A layer under activation checkpointing."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, logits):
        return checkpoint(self.layer, x, logits, use_reentrant=False)


def check_checkpoints(rank, ranks):
    """The call is computed again before gradients travel, not in between: its rows travel too."""
    for way, spread, tokens in ways(rank, ranks):
        layer, rows = layer_of({}, **spread), [x[tokens] for x in batch()]
        again = step(Recomputed(layer), rows)
        for a, b in zip(again.values(), step(layer, rows).values(), strict=True):
            assert torch.equal(a, b), way


def check_main_grads(rank, ranks):
    """Weights and biases add to main gradients, whatever way tokens travel."""
    for way, spread, tokens in ways(rank, ranks):
        rows, options = [x[tokens] for x in batch()], {"has_bias": True}
        expected = step(layer_of(options, **spread), rows)
        layer = layer_of({**options, "fuse_wgrad_accumulation": True}, **spread)
        for p in layer.parameters():
            p.main_grad = torch.zeros_like(p)
        x, logits = (x.clone().requires_grad_() for x in rows[:2])
        layer(x, logits).backward(rows[2])
        found = {"x": x.grad, "logits": logits.grad}
        for name, p in layer.named_parameters():
            assert p.grad is None, (way, name)
            if p.requires_grad:
                found[name] = p.main_grad
            else:
                assert not p.main_grad.any(), (way, name)
        for name, actual in found.items():
            assert torch.equal(actual, expected[name]), (way, name)


def check_refused(rank, ranks):
    """A sum by the caller, and ranks that share a scale of all tokens."""
    x, logits, _ = batch()
    layer = layer_of({}, ep_size=ranks, ep_rank=rank)
    total = layer.maybe_all_reduce_tensor_model_parallel(layer(x, logits))
    with pytest.raises(NotImplementedError, match="reduce_results must be True to sum over ranks"):
        total.sum().backward()
    layer = layer_of({"scheme": "fp8_tensor"}, dp_size=ranks, dp_rank=rank, ep_size=ranks)
    out = layer(x[: 3 + rank].requires_grad_(), logits[: 3 + rank])
    with pytest.raises(NotImplementedError, match="must not have one scale for all tokens"):
        out.sum().backward()


def check_second(rank, ranks):
    """Gradients of a sum have no derivative, whatever way they have travelled."""
    for way, spread, tokens in ways(rank, ranks):
        x, logits = (x[tokens].clone().requires_grad_() for x in batch()[:2])
        layer = layer_of({}, **spread)
        given = (x, logits, *layer.parameters())
        found = torch.autograd.grad(layer(x, logits).sum(), given, create_graph=True)
        for grad in found:
            with pytest.raises(NotImplementedError, match="second derivatives of .* are not"):
                torch.autograd.grad(grad.sum(), given, allow_unused=True, retain_graph=True)
            assert grad.requires_grad, way


def check_two(rank, ranks):
    check(rank, ranks)
    check_second(rank, ranks)
    check_symmetric(rank, ranks)
    check_checkpoints(rank, ranks)
    check_main_grads(rank, ranks)
    check_refused(rank, ranks)
    check_compiled(rank, ranks)  # last: the rank that compiled keeps its windows longer


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_ranks(backend):
    spawn(check_two, 2, backend=backend)


@pytest.mark.exhaustive
def test_other_ways_compiled():
    spawn(check_compiled, 2, ("allgather_reducescatter", "experts"))


@pytest.mark.parametrize("backend", BACKENDS_OF_FOUR)
def test_four_ranks(backend):
    spawn(check, 4, backend=backend)
