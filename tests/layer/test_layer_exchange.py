"""Layers whose ranks exchange tokens, over gloo: against one rank with all tokens."""

import copy
import pickle
import runpy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from compilations import Compilations
from ranks import mine, spawn
from small_layers import E, H, I, K

import moe_ops
from moe_ops import FusedMoEParallelConfig
from moe_ops.pipeline.exchange.backends import exchange_class

COUNTS = {2: (7, 4), 4: (5, 0, 1, 5)}
T = 11
KINDS = {
    "plain": {},
    "grouped": {
        "use_grouped_topk": True, "num_expert_group": 4, "topk_group": 2, "scoring_func": "sigmoid",
    },
    "identity": {"zero_expert_num": 4, "zero_expert_type": "identity"},
    "fused shared": {"n_shared_experts": 2},
    "gated shared": {"n_shared_experts": 2, "shared_expert_gate": True},
    "on the input": {"apply_router_weight_on_input": True},
    "chunks": {"chunk_size": 4},
    "room": {"max_num_tokens": 9},
    "round robin": {"expert_placement_strategy": "round_robin"},
    "biases": {"has_bias": True},
    "reduced": {"reduce_results": True},
    "fp8_block128": {"quant_config": "fp8_block128"},
    "fp8_channel": {"quant_config": "fp8_channel", "has_bias": True},
    "int4_w4a16_g32": {"quant_config": "int4_w4a16_g32", "has_bias": True},
}  # fmt: skip
"""Options with which a token's result does not depend on other tokens."""


def whole_layer(**options):
    """A layer on one rank, of float32, with random weights."""
    for name in ("max_num_tokens", "chunk_size"):
        options.pop(name, None)
    g = torch.Generator().manual_seed(0)
    layer = moe_ops.FusedMoE(E, K, H, I, **options)
    for which in ("w13", "w2"):
        param = getattr(layer, f"{which}_weight")
        stored = param.shape if layer.scheme.weight is None else None
        w = torch.randn(stored or wide(layer, which), generator=g) * 0.2
        if layer.scheme.weight is None:
            param.data.copy_(w)
            continue
        q = moe_ops.quantize_weight(w, layer.scheme)
        param.data.copy_(q.data)
        scale = getattr(layer, f"{which}_weight_scale").data
        scale.copy_(q.scale.view(scale.shape))
    for name in ("w13_bias", "w2_bias"):
        bias = getattr(layer, name)
        if bias is not None:
            bias.data.copy_(torch.randn(bias.shape, generator=g))
    if layer.shared_expert_gate_weight is not None:
        torch.nn.init.normal_(layer.shared_expert_gate_weight, generator=g)
    return layer


def wide(layer, which):
    """The shape of a weight that is not quantized."""
    experts = layer.sizes.num_experts
    return (experts, *layer.sizes.weights[which])


def part_of(layer, **options):
    """A rank's layer with its experts of the whole layer."""
    part = moe_ops.FusedMoE(E, K, H, I, **options)
    held = torch.tensor([i for i, row in enumerate(part.placement.row) if row >= 0])
    own = dict(part.named_parameters())
    for name, param in layer.named_parameters():
        of_all = name == "shared_expert_gate_weight"
        own[name].data.copy_(param.data if of_all else param.data[held])
    return part


def batch(layer):
    g = torch.Generator().manual_seed(1)
    return torch.randn(T, H, generator=g), torch.randn(T, layer.num_logits, generator=g)


def spreads(rank, ranks):
    """Ways to say that ranks have tokens of their own."""
    yield {"dp_size": ranks, "dp_rank": rank, "ep_size": ranks}
    yield {"tp_size": ranks, "tp_rank": rank, "ep_size": ranks, "is_sequence_parallel": True}
    if ranks == 4:
        yield {
            "dp_size": 2, "dp_rank": rank // 2, "tp_size": 2, "tp_rank": rank % 2, "ep_size": 4,
            "is_sequence_parallel": True,
        }  # fmt: skip
    for backend in ("naive", "fixed_capacity", "alltoall"):
        yield over(backend, rank, ranks)


def over(backend, rank, ranks):
    """Options of a layer whose ranks exchange tokens over a backend."""
    config = FusedMoEParallelConfig(
        dp_size=ranks, dp_rank=rank, ep_size=ranks, ep_rank=rank, use_ep=True,
        all2all_backend=backend,
    )  # fmt: skip
    return {"moe_parallel_config": config}


EXCHANGES = {
    "allgather_reducescatter": moe_ops.pipeline.AllGatherPrepareAndFinalize,
    "naive": moe_ops.pipeline.AllGatherPrepareAndFinalize,
    "fixed_capacity": moe_ops.pipeline.FixedCapacityPrepareAndFinalize,
    "alltoall": moe_ops.pipeline.ExactAllToAllPrepareAndFinalize,
}


def check_kinds(rank, ranks):
    tokens = mine(COUNTS[ranks], rank)
    for number, (name, options) in enumerate(KINDS.items()):
        if ranks == 4 and name not in ("plain", "identity", "fused shared", "chunks"):
            continue
        whole = whole_layer(**options)
        x, logits = batch(whole)
        expected = whole(x, logits)
        ways = list(spreads(rank, ranks))
        for way in ways if name == "plain" else [ways[number % len(ways)]]:
            layer = part_of(whole, **options, **way)
            backend = layer.moe_parallel_config.all2all_backend
            assert type(layer.kernel.prepare_finalize) is EXCHANGES[backend]
            out = layer(x[tokens], logits[tokens])
            torch.testing.assert_close(out, expected[tokens], msg=lambda m, n=name: f"{n}: {m}")


