"""Ranks that have the same tokens, and parts of experts with tokens of other ranks.

The results of every rank are those of one rank with all experts and all tokens.
"""

import copy
import pickle
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from checkpoints import Experts, per_expert
from compilations import Compilations
from ranks import GROUPS, compiled_on, device, mine, spawn
from torch.distributed.device_mesh import init_device_mesh

import moe_ops
from moe_ops import FusedMoEParallelConfig
from moe_ops.parallel.parallel_config import GATHERING_BACKENDS, IMPLEMENTED_BACKENDS
from moe_ops.pipeline.exchange.replicas import ReplicaExchange

E, K, H, I, T = 8, 2, 32, 64, 11  # noqa: E741
COUNTS = {2: ((7, 4), (0, 11), (10, 1)), 4: ((5, 0, 1, 5),)}
"""Tokens of the batches of a call, of which all ranks together have T."""
KINDS = {
    "plain": {},
    "identity": {"zero_expert_num": 4, "zero_expert_type": "identity"},
    "on the input": {"apply_router_weight_on_input": True},
    "chunks": {"chunk_size": 4},
    "room": {"max_num_tokens": 11},
    "biases": {"has_bias": True},
    "reduced": {"reduce_results": True},
    "int4_w4a16_g32": {"quant_config": "int4_w4a16_g32"},
    "fp8_block128": {"quant_config": "fp8_block128"},
    "fp8_channel": {"quant_config": "fp8_channel", "apply_router_weight_on_input": True},
}  # fmt: skip


