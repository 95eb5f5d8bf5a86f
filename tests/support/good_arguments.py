"""Arguments that every public function takes, by name."""

import torch

import moe_ops

T, H, I, E, K = 6, 32, 32, 4, 2  # noqa: E741
X, LOGITS = torch.zeros(T, H), torch.zeros(T, E)
W1, W2 = torch.zeros(E, 2 * I, H), torch.zeros(E, H, I)
WEIGHTS, IDS = torch.zeros(T, K), torch.zeros(T, K, dtype=torch.int32)
MAP = torch.arange(E, dtype=torch.int32)
INT8_ROWS = {
    "A": torch.zeros(E, T, H), "A_scale": None, "num_tokens": T, "E": E, "N": 1,
    "expert_num_tokens": torch.ones(E, dtype=torch.int32), "qtype": torch.int8,
    "per_act_token_quant": False,
}  # fmt: skip
GOOD = {
    moe_ops.fused_experts: dict(
        hidden_states=X, w1=W1, w2=W2, topk_weights=WEIGHTS, topk_ids=IDS, global_num_experts=-1,
        apply_router_weight_on_input=False, batch_invariant=False,
    ),
    moe_ops.fused_moe: dict(
        hidden_states=X, w1=W1, w2=W2, gating_output=LOGITS, topk=K, renormalize=True,
        batch_invariant=False,
    ),
    moe_ops.fused_topk: dict(
        hidden_states=X, gating_output=LOGITS, topk=K, renormalize=True, scoring_func="softmax",
        routed_scaling_factor=1.0,
    ),
    moe_ops.grouped_topk: dict(
        hidden_states=X, gating_output=LOGITS, topk=K, renormalize=True, num_expert_group=2,
        topk_group=1,
    ),
    moe_ops.select_experts: dict(
        hidden_states=X, router_logits=LOGITS, top_k=K, use_grouped_topk=False, renormalize=True,
        custom_routing_function=None, num_fused_shared_experts=0,
    ),
    moe_ops.routing.adjust_routing: dict(
        topk_weights=WEIGHTS, topk_ids=IDS, num_experts=E, per_expert_scale=torch.ones(E),
        num_shared_experts=1, shared_expert_weight=1.0,
        is_padding=torch.zeros(T, dtype=torch.bool),
    ),
    moe_ops.routing.zero_experts: dict(
        hidden_states=X, topk_weights=WEIGHTS, topk_ids=IDS, num_experts=E, skipped_id=0
    ),
    moe_ops.routing.hash_topk: dict(
        hidden_states=X, gating_output=LOGITS, input_ids=IDS[:, 0], hash_indices_table=IDS,
        renormalize=True, routed_scaling_factor=1.0,
    ),
    moe_ops.moe_align_block_size: dict(
        topk_ids=IDS, block_size=16, num_experts=E, expert_map=MAP, pad_sorted_ids=False
    ),
    moe_ops.functional.count_expert_num_tokens: dict(
        topk_ids=IDS, num_local_experts=E, expert_map=MAP
    ),
    moe_ops.moe_permute: dict(
        hidden_states=X, a1q_scale=torch.ones(T, 1), topk_ids=IDS, n_expert=E, n_local_expert=-1,
        expert_map=MAP,
    ),
    moe_ops.moe_unpermute: dict(
        permuted_hidden_states=torch.zeros(T * K, H), topk_weights=WEIGHTS, inv_permuted_idx=IDS,
        expert_first_token_offset=torch.zeros(E + 1, dtype=torch.int64),
    ),
    moe_ops.moe_fused_mul_sum: dict(
        inputs=torch.zeros(T, K, H), topk_weights=WEIGHTS, outputs=torch.zeros(T, H), topk_ids=IDS,
        expert_map=MAP, num_valid_tokens=torch.tensor([T]),
    ),
    moe_ops.apply_moe_activation: dict(activation="silu", x=X),
    moe_ops.moe_kernel_quantize_input: dict(
        A=X, A_scale=torch.ones(T, 1), quant_dtype=torch.int8, per_act_token_quant=True,
        block_shape=None,
    ),
    moe_ops.parallel.eplb_map_to_physical_and_record: dict(
        topk_ids=IDS, expert_load_view=MAP.clone(), logical_to_physical_map=MAP[:, None],
        logical_replica_count=torch.ones(E, dtype=torch.int32), record_enabled=torch.tensor(True),
        num_unpadded_tokens=torch.tensor(T),
    ),
    moe_ops.parallel.remap_topk_to_local: dict(topk_ids=IDS, expert_map=MAP, dtype=torch.int32),
    moe_ops.parallel.initial_physical_to_logical_map: dict(
        num_experts=E, num_redundant_experts=0, ep_size=1
    ),
    moe_ops.parallel.compute_logical_maps: dict(
        physical_to_logical_map=MAP[None], num_logical_experts=E
    ),
    moe_ops.functional.batched_moe_kernel_quantize_input: INT8_ROWS,
    moe_ops.parallel.rebalance_experts: dict(
        weight=torch.ones(1, E), num_replicas=E, num_groups=1, num_nodes=1, num_gpus=1
    ),
    moe_ops.parallel.determine_expert_map: dict(ep_size=2, ep_rank=0, global_num_experts=E),
    moe_ops.parallel.get_compressed_expert_map: dict(expert_map=IDS[0]),
    moe_ops.parallel.make_expert_params_mapping: dict(
        ckpt_gate_proj_name="g", ckpt_down_proj_name="d", ckpt_up_proj_name="u", num_experts=E
    ),
    moe_ops.quantize_weight: dict(w=W1, scheme="fp8_channel"),
    moe_ops.dequantize_weight: dict(
        q=moe_ops.quantize_weight(W1, "fp8_channel"), scheme="fp8_channel", dtype=torch.float32
    ),
    moe_ops.workspace_nbytes: dict(
        num_tokens=T, hidden_size=H, intermediate_size=I, num_experts=E, top_k=K,
        dtype=torch.float32, chunk_size=None, batch_invariant=False,
    ),
    moe_ops.warmup: dict(
        w1=W1, w2=W2, top_k=K, num_tokens=T, topk_weights_dtype=torch.float32, hidden_dtype=None,
        topk_ids_dtype=torch.int32, router_logits_dtype=None, quant_config=None,
    ),
    moe_ops.FusedMoEParallelConfig: dict(
        tp_size=1, tp_rank=0, dp_size=1, ep_size=1, sp_size=1, use_ep=False, enable_eplb=False,
        all2all_backend="allgather_reducescatter",
    ),
    moe_ops.FusedMoEConfig: dict(
        num_experts=E, experts_per_token=K, hidden_dim=H, intermediate_size=I, num_local_experts=E,
        activation="silu", device="cpu", routing_method=moe_ops.RoutingMethodType.Default,
        moe_parallel_config=moe_ops.FusedMoEParallelConfig(), in_dtype=torch.bfloat16,
        renormalize=True, scoring_func="softmax", router_logits_dtype=None, has_bias=False,
        is_act_and_mul=True, max_num_tokens=None, batch_invariant=False,
    ),
    moe_ops.FusedMoE: dict(
        num_experts=E, top_k=K, hidden_size=H, intermediate_size=I, params_dtype=None,
        renormalize=True, quant_config=None, ep_size=1, batch_invariant=False, chunk_size=None,
        moe_parallel_config=None, device=None, capacity_factor=1.0,
        custom_routing_function=None, shared_experts=None, e_score_correction_bias=None,
    ),
}  # fmt: skip
