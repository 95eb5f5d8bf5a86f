"""Gradients of layers of several ranks, over gloo, are those of one rank with all tokens."""

import pytest
import torch
from checkpoints import Experts, per_expert
from ranks import mine, spawn

import moe_ops
from moe_ops import FusedMoEParallelConfig

E, K, H, I, T = 8, 2, 32, 64, 11  # noqa: E741
COUNTS = {2: (7, 4), 4: (5, 0, 1, 5)}
KINDS = {
    "plain": {},
    "biases": {"has_bias": True},
    "on the input": {"apply_router_weight_on_input": True},
    "chunks": {"chunk_size": 4},
    "int8_w8a16": {"scheme": "int8_w8a16"},
    "fp8_channel": {"scheme": "fp8_channel", "apply_router_weight_on_input": True},
}


def layer_of(options, **way):
    """A layer with the weights of E experts; all that is not quantized requires grad."""
    layer = moe_ops.FusedMoE(E, K, H, I, **options, **way)
    experts, scheme = Experts.random(E, H, I), options.get("scheme")
    source = per_expert(experts if scheme is None else experts.quantized(scheme))
    if options.get("has_bias"):
        g = torch.Generator().manual_seed(5)
        for name, x in list(source.items()):
            source[name.replace("weight", "bias")] = torch.randn(x.shape[0], generator=g)
    moe_ops.load_checkpoint(layer, source, progress=False)
    return layer.requires_grad_(scheme is None)


def ways(rank, ranks):
    """Ways to share a layer, and the part of all tokens that a rank passes."""
    tokens = mine(COUNTS[ranks], rank)
    if ranks == 4:
        replicas = {"dp_size": 2, "dp_rank": rank // 2, "tp_size": 2, "tp_rank": rank % 2}
        share = mine((6, 5), rank // 2)
        yield "replicas", {**replicas, "ep_size": 4}, share
        yield "replicas of parts", replicas, share
        yield "data", {"dp_size": 4, "dp_rank": rank, "ep_size": 4}, tokens
        return
    for backend in ("allgather_reducescatter", "fixed_capacity", "alltoall"):
        config = FusedMoEParallelConfig(
            dp_size=ranks, dp_rank=rank, ep_size=ranks, ep_rank=rank, use_ep=True,
            all2all_backend=backend,
        )  # fmt: skip
        yield backend, {"moe_parallel_config": config}, tokens
    tensor = {"tp_size": ranks, "tp_rank": rank}
    yield "sequence", {**tensor, "is_sequence_parallel": True}, tokens
    yield "experts", {"ep_size": ranks, "ep_rank": rank, "reduce_results": True}, slice(None)
    yield "parts", {**tensor, "reduce_results": True}, slice(None)


def batch():
    g = torch.Generator().manual_seed(1)
    return [torch.randn(T, n, generator=g) for n in (H, E, H)]


def step(layer, rows, **more):
    """The result, and the gradients of tokens, logits and parameters."""
    x, logits, grad = rows
    given = [x.clone().requires_grad_(), logits.clone().requires_grad_()]
    params = {n: p for n, p in layer.named_parameters() if p.requires_grad}
    out = layer(*given, **more)
    found = torch.autograd.grad(out, [*given, *params.values()], grad)
    return {"out": out.detach(), **dict(zip(("x", "logits", *params), found, strict=True))}


def held(layer, name, whole):
    """This rank's part of what all experts have."""
    rows = torch.tensor([e for e, row in enumerate(layer.placement.row) if row >= 0])
    part, config = whole[rows], layer.moe_parallel_config
    if config.tp_size == 1:
        return part
    cut = slice(config.tp_rank * I // config.tp_size, (config.tp_rank + 1) * I // config.tp_size)
    if name == "w2_weight":
        return part[:, :, cut]
    if name == "w2_bias":
        return part if config.tp_rank == 0 else None  # results are added, so one rank has it
    return part.unflatten(1, (2, I))[:, :, cut].flatten(1, 2)


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
            for what, actual in found.items():
                near = expected[what]
                whole = what not in ("out", "x", "logits")
                near = held(layer, what, near) if whole else near[tokens]
                if near is not None:
                    text = (name, way, what)
                    torch.testing.assert_close(actual, near, msg=lambda m, t=text: f"{t}: {m}")


def check_compiled(rank, ranks):
    """One graph for all numbers of tokens, forward and backward, with the same bits."""
    for way, spread, tokens in ways(rank, ranks):
        if way == "alltoall":
            continue
        room = {} if tokens == slice(None) else {"max_num_tokens": 8}
        layer, eager = (layer_of(room, **spread) for _ in range(2))
        rows = batch()
        torch._dynamo.reset()
        compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
        for number, count in enumerate((4, 2)):
            part = [x[tokens][:count] for x in rows]
            with torch.compiler.set_stance("fail_on_recompile" if number else "default"):
                found = step(compiled, part)
            for a, b in zip(found.values(), step(eager, part).values(), strict=True):
                assert torch.equal(a, b), way


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


def check_two(rank, ranks):
    check(rank, ranks)
    check_compiled(rank, ranks)
    check_refused(rank, ranks)


@pytest.mark.parametrize(("ranks", "checks"), [(2, check_two), (4, check)])
def test_ranks(ranks, checks):
    spawn(checks, ranks)
