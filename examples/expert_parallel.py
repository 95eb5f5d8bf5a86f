"""Experts that are spread over ranks: every rank brings its own tokens and gets their results.

    torchrun --nproc-per-node 2 examples/expert_parallel.py

On GPUs (one for each rank, over NCCL) or on the CPU (over gloo), with any number of ranks. The
router prefers some experts, so in between the ranks balance their load: they replicate and move
experts, in place, and the results stay the same.
"""

import os

import torch
import torch.distributed as dist

import moe_ops

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, MOST = 16, 4, 256, 128, 64


def weights():
    """A checkpoint, the same on all ranks."""
    g = torch.Generator().manual_seed(0)
    return {
        "experts.gate_up_proj": torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN, generator=g) / 16,
        "experts.down_proj": torch.randn(EXPERTS, HIDDEN, INTERMEDIATE, generator=g) / 11,
    }


def layer_of(device, **options):
    sizes = (EXPERTS, TOP_K, HIDDEN, INTERMEDIATE)
    layer = moe_ops.FusedMoE(*sizes, device=device, params_dtype=torch.float32, **options)
    moe_ops.load_checkpoint(layer, weights(), progress=False)  # reads this rank's experts only
    return layer


def imbalance(state, ranks):
    """Load of the busiest rank over the mean load."""
    load = state.expert_load.clone()
    dist.all_reduce(load)  # every rank has counted its own tokens
    of_ranks = load.view(ranks, -1).sum(1).double()
    return float(of_ranks.max() / of_ranks.mean())


def main(device):
    """Run on the ranks of a group that is initialized."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    redundant = ranks - EXPERTS % ranks  # places for replicas: every rank has equally many experts
    layer = layer_of(
        device, dp_size=ranks, dp_rank=rank, ep_size=ranks, max_num_tokens=MOST,
        enable_eplb=True, num_redundant_experts=redundant,
    )  # fmt: skip
    state = moe_ops.EplbState.make(1, EXPERTS, redundant, device=device, group=dist.group.WORLD)
    layer.set_eplb_state(0, *state[1:])
    print(f"rank {rank} holds {layer.sizes.num_experts} of {EXPERTS + redundant} experts")

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    alone = layer_of(device)
    popular = -torch.arange(1.0, EXPERTS + 1, device=device).log()
    for step in range(4):  # ranks have different numbers of tokens; in one step rank 0 has none
        tokens = (24 * rank + 48 * (step + 1)) % MOST
        x, logits = (torch.randn(tokens, n, device=device) for n in (HIDDEN, EXPERTS))
        logits += popular
        for out in (layer(x, logits), compiled(x, logits)):
            torch.testing.assert_close(out, alone(x, logits))
        load = imbalance(state, ranks)
        if rank == 0:
            print(f"step {step}: the busiest rank has {load:.2f} times the mean load")
        # In a model the list has one entry per layer; `rebalance_steps` moves one layer at a time.
        state.rebalance_([layer.expert_tensors()], num_groups=1, num_nodes=1, num_gpus=ranks)
    print(f"rank {rank}: the results are those of one rank with all experts")


if __name__ == "__main__":
    rank = int(os.environ["LOCAL_RANK"])
    on_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    if on_gpus:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if on_gpus else "gloo")
    main(torch.device("cuda", rank) if on_gpus else torch.device("cpu"))
    dist.destroy_process_group()
