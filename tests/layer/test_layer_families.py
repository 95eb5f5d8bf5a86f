"""Families of models: the layer loaded from transformers' block, beside that block."""

import importlib

import pytest
import torch
from checkpoints import Experts, numbers, per_expert
from torch.nn.functional import linear

import moe_ops
from moe_ops.routing import gemma4_routing, llama4_routing, sparsemixer, topk_softmax
from moe_ops.testing import (
    Inputs,
    Problem,
    assert_layer_matches,
    bounded_oracle,
    reference_experts,
)

transformers = pytest.importorskip("transformers")

E, K, H, I = 16, 4, 64, 32  # noqa: E741
SIZES = {
    "hidden_size": H, "moe_intermediate_size": I, "num_experts": E, "num_local_experts": E,
    "n_routed_experts": E, "num_experts_per_tok": K, "moe_topk": K, "n_group": 4, "topk_group": 2,
    "n_shared_experts": 1, "expert_ffn_hidden_size": I, "num_attention_heads": 4,
    "num_key_value_heads": 4, "num_hidden_layers": 2, "_experts_implementation": "eager",
    "moe_shared_expert_intermediate_size": I,
}  # fmt: skip

GROUPED = {
    "use_grouped_topk": True, "num_expert_group": 4, "topk_group": 2, "scoring_func": "sigmoid",
    "routed_scaling_factor": 2.5, "e_score_correction_bias": True, "shared": True,
}  # fmt: skip
WIDTH = {"intermediate_size": I}
OAI = "swigluoai(clamp_limit=7.0,alpha=1.702)"
FAMILIES = {
    "mixtral.MixtralSparseMoeBlock": (WIDTH, {}),
    "qwen3_moe.Qwen3MoeSparseMoeBlock": ({"norm_topk_prob": True}, {}),
    "qwen2_moe.Qwen2MoeSparseMoeBlock": (
        {"norm_topk_prob": False, "shared_expert_intermediate_size": I},
        {"renormalize": False, "shared": "gated"},
    ),
    "qwen3_next.Qwen3NextSparseMoeBlock": (
        {"norm_topk_prob": True, "shared_expert_intermediate_size": I}, {"shared": "gated"},
    ),
    "olmoe.OlmoeSparseMoeBlock": (WIDTH | {"norm_topk_prob": False}, {"renormalize": False}),
    "deepseek_v3.DeepseekV3MoE": ({"routed_scaling_factor": 2.5}, GROUPED),
    "glm4_moe.Glm4MoeMoE": ({"routed_scaling_factor": 2.5}, GROUPED),
    "qwen3_5_moe.Qwen3_5MoeSparseMoeBlock": (
        {"shared_expert_intermediate_size": I}, {"shared": "gated"},
    ),
    "hunyuan_v1_moe.HunYuanMoEV1Moe": (WIDTH, {"shared": True}),
    "gpt_oss.GptOssMLP": (
        WIDTH,
        {"custom_routing_function": topk_softmax, "activation": OAI, "has_bias": True},
    ),
    "minimax_m2.MiniMaxM2SparseMoeBlock": (
        WIDTH, {"scoring_func": "sigmoid", "e_score_correction_bias": True},
    ),
    "phimoe.PhimoeSparseMoeBlock": (
        WIDTH | {"num_experts_per_tok": 2, "router_jitter_noise": 0.01},
        {"custom_routing_function": sparsemixer, "renormalize": False, "top_k": 2},
    ),
    "llama4.Llama4TextMoe": (
        WIDTH | {"num_experts_per_tok": 1},
        {"custom_routing_function": llama4_routing, "renormalize": False, "top_k": 1,
         "apply_router_weight_on_input": True, "shared": True},
    ),
    "nemotron_h.NemotronHMoE": (
        {"routed_scaling_factor": 2.5, "moe_latent_size": None, "mlp_hidden_act": "relu2"},
        GROUPED | {"activation": "relu2_no_mul"},
    ),
    "longcat_flash.LongcatFlashMoE": (
        {"zero_expert_num": 8, "routed_scaling_factor": 6.0, "hidden_act": "silu"},
        {"zero_expert_num": 8, "zero_expert_type": "identity", "renormalize": False,
         "routed_scaling_factor": 6.0, "e_score_correction_bias": True},
    ),
}  # fmt: skip