def check_details(rank, ranks, backend):
    """Padding, shared experts, kernels, copies."""
    tokens, way = mine(COUNTS[ranks], rank), over(backend, rank, ranks)
    twice = torch.nn.Linear(H, H, bias=False)
    whole = whole_layer()
    x, logits = batch(whole)
    expected = whole(x, logits)
    layer = part_of(whole, shared_experts=None, **way)
    padding = torch.arange(T) % 3 == 1
    out = layer(x[tokens], logits[tokens], is_padding=padding[tokens])
    torch.testing.assert_close(out, expected.masked_fill(padding[:, None], 0)[tokens])
    invariant = part_of(whole, batch_invariant=True, **way)
    few = slice(1 + rank)  # other tokens, and another number of them
    alone = invariant(x[tokens][few], logits[tokens][few])
    assert torch.equal(alone, invariant(x[tokens], logits[tokens])[few])
    assert layer.kernel is layer.kernel
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert other.kernel is not layer.kernel
        other.w2_weight.data.zero_()
        assert not other(x[tokens], logits[tokens]).any()
    torch.testing.assert_close(layer(x[tokens], logits[tokens]), expected[tokens])
    with torch.autocast("cpu", torch.bfloat16):
        near = whole(x, logits)[tokens]
        for rows in (x, x.bfloat16()):
            out = layer(rows[tokens], logits[tokens])
            torch.testing.assert_close(out, near, rtol=0.02, atol=0.05)
    layer.w2_weight = torch.nn.Parameter(-layer.w2_weight.data, False)  # the kernel follows
    torch.testing.assert_close(layer(x[tokens], logits[tokens]), -expected[tokens])
    layer.w2_weight.data.neg_()
    layer.shared_experts = twice
    shared, routed = layer(x[tokens], logits[tokens])
    torch.testing.assert_close(routed, expected[tokens])
    torch.testing.assert_close(shared, twice(x[tokens]))
    layer.shared_experts = None
    found = moe_ops.select_kernel(layer.moe_config, "unquantized")
    assert type(found.prepare_finalize) is EXCHANGES[backend]
    layer.kernel = found
    torch.testing.assert_close(layer(x[tokens], logits[tokens]), expected[tokens])
    layer.kernel = moe_ops.FusedMoEKernel(
        moe_ops.pipeline.MoEPrepareAndFinalizeNoEP(), found.fused_experts
    )
    with pytest.raises(NotImplementedError, match=r"dp_size > 1, or .*\(output_is_reduced\).*NoEP"):
        layer(x[tokens], logits[tokens])
    if rank == 0:
        alone = dist.new_group([0], use_local_synchronization=True)
        with pytest.raises(ValueError, match=f"tp_group must have {ranks} ranks, got 1"):
            moe_ops.FusedMoE(E, K, H, I, tp_group=alone, **way)


def check_compiled(rank, ranks):
    whole = whole_layer()
    x, logits = batch(whole)
    expected = whole(x, logits)
    for way in ("allgather_reducescatter", "fixed_capacity"):
        torch._dynamo.reset()
        layer = part_of(whole, max_num_tokens=7, **over(way, rank, ranks))
        backend = Compilations("aot_eager")
        with torch.fx.experimental._config.patch(backed_size_oblivious=True):
            compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
            for counts in ((6, 4), (2, 7), (3, 0), (0, 5), (7, 1)):
                own = slice(counts[rank])
                torch.testing.assert_close(compiled(x[own], logits[own]), expected[own])
        assert backend.count == 1
    layer = part_of(whole, **over("alltoall", rank, ranks))
    with pytest.raises(Exception, match="must be called eagerly, because the host reads"):
        torch.compile(layer, fullgraph=True, backend="eager")(x, logits)


def check_example(rank, ranks):
    script = Path(__file__).parents[2] / "examples" / "expert_parallel.py"
    runpy.run_path(str(script))["main"](torch.device("cpu"))


def check_two(rank, ranks):
    check_example(rank, ranks)
    check_kinds(rank, ranks)
    for backend in ("allgather_reducescatter", "fixed_capacity", "alltoall"):
        check_details(rank, ranks, backend)
    check_compiled(rank, ranks)


@pytest.mark.parametrize(("ranks", "check"), [(2, check_two), (4, check_kinds)])
def test_ranks_are_one_rank(ranks, check):
    spawn(check, ranks)


def test_slots_that_an_exchange_makes_room_for(monkeypatch):
    """Fused shared experts take slots of their own."""
    kind, given = exchange_class("allgather_reducescatter"), []
    made = kind.make
    monkeypatch.setattr(kind, "make", lambda needs: given.append(needs.top_k) or made(needs))
    for shared in (0, 2):
        layer = moe_ops.FusedMoE(8, 3, 16, 16, ep_size=2, dp_size=2, n_shared_experts=shared)
        assert layer.kernel is not None
    assert given == [3, 5]
