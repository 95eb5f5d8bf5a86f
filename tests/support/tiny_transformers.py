"""A tiny random model for every experts class that transformers dispatches; a class for tests."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import math
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.moe import use_experts_implementation

import moe_ops.integrations.transformers  # noqa: F401 (the name in `Config`)

DECORATOR = "use_experts_implementation"
HIDDEN, EXPERTS, LENGTH = 32, 8, 11

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 8, "intermediate_size": 24, "moe_intermediate_size": 24,
    "num_experts": EXPERTS, "num_local_experts": EXPERTS, "n_routed_experts": EXPERTS,
    "moe_num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_topk": 2, "moe_k": 2,
    "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "qk_head_dim": 16, "n_group": 2, "topk_group": 2, "sliding_window": 8,
    "first_k_dense_replace": 0, "num_dense_layers": 0, "mlp_only_layers": [],
    "n_shared_experts": 1, "shared_expert_intermediate_size": 16, "swiglu_limit": 3.0,
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "index_topk": 4, "index_n_heads": 2, "index_head_dim": 16,
    "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "mamba_n_heads": 4,
    "mamba_d_head": 16, "mamba_n_groups": 1, "n_groups": 1,
}  # fmt: skip
"""Sizes that are set if a configuration has the attribute."""

_SPARSE = {"mlp_layer_types": ["sparse"] * 2}
_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
CHANGES: dict[str, dict[str, Any]] = {
    "BeamExperts": _SPARSE,
    "DeepseekOcr2TextExperts": _SPARSE,
    "DiffusionGemmaTextExperts": {"top_k_experts": 2, "global_head_dim": 8},
    "Ernie4_5_VLMoeMoeExperts": {
        **_SPARSE, "moe_intermediate_size": [24, 16], "rope_parameters": _ROPE,
    },
    "Gemma4TextExperts": {
        "enable_moe_block": True, "top_k_experts": 2, "vocab_size_per_layer_input": 64,
        "hidden_size_per_layer_input": 8, "global_head_dim": 8,
    },
    "Glm4vMoeTextExperts": {"rope_parameters": {**_ROPE, "partial_rotary_factor": 1.0}},
    "Glm5NextTextExperts": {
        **_SPARSE, "index_topk": 16, "qk_rope_head_dim": 0, "head_dim": 0,
        "layer_types": ["linear_attention", "deepseek_sparse_attention"], "linear_head_dim": 8,
        "linear_num_heads": 4,
    },
    "HYV4VLExperts": {**_SPARSE, "rope_parameters": _ROPE},
    "KimiLinearExperts": {"linear_attn_config": {"head_dim": 8, "num_heads": 4}},
    "Lfm2MoeExperts": {"layer_types": ["conv", "full_attention"]},
    "MiMoV2FlashExperts": {
        **_SPARSE, "num_key_value_heads": 2,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "Mistral4Experts": {"head_dim": 16},
    "Qwen3OmniMoeTalkerTextExperts": {"shared_expert_intermediate_size": 16},
    "ZayaExperts": {"num_experts_per_tok": 1},
}  # fmt: skip
"""Additional settings that an architecture needs."""

NO_TOKEN_EMBEDDING = {"Qwen3OmniMoeTalkerTextExperts"}
"""Models that take embeddings instead of token ids."""


@functools.cache
def decorated_classes() -> list[tuple[str, str]]:
    """``(module, class)`` of every experts class in the sources of the installed transformers."""
    found = []
    root = Path(transformers.__file__).parent
    for path in sorted(root.glob("models/*/modeling_*.py")):
        source = path.read_text()
        if f"@{DECORATOR}" not in source:
            continue
        module = f"transformers.models.{path.parent.name}.{path.stem}"
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef):
                decorators = [ast.unparse(d) for d in node.decorator_list]
                if any(d.startswith(DECORATOR) for d in decorators):
                    found.append((module, node.name))
    return found


def _has(config: Any, name: str) -> bool:
    try:
        return hasattr(config, name)
    except Exception:  # Gemma 4: an attribute with a value per layer
        return True


def _model_classes(module: Any) -> list[type[PreTrainedModel]]:
    """Text models, first the ones with a head."""
    models = [
        m
        for m in vars(module).values()
        if inspect.isclass(m)
        and issubclass(m, PreTrainedModel)
        and m.__module__ == module.__name__
        and inspect.isclass(m.config_class)
        and not m.config_class.sub_configs
        and not any(word in m.__name__ for word in ("Vision", "Audio", "PreTrained"))
    ]
    endings = ("ForCausalLM", "ForTokenClassification", "Model")
    return [m for e in endings for m in models if m.__name__.endswith(e)]


def build(
    module_name: str, class_name: str, device: str = "cpu"
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """A float32 model that contains the class, and arguments for a call."""
    module = importlib.import_module(module_name)
    experts_class = getattr(module, class_name)
    for model_class in _model_classes(module):
        config_class = model_class.config_class
        default = config_class()
        sizes = {name: value for name, value in SIZES.items() if _has(default, name)}
        if "sparse" in (getattr(default, "mlp_layer_types", None) or ()):
            sizes |= _SPARSE
        torch.manual_seed(0)
        model = model_class(config_class(**sizes | CHANGES.get(class_name, {}))).eval()
        if any(isinstance(m, experts_class) for m in model.modules()):
            fill(model)
            return model.to(device), arguments(class_name, device)
    raise LookupError(f"no text model of {module_name} has {class_name}")


def arguments(class_name: str, device: str) -> dict[str, Any]:
    g = torch.Generator().manual_seed(1)
    if class_name in NO_TOKEN_EMBEDDING:
        embeddings = torch.randn(2, LENGTH, HIDDEN, generator=g)
        return {"inputs_embeds": embeddings.to(device), "use_cache": False}
    ids = torch.randint(3, 60, (2, LENGTH), generator=g)
    return {"input_ids": ids.to(device), "use_cache": False}


@torch.no_grad()
def fill(model: nn.Module) -> None:
    """Fill uninitialized parameters, and scale experts so that gates reach their limits."""
    g = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        if not parameter.isfinite().all():
            parameter.normal_(std=0.02, generator=g)
    for experts in experts_of(model):
        for name, parameter in experts.named_parameters(recurse=False):
            if parameter.dim() == 3:
                rows = parameter.shape[1 if experts.is_transposed else 2]
                gain = 1.0 if name == "down_proj" else 4.0
                parameter.normal_(std=gain / math.sqrt(rows), generator=g)
            else:
                parameter.normal_(generator=g)


def experts_of(model: nn.Module) -> list[Any]:
    return [m for m in model.modules() if hasattr(m, "is_concatenated")]


E, K, H, I = 4, 2, 16, 24  # noqa: E741


class Config:
    _experts_implementation = "moe_ops"


@use_experts_implementation
class Experts(nn.Module):
    """An experts module with a configurable gate."""

    def __init__(self, config, **attributes):
        super().__init__()
        g = torch.Generator().manual_seed(0)
        self.num_experts = E
        self.gate_up_proj = nn.Parameter(torch.randn(E, 2 * I, H, generator=g))
        self.down_proj = nn.Parameter(torch.randn(E, H, I, generator=g))
        self.act_fn = nn.SiLU()
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, hidden_states, top_k_index, top_k_weights):
        raise AssertionError("eager")


def with_gate(gate, **attributes):
    """An experts module whose class has the given gate function."""
    return type("Gated", (Experts,), {"_apply_gate": gate})(Config, **attributes)


def routed(tokens, device="cpu"):
    g = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, H, generator=g)
    ids = torch.rand(tokens, E, generator=g).topk(K).indices
    return x.to(device), ids.to(device), torch.rand(tokens, K, generator=g).to(device)


QWEN3 = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
    "moe_intermediate_size": 24,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
}


def tiny_qwen3(device, **changes):
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(**{**QWEN3, **changes})
    return transformers.Qwen3MoeForCausalLM(config).to(device).eval()


def tiny_llama4(**changes):
    """A model of Llama 4, whose experts transformers does not dispatch."""
    sizes = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2,
        "pad_token_id": 0,
        "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8,
        "intermediate_size_mlp": 24, "num_local_experts": 8, "num_experts_per_tok": 2,
        "interleave_moe_layer_step": 1,
    }  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**sizes | changes)).eval()
    g = torch.Generator().manual_seed(1)
    for block in llama4_blocks(model):
        for weight in block.experts.parameters():
            weight.data.normal_(std=2 / weight.shape[1] ** 0.5, generator=g)
    return model


def llama4_blocks(model):
    return [m for m in model.modules() if type(m).__name__ == "Llama4TextMoe"]
