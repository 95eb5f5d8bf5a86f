"""Expert-parallel load balancing: count on the device, then place, replicate and move experts."""

import torch

import moe_ops

EXPERTS, REDUNDANT, RANKS, TOP_K, HIDDEN = 32, 8, 8, 4, 64


def imbalance(state):
    """Load of the busiest rank over the mean load; the experts of a rank are adjacent."""
    ranks = state.expert_load[0].view(RANKS, -1).sum(1).double()
    return float(ranks.max() / ranks.mean())


def main():
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    layer = moe_ops.FusedMoE(
        EXPERTS, TOP_K, HIDDEN, 32, enable_eplb=True, num_redundant_experts=REDUNDANT,
        device=device,
    )  # fmt: skip
    state = moe_ops.EplbState.make(1, EXPERTS, REDUNDANT, RANKS, device=device)  # one layer
    layer.set_eplb_state(
        0, state.expert_load, state.logical_to_physical_map, state.logical_replica_count
    )
    source = {
        "experts.gate_up_proj": torch.randn(EXPERTS, 64, HIDDEN) / 8,
        "experts.down_proj": torch.randn(EXPERTS, HIDDEN, 32) / 6,
    }
    moe_ops.load_checkpoint(layer, source, progress=False)  # loads the replicas too

    popular = -torch.arange(1.0, EXPERTS + 1, device=device).log()
    x, noise = (torch.randn(2048, n, device=device) for n in (HIDDEN, EXPERTS))
    before = layer(x, noise + popular)
    print(f"initial placement: the busiest rank has {imbalance(state):.2f} times the mean")

    # In a model the list has one entry per layer. Tensors keep their addresses: graphs stay valid.
    state.rebalance_([layer.expert_tensors()], num_groups=1, num_nodes=1, num_gpus=RANKS)
    after = layer(x, noise + popular)
    print(f"balanced: the busiest rank has {imbalance(state):.2f} times the mean")
    print(f"the layer's output has changed by {(after - before).norm() / before.norm():.2%}")


if __name__ == "__main__":
    main()
