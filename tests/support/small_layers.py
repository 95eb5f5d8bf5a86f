"""Small layers on the CPU or the GPU, of every option, and what they are called with."""

import torch

import moe_ops

E, K, H, I, T = 8, 2, 32, 24, 9  # noqa: E741


def make(experts=E, top_k=K, hidden=H, **options):
    layer = moe_ops.FusedMoE(experts, top_k, hidden, I, **options)
    g = torch.Generator().manual_seed(0)
    for name, p in layer.named_parameters():
        if "shared_experts" not in name:
            p.data.copy_(torch.randn(p.shape, generator=g) * 0.2)
    return layer


def batch(tokens=T, logits=E, hidden=H):
    g = torch.Generator().manual_seed(1)
    return torch.randn(tokens, hidden, generator=g), torch.randn(tokens, logits, generator=g)


WORDS = torch.tensor([3, 0, 4, 4, 1, 2, 99, 0, 3])
TABLE = torch.tensor([[0, 1], [2, 3], [4, 5], [6, 7], [7, 0]])
KINDS = {
    "plain": {},
    "grouped": {
        "use_grouped_topk": True, "num_expert_group": 4, "topk_group": 2, "scoring_func": "sigmoid",
    },
    "identity": {"zero_expert_num": 4, "zero_expert_type": "identity"},
    "fused shared": {"n_shared_experts": 2},
    "gated shared": {"n_shared_experts": 2, "shared_expert_gate": True},
    "balanced": {"enable_eplb": True, "num_redundant_experts": 4},
    "one scale": {"quant_config": "fp8_tensor"},
    "on the input": {"apply_router_weight_on_input": True, "quant_config": "fp8_tensor"},
    "invariant": {"batch_invariant": True},
    "chunks": {"chunk_size": 4},
    "custom": {"custom_routing_function": moe_ops.routing.llama4_routing},
    "words": {"hash_indices_table": TABLE, "scoring_func": "sqrtsoftplus"},
}  # fmt: skip


def filled(device="cpu", **options):
    """A layer of any scheme, with weights of random numbers."""
    layer = make(**options)
    if layer.scheme.weight is not None:
        g = torch.Generator().manual_seed(0)
        for which in ("w13", "w2"):
            param = getattr(layer, f"{which}_weight")
            w = torch.randn(param.shape, generator=g) * 0.2
            stored = moe_ops.quantize_weight(w, layer.scheme)
            param.data.copy_(stored.data)
            scale = getattr(layer, f"{which}_weight_scale").data
            scale.copy_(stored.scale[:, None] if scale.dim() > stored.scale.dim() else stored.scale)
    layer.to(device)
    if layer.enable_eplb:
        state = moe_ops.EplbState.make(1, E, 4, device=device)
        for name in ("w13_weight", "w2_weight"):
            w = getattr(layer, name).data
            w.copy_(w[state.physical_to_logical_map[0]])
        layer.set_eplb_state(0, *state[1:])
    return layer


def arguments(layer, device="cpu", tokens=T):
    """Tokens and logits, and the words that a hash table asks for."""
    x, logits = (t.to(device) for t in batch(tokens, layer.num_logits))
    words = WORDS[:tokens].clone().to(device) if layer.hash_indices_table is not None else None
    return (x, logits), {"input_ids": words}


class Int64Only(moe_ops.pipeline.MoEPrepareAndFinalizeNoEP):
    def topk_indices_dtype(self):
        return torch.int64


def kernel_of(layer, part=None, **options):
    experts = moe_ops.pipeline.TritonExperts(
        layer.moe_config, moe_ops.FusedMoEQuantConfig("unquantized")
    )
    part = moe_ops.pipeline.MoEPrepareAndFinalizeNoEP() if part is None else part
    return moe_ops.FusedMoEKernel(part, experts, **options)


def one_expert(hidden_states, logits, k, renormalize):
    """Every token to expert 0 and to no other."""
    ids = torch.zeros(len(logits), k, dtype=torch.int32, device=logits.device)
    ids[:, 1:] = -1
    return torch.ones(ids.shape, device=logits.device), ids