def build(name, changes):
    package, _, block = name.partition(".")
    module = importlib.import_module(f"transformers.models.{package}.modeling_{package}")
    block_class = getattr(module, block)
    configs = importlib.import_module(f"transformers.models.{package}.configuration_{package}")
    config_name = {"llama4": "Llama4TextConfig"}.get(package)
    candidates = [
        c for n, c in vars(configs).items() if n.endswith("Config") and n != "PreTrainedConfig"
    ]
    config_class = getattr(configs, config_name) if config_name else candidates[0]
    config = config_class()
    for key, value in (SIZES | changes).items():
        setattr(config, key, value)
    block = block_class(config).eval()
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in block.parameters():
            p.copy_(torch.randn(p.shape, generator=g) / max(p.shape[-1], 1) ** 0.5)
        for name, buffer in block.named_buffers():
            if "e_score" in name:
                buffer.copy_(torch.randn(buffer.shape, generator=g) * 0.1)
    return block


def logits_of(block, x):
    router = getattr(block, "gate", None) or block.router
    router = getattr(router, "classifier", getattr(router, "wg", router))
    return linear(x, router.weight, getattr(router, "bias", None))


def shared_of(block, kind, x):
    if not kind:
        return 0
    names = ("shared_experts", "shared_expert", "shared_mlp")
    module = next(getattr(block, name) for name in names if hasattr(block, name))
    gate = torch.sigmoid(block.shared_expert_gate(x)) if kind == "gated" else 1
    return gate * module(x)


def one_by_one(state):
    """As the family's checkpoints are: one tensor for each expert's projection."""
    out = {}
    for name, x in state.items():
        if name == "experts.gate_up_proj":
            for e, (gate, up) in enumerate(w.chunk(2) for w in x):
                out[f"experts.{e}.gate_proj.weight"] = gate
                out[f"experts.{e}.up_proj.weight"] = up
        elif name in ("experts.down_proj", "experts.up_proj"):
            for e, w in enumerate(x):
                out[f"experts.{e}.{name.split('.')[1]}.weight"] = w
        else:
            out[name] = x
    return out


@torch.no_grad()
@pytest.mark.parametrize("name", FAMILIES)
def test_block_of_transformers(name):
    changes, options = FAMILIES[name]
    block, options = build(name, changes), dict(options)
    kind, top_k = options.pop("shared", None), options.pop("top_k", K)
    if options.get("e_score_correction_bias"):
        options["e_score_correction_bias"] = torch.zeros(E + options.get("zero_expert_num", 0))
    state = block.state_dict()
    for key, buffer in block.named_buffers():
        state[key] = buffer
    sources = [state]
    if "gpt_oss" not in name and "llama4" not in name and "longcat" not in name:
        sources.append(one_by_one(state))
    x = torch.randn(9, H, generator=torch.Generator().manual_seed(1))
    out = block(x[None])
    out = (out[0] if isinstance(out, tuple) else out).view(9, H)
    exact = block.double()(x.double()[None])
    exact = (exact[0] if isinstance(exact, tuple) else exact).view(9, H)
    block.float()
    for source in sources:
        layer = moe_ops.FusedMoE(E, top_k, H, I, **options)
        report = moe_ops.load_checkpoint(layer, source, progress=False)
        assert report.is_complete
        mine = layer(x, logits_of(block, x)) + shared_of(block, kind, x)
        budget = 4 * (out - exact).abs().max() + 1e-6 * exact.abs().max()
        assert (mine - exact).abs().max() <= budget
        if kind:
            gate = kind == "gated"
            layer = moe_ops.FusedMoE(
                E, top_k, H, I, n_shared_experts=1, shared_expert_gate=gate, **options
            )
            assert moe_ops.load_checkpoint(layer, source, progress=False).is_complete
            mine = layer(x, logits_of(block, x))
            assert (mine - exact).abs().max() <= budget


