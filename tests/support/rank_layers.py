"""Layers of several ranks with the weights of one layer, and the parts that each rank has."""

from dataclasses import replace

import torch
from checkpoints import Experts, per_expert
from ranks import device, mine

import moe_ops
from moe_ops import FusedMoEParallelConfig

E, K, H, I, T = 8, 2, 32, 64, 11  # noqa: E741
COUNTS = {2: (7, 4), 4: (5, 0, 1, 5)}


def layer_of(options, **way):
    """A layer with the weights of E experts."""
    layer = moe_ops.FusedMoE(E, K, H, I, **options, **way)
    experts, scheme = Experts.random(E, H, I), options.get("scheme")
    source = per_expert(experts if scheme is None else experts.quantized(scheme))
    if options.get("has_bias"):
        g = torch.Generator().manual_seed(5)
        for name, x in list(source.items()):
            source[name.replace("weight", "bias")] = torch.randn(x.shape[0], generator=g)
    wide = per_expert(Experts.random(1, H, options.get("n_shared_experts", 0) * I, seed=6))
    source |= {name.replace("experts.0", "shared_experts"): x for name, x in wide.items()}
    source["shared_expert_gate.weight"] = torch.linspace(-1, 1, H)[None]
    moe_ops.load_checkpoint(layer, source, progress=False)
    return layer.to(device())


def ways(rank, ranks, counts=None):
    """Ways to share a layer, and the part of all tokens that a rank passes."""
    tokens = mine(counts or COUNTS[ranks], rank)
    if ranks == 4:
        replicas = {"dp_size": 2, "dp_rank": rank // 2, "tp_size": 2, "tp_rank": rank % 2}
        share = mine((6, 5), rank // 2)
        yield "replicas", {**replicas, "ep_size": 4}, share
        yield "replicas of parts", replicas, share
        yield "data", {"dp_size": 4, "dp_rank": rank, "ep_size": 4}, tokens
        like = moe_ops.FusedMoE(E, K, H, I, **replicas, ep_size=4, device="meta")
        config = replace(like.moe_parallel_config, all2all_backend="symmetric")
        yield "symmetric replicas", {"moe_parallel_config": config, "max_num_tokens": T}, share
        return
    for backend in ("allgather_reducescatter", "fixed_capacity", "alltoall", "symmetric"):
        config = FusedMoEParallelConfig(
            dp_size=ranks, dp_rank=rank, ep_size=ranks, ep_rank=rank, use_ep=True,
            all2all_backend=backend,
        )  # fmt: skip
        room = {"max_num_tokens": T} if backend == "symmetric" else {}
        yield backend, {"moe_parallel_config": config, **room}, tokens
    tensor = {"tp_size": ranks, "tp_rank": rank}
    yield "sequence", {**tensor, "is_sequence_parallel": True}, tokens
    yield "experts", {"ep_size": ranks, "ep_rank": rank, "reduce_results": True}, slice(None)
    yield "parts", {**tensor, "reduce_results": True}, slice(None)


def batch():
    g = torch.Generator().manual_seed(1)
    return [torch.randn(T, n, generator=g).to(device()) for n in (H, E, H)]


def held(layer, name, whole):
    """This rank's part of what all experts have."""
    rows = [e for e, row in enumerate(layer.placement.row) if row >= 0]
    part, config = whole[rows], layer.moe_parallel_config
    if config.tp_size == 1:
        return part
    cut = slice(config.tp_rank * I // config.tp_size, (config.tp_rank + 1) * I // config.tp_size)
    if name == "w2_weight":
        return part[:, :, cut]
    if name == "w2_bias":
        return part if config.tp_rank == 0 else None  # results are added, so one rank has it
    return part.unflatten(1, (2, I))[:, :, cut].flatten(1, 2)
