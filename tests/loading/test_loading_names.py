"""Names of tensors, as the checkpoints of the field have them behind the name of their layer."""

import pytest
from table_items import every_row

from moe_ops.loading.names import Piece, is_beside_experts, parse, router_tensor, suffix_of

EXPERTS = {
    "experts.7.w1.weight": ("w1", "weight", 7),  # Mixtral, Phi-3.5, MiniMax
    "experts.7.w3.weight": ("w3", "weight", 7),
    "experts.127.gate_proj.weight_scale_inv": ("w1", "scale", 127),  # DeepSeek, Qwen
    "experts.0.down_proj.weight": ("w2", "weight", 0),
    "3.up_proj.weight": ("w3", "weight", 3),
    "experts.0.w2.qscale_weight": ("w2", "scale", 0),  # Mistral
    "experts.0.w2.scale": ("w2", "scale", 0),  # DeepSeek-V4
    "experts.0.up_proj.weight_packed": ("w3", "weight", 0),  # compressed-tensors
    "experts.0.up_proj.weight_global_scale": ("w3", "global_scale", 0),
    "experts.0.up_proj.weight_scale_2": ("w3", "global_scale", 0),  # ModelOpt
    "experts.0.up_proj.input_scale": ("w3", "input_scale", 0),
    "experts.0.down_proj.qweight": ("w2", "weight", 0),  # AWQ, GPTQ
    "experts.0.down_proj.qzeros": ("w2", "zero_point", 0),
    "experts.0.down_proj.g_idx": ("w2", "g_idx", 0),
    "experts.gate_up_proj": ("w13", "weight", None),  # transformers, Llama 4
    "experts.gate_up_proj_blocks": ("w13", "weight", None),  # gpt-oss
    "experts.gate_up_proj_scales": ("w13", "scale", None),
    "experts.gate_up_proj_bias": ("w13", "bias", None),
    "experts.down_proj_scale_inv": ("w2", "scale", None),
    "experts.gate_up_proj_activation_scale": ("w13", "input_scale", None),
    "input_linear.weight": ("w13", "weight", None),  # Granite
    "output_linear.weight": ("w2", "weight", None),
    "gate_proj.weight": ("w1", "weight", None),  # Step-3.5
    "w13_weight": ("w13", "weight", None),  # a layer of this library
    "w2_weight_zero_point": ("w2", "zero_point", None),
    "experts.1.linear.weight": ("w1", "weight", 1),  # Grok-1
    "experts.1.linear_v.weight": ("w3", "weight", 1),
    "experts.1.linear_1.weight": ("w2", "weight", 1),
    "experts.gate_up_proj_scale_2": ("w13", "global_scale", None),  # ModelOpt, all experts
    "experts.down_proj_packed": ("w2", "weight", None),  # LLM Compressor, all experts
    "experts.down_proj_zero_point": ("w2", "zero_point", None),
    "experts.gate_up_proj_shape": ("w13", "shape", None),
    "experts.w13_weight.weight_packed": ("w13", "weight", None),
    "experts.w2_weight.weight_global_scale": ("w2", "global_scale", None),
    "experts.0.w1.qscale_act": ("w1", "input_scale", 0),
    "experts.0.up_proj.weight_chan_scale": ("w3", "channel_scale", 0),
    "experts.0.up_proj.input_global_scale": ("w3", "input_scale", 0),
}


@every_row("name", EXPERTS)
def test_experts(name):
    shard, kind, expert = EXPERTS[name]
    piece = parse(name)
    assert isinstance(piece, Piece)
    assert (piece.shard, piece.kind, piece.expert) == (shard, kind, expert)
    assert not is_beside_experts(name)


def test_shared_experts():
    """They may be of the layer, or of somebody else."""
    for name in ("shared_experts.up_proj.weight", "shared_expert.up_proj.weight"):
        assert parse(name) == Piece("w3", "weight", "weight", None, is_shared=True)
        assert is_beside_experts(name)


@pytest.mark.parametrize(
    "name",
    ["gate.weight", "router.weight", "router.classifier.weight", "gate.wg.weight", "gate.bias",
     "shared_expert.gate_proj.weight", "shared_expert_gate.weight", "share_expert.up_proj.weight",
     "shared_mlp.gate_and_up_proj.weight", "fc1_latent_proj.weight",
     "gate.e_score_correction_bias", "e_score_correction_bias", "expert_bias",
     "moe_statics.e_score_correction_bias"],
)  # fmt: skip
def test_beside_the_experts(name):
    assert is_beside_experts(name)
    is_bias = "correction" in name or name in ("expert_bias", "gate.bias")
    found = router_tensor(name)
    assert (found is not None and found.buffer == "e_score_correction_bias") is is_bias


@every_row(
    "name",
    ["experts.3.gate_proj", "experts.3.gate_proj.lora_A.weight", "experts.x.w1.weight", "",
     "norm.weight", "experts.3.w4.weight", "experts.w13_weights",
     "model.layers.0.mlp.experts.0.w1.weight"],
)  # fmt: skip
def test_unknown(name):
    assert parse(name) is None and not is_beside_experts(name)


def test_endings():
    assert suffix_of("experts.0.w1.weight_scale_inv") == "weight_scale_inv"
    assert suffix_of("w13_weight_scale_2") == "weight_scale_2"
    assert suffix_of("something") == ""
