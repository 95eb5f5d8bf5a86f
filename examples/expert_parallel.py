"""Experts that are spread over ranks: every rank brings its own tokens and gets their results.

    torchrun --nproc-per-node 2 examples/expert_parallel.py

On GPUs (one for each rank, over NCCL) or on the CPU (over gloo), with any number of ranks.
"""

import os

import torch
import torch.distributed as dist

import moe_ops

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, MOST = 16, 4, 256, 128, 8


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


def main(device):
    """Run on the ranks of a group that is initialized."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    layer = layer_of(device, dp_size=ranks, dp_rank=rank, ep_size=ranks, max_num_tokens=MOST)
    print(f"rank {rank} holds {layer.sizes.num_experts} of {EXPERTS} experts")

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    alone = layer_of(device)
    for step in range(3):  # ranks have different numbers of tokens; in one step rank 0 has none
        tokens = (3 * rank + 4 * step) % MOST
        x, logits = (torch.randn(tokens, n, device=device) for n in (HIDDEN, EXPERTS))
        for out in (layer(x, logits), compiled(x, logits)):
            torch.testing.assert_close(out, alone(x, logits))
    print(f"rank {rank}: the results are those of one rank with all experts")


if __name__ == "__main__":
    rank = int(os.environ["LOCAL_RANK"])
    on_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    if on_gpus:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if on_gpus else "gloo")
    main(torch.device("cuda", rank) if on_gpus else torch.device("cpu"))
    dist.destroy_process_group()
