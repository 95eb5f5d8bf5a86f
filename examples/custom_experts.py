"""Your own experts, and your own sum over a token's slots, inside the modular kernel."""

import torch
from torch.nn.functional import linear, silu

import moe_ops
from moe_ops import pipeline


class MeanOverSlots(pipeline.TopKWeightAndReduce):
    """The mean of each token's rows ``(T, k, H)``, whatever the router's weights are."""

    def apply(self, output, rows, topk_weights, topk_ids, apply_router_weight_on_input):
        return rows.mean(dim=1)


class DenseExperts(pipeline.FusedMoEExpertsModular):
    """Run every expert on every token, then pick the rows that each token was routed to."""

    SUPPORTS = pipeline.Supports(activations=(moe_ops.MoEActivation.SILU,), parallel=frozenset())
    reduction = pipeline.TopKWeightAndReduceContiguous()

    @staticmethod
    def activation_format():
        return pipeline.FusedMoEActivationFormat.Standard

    def supports_expert_map(self):
        return False

    def workspace_shapes(self, M, N, K, topk, global_num_experts, local_num_experts, *_):
        return (local_num_experts, M, max(N, K)), (local_num_experts, M, N // 2), (M, topk, K)

    def finalize_weight_and_reduce_impl(self):
        return self.reduction

    def apply(self, x, w1, w2, topk_weights, topk_ids, *_):
        gate, up = torch.stack([linear(x, w) for w in w1]).chunk(2, dim=-1)
        rows = torch.stack([linear(h, w) for h, w in zip(silu(gate) * up, w2, strict=True)])
        slots = torch.arange(topk_ids.numel(), device=x.device).view_as(topk_ids)
        per_row = max(topk_ids.numel() // max(len(x), 1), 1)  # k; or 1, with weights on the input
        return rows[topk_ids.long(), slots // per_row]


def main():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = (8, 2, 64, 32, 8)  # E, k, H, I, El
    config = moe_ops.FusedMoEConfig(*sizes, "silu", device, moe_ops.RoutingMethodType.Default)
    shapes = ((5, 64), (8, 64, 64), (8, 64, 32))
    x, w1, w2 = (torch.randn(s, device=device, dtype=torch.bfloat16) for s in shapes)
    weights, ids = moe_ops.fused_topk(x, torch.randn(5, 8, device=device), 2, False)

    experts = DenseExperts(config, moe_ops.FusedMoEQuantConfig("unquantized"))
    mine = moe_ops.FusedMoEKernel(pipeline.MoEPrepareAndFinalizeNoEP(), experts)
    library = moe_ops.select_kernel(config, "unquantized", experts=pipeline.TritonExperts)
    sums = {pipeline.TopKWeightAndReduceContiguous(): weights, MeanOverSlots(): 0 * weights + 0.5}
    for reduction, same in sums.items():
        experts.reduction = reduction
        expected = library.apply(x, w1, w2, same, ids)
        difference = (mine.apply(x, w1, w2, weights, ids) - expected).norm() / expected.norm()
        print(f"{type(reduction).__name__}: {difference:.2%} from TritonExperts")


if __name__ == "__main__":
    main()