def ways(rank, ranks):
    """Data parallelism that cuts experts, alone or beside tensor and expert parallelism."""
    yield {"dp_size": ranks, "dp_rank": rank}
    yield {"tp_size": ranks, "tp_rank": rank, "is_sequence_parallel": True}
    if ranks == 4:
        replicas = {"dp_size": 2, "dp_rank": rank // 2, "tp_size": 2, "tp_rank": rank % 2}
        yield replicas
        yield {**replicas, "ep_size": 4}


def source_of(options):
    experts = Experts.random(E, H, I)
    scheme = options.get("quant_config")
    source = per_expert(experts if scheme is None else experts.quantized(scheme))
    if options.get("has_bias"):
        g = torch.Generator().manual_seed(5)
        for name, x in list(source.items()):
            source[name.replace("weight", "bias")] = torch.randn(x.shape[0], generator=g)
    return source


def layer_of(options, **way):
    layer = moe_ops.FusedMoE(E, K, H, I, **options, **way)
    moe_ops.load_checkpoint(layer, source_of(options), progress=False)
    return layer.to(device())


def whole_of(options):
    return layer_of({k: v for k, v in options.items() if k not in ("max_num_tokens", "chunk_size")})


def batch(layer):
    g = torch.Generator().manual_seed(1)
    made = (torch.randn(T, n, generator=g) for n in (H, layer.num_logits))
    return tuple(x.to(device()) for x in made)


def check_kinds(rank, ranks):
    for name, options in KINDS.items():
        if ranks == 4 and name in ("reduced", "biases", "int4_w4a16_g32"):
            continue
        whole = whole_of(options)
        x, logits = batch(whole)
        expected = whole(x, logits)
        for way in ways(rank, ranks):
            config = moe_ops.FusedMoE(E, K, H, I, **way, device="meta").moe_parallel_config
            if not config.use_ep and name.startswith("fp8"):
                continue  # each rank's part of a row between the GEMMs has its own scale
            layer = layer_of(options, **way)
            for counts in COUNTS[config.layer_size // config.replica_size]:
                tokens = mine(counts, config.tokens_rank)
                out = layer(x[tokens], logits[tokens])
                torch.testing.assert_close(
                    out, expected[tokens], msg=lambda m, n=(name, way): f"{n}: {m}"
                )


def check_details(rank, ranks):
    """Padding, shared experts, copies, kernels, and groups of the wrong ranks."""
    whole, twice = whole_of({}), torch.nn.Linear(H, H, bias=False, device=device())
    x, logits = batch(whole)
    expected = whole(x, logits)
    for way in ways(rank, ranks):
        layer = layer_of({"shared_experts": twice}, **way)
        config = layer.moe_parallel_config
        tokens = mine(COUNTS[config.layer_size // config.replica_size][0], config.tokens_rank)
        padding = (torch.arange(T, device=device()) % 3 == 1)[tokens]
        shared, out = layer(x[tokens], logits[tokens], is_padding=padding)
        torch.testing.assert_close(out, expected[tokens].masked_fill(padding[:, None], 0))
        torch.testing.assert_close(shared, twice(x[tokens]))
        for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            torch.testing.assert_close(other(x[tokens], logits[tokens])[1], expected[tokens])
        invariant = layer_of({"batch_invariant": True}, **way)
        few = slice(1 + config.tokens_rank)  # other tokens, and other numbers of them
        alone = invariant(x[tokens][few], logits[tokens][few])
        assert torch.equal(alone, invariant(x[tokens], logits[tokens])[few])
        part = layer.kernel.prepare_finalize
        assert isinstance(part, ReplicaExchange) is (config.replica_size > 1)
        with pytest.raises(NotImplementedError, match=r"dp_size > 1, or .*\(output_is_reduced\)"):
            layer.kernel = moe_ops.FusedMoEKernel(
                moe_ops.pipeline.MoEPrepareAndFinalizeNoEP(), layer.kernel.fused_experts
            )
            layer(x[tokens], logits[tokens])
    other = (rank + 1) % ranks
    with pytest.raises(ValueError, match=f"this process as rank {other}, .* got rank {rank}"):
        moe_ops.FusedMoE(E, K, H, I, dp_size=ranks, dp_rank=other)


def check_backends(rank, ranks):
    """Any exchange serves replicas, and parts of experts if it can take tokens to all ranks."""
    whole = whole_of({})
    x, logits = batch(whole)
    expected = whole(x, logits)
    for way in ways(rank, ranks):
        config = moe_ops.FusedMoE(E, K, H, I, **way, device="meta").moe_parallel_config
        for backend in GATHERING_BACKENDS if not config.use_ep else IMPLEMENTED_BACKENDS:
            parallel = replace(config, all2all_backend=backend)
            layer = layer_of({"max_num_tokens": 11}, moe_parallel_config=parallel)
            for counts in COUNTS[config.layer_size // config.replica_size]:
                tokens = mine(counts, config.tokens_rank)
                torch.testing.assert_close(layer(x[tokens], logits[tokens]), expected[tokens])


def check_compiled(rank, ranks):
    """One graph for all numbers of tokens, also where a replica has none."""
    whole = whole_of({})
    x, logits = batch(whole)
    expected = whole(x, logits)
    way = list(ways(rank, ranks))[ranks - 2]
    layer = layer_of({}, max_num_tokens=7, **way)
    replica = layer.moe_parallel_config.tokens_rank
    layer(x[:2], logits[:2])  # compares the ranks, which a graph cannot
    backend = Compilations("aot_eager")
    with torch.fx.experimental._config.patch(backed_size_oblivious=True):
        compiled = compiled_on(-1, layer, dynamic=True, backend=backend)
        for counts in ((6, 4), (2, 7), (3, 0), (0, 5), (7, 1)):
            own = slice(counts[replica])
            torch.testing.assert_close(compiled(x[own], logits[own]), expected[own])
    assert backend.count == (rank == ranks - 1)


def check_mesh(rank, ranks):
    """The layer's groups follow from a mesh of the model's."""
    mesh = init_device_mesh(device().type, (2, ranks // 2), mesh_dim_names=("dp", "tp"))
    whole = whole_of({})
    x, logits = batch(whole)
    expected = whole(x, logits)
    for use_ep in (False, True):
        config = FusedMoEParallelConfig.of_mesh(mesh, enable_expert_parallel=use_ep)
        assert (config.dp_rank, config.layer_rank) == (rank // 2, rank)
        layer = layer_of({}, moe_parallel_config=config, tp_group=mesh)
        tokens = mine((7, 4), config.tokens_rank)
        torch.testing.assert_close(layer(x[tokens], logits[tokens]), expected[tokens])
        assert (
            layer_of({}, moe_parallel_config=config, tp_group=mesh).rank_group == layer.rank_group
        )
    replica = FusedMoEParallelConfig.of_mesh(mesh["tp"])
    layer = layer_of({}, moe_parallel_config=replica, tp_group=mesh["tp"], reduce_results=True)
    torch.testing.assert_close(layer(x, logits), expected)
    with pytest.raises(ValueError, match=f"tp_group must have {ranks} ranks, got 2"):
        moe_ops.FusedMoE(E, K, H, I, dp_size=ranks, dp_rank=rank, tp_group=mesh["tp"])
    other = init_device_mesh(device().type, (ranks // 2, 2), mesh_dim_names=("tp", "dp"))
    with pytest.raises(
        ValueError, match=r"dimensions named by .*, in this order, got \['tp', 'dp'"
    ):
        FusedMoEParallelConfig.of_mesh(other)
    nameless = init_device_mesh(device().type, (2, 2))
    with pytest.raises(ValueError, match="tp_group must have mesh_dim_names .* got none"):
        moe_ops.FusedMoE(E, K, H, I, dp_size=4, dp_rank=rank, tp_group=nameless)


@torch.no_grad()
def check_captured(rank, ranks):
    """Replays gather the tokens of replicas, each time others."""
    whole = whole_of({})
    for way in ways(rank, ranks):
        x, logits = batch(whole)
        layer = layer_of({}, max_num_tokens=T, **way)
        config = layer.moe_parallel_config
        tokens = mine(COUNTS[config.layer_size // config.replica_size][0], config.tokens_rank)
        for _ in range(2):
            layer(x[tokens], logits[tokens])
        torch.cuda.synchronize()
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            out = layer(x[tokens], logits[tokens])
        for replay in range(20):
            x.copy_(x.roll(1, 0))
            logits.copy_(logits.roll(2, 1))
            graph.replay()
            text = (way, replay)
            torch.testing.assert_close(
                out, whole(x, logits)[tokens], msg=lambda m, t=text: f"{t}: {m}"
            )


def check(rank, ranks):
    check_kinds(rank, ranks)
    check_details(rank, ranks)
    check_backends(rank, ranks)
    check_compiled(rank, ranks)
    if ranks == 4:
        check_mesh(rank, ranks)
    if device().type == "cuda":
        check_captured(rank, ranks)
    dist.barrier()


@pytest.mark.parametrize(("ranks", "backend"), GROUPS)
def test_ranks_are_one_rank(ranks, backend):
    spawn(check, ranks, backend=backend)