def partial_gemma(hidden_states, logits, topk, renormalize):
    scale = torch.linspace(0.5, 2, logits.shape[1], device=logits.device)
    return gemma4_routing(hidden_states, logits, topk, renormalize, scale)


BIASED = {"scoring_func": "sigmoid", "e_score_correction_bias": torch.linspace(0, 0.3, E)}
STORED = {
    "gpt-oss": ("mxfp4_w4a16", FAMILIES["gpt_oss.GptOssMLP"][1]),
    "qwen3-fp8": ("fp8_block128", {}),
    "deepseek-v3": (
        "fp8_block128", BIASED | {"use_grouped_topk": True, "num_expert_group": 4, "topk_group": 2},
    ),
    "deepseek-v4": (
        "mxfp4_w4a16",
        BIASED | {"scoring_func": "sqrtsoftplus", "activation": "silu(clamp_limit=10.0)",
                  "routed_scaling_factor": 1.5},
    ),
    "kimi-k2": ("int4_w4a16_g32", BIASED | {"routed_scaling_factor": 2.827}),
    "minimax-m3": (
        None,
        BIASED | {"activation": "swigluoai_uninterleave(clamp_limit=7.0,alpha=1.702,beta=1.0)"},
    ),
    "nemotron-super": ("nvfp4_w4a16", BIASED | {"activation": "relu2_no_mul"}),
    "gemma-4": (None, {"activation": "gelu_tanh", "custom_routing_function": partial_gemma}),
    "step-3.5": ("fp8_channel", BIASED | {"activation": "swiglustep(clamp_limit=7.0)"}),
    "llama-4-int4": (
        "int4_w4a16_g128",
        {"custom_routing_function": llama4_routing, "renormalize": False,
         "apply_router_weight_on_input": True},
    ),
    "minimax-m2": ("fp8_block128", BIASED),
}  # fmt: skip


@pytest.mark.kernel
@pytest.mark.parametrize("name", STORED)
def test_stored_in_the_schemes_of_its_checkpoints(name, device):
    """Scaled down, on uneven sizes where the scheme allows them; the oracle has its numbers."""
    scheme, options = STORED[name]
    hidden, width, tokens = 96, 64, 7
    experts = Experts.random(E, hidden, width)
    experts = experts if scheme is None else experts.quantized(scheme)
    layer = moe_ops.FusedMoE(E, K, hidden, width, scheme=scheme, **options)
    source = per_expert(experts)
    g = torch.Generator().manual_seed(2)
    for projection, rows in (("gate_proj", width), ("up_proj", width), ("down_proj", hidden)):
        for e in range(E if options.get("has_bias") else 0):
            source[f"experts.{e}.{projection}.bias"] = torch.randn(rows, generator=g)
    if not layer.sizes.gated:
        source = {n: x for n, x in source.items() if "gate_proj" not in n}
    if "e_score_correction_bias" in options:
        source["gate.e_score_correction_bias"] = options["e_score_correction_bias"]
    moe_ops.load_checkpoint(layer, source, progress=False)
    layer = layer.to(device)
    x = torch.randn(tokens, hidden, generator=g).to(device)
    logits = torch.randn(tokens, E, generator=g).to(device)
    weights, ids, _ = layer.route(x, logits)
    on_input = layer.apply_router_weight_on_input
    problem = Problem(
        tokens, E, K, hidden, width, activation=layer.activation, on_input=on_input,
        scheme=layer.scheme.name,
    )  # fmt: skip
    rest = (weights, ids, None, layer.w13_bias, layer.w2_bias)
    stored = Inputs(x, layer.w13_weight, layer.w2_weight, *rest)
    config = layer.quant_method.get_fused_moe_quant_config(layer)
    exact = bounded_oracle(problem, Inputs(x, *numbers(layer), *rest), config)
    assert_layer_matches(layer(x, logits), exact, reference_experts(problem, stored, config))
