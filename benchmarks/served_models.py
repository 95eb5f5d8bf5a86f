"""Checkpoints of real sizes with random numbers, made on the GPU tensor by tensor as vLLM asks.

Every tensor has the name, shape and dtype that a published checkpoint has. Weights have a standard
deviation of about 1 / sqrt(inputs), so that a model's logits differ from token to token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from whole_models import SDPA, SEED, SPECS, Spec

NIBBLES = 2.93
"""The standard deviation of e2m1 numbers whose bits are random."""
INTEGERS = 4.61
"""The standard deviation of int4 numbers whose bits are random."""
LOGITS = 3.0
"""The standard deviation of logits."""
CALM = 4
"""gpt-oss's second weights are smaller by this power of two: its activation passes on more than
SiLU, few experts share a token, and a difference of rounding would soon change all tokens."""
_MIXTRAL = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8,
    "num_experts_per_tok": 2, "max_position_embeddings": 32768,
}  # fmt: skip
_DEEPSEEK = {
    "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256,
    "routed_scaling_factor": 2.5, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "qk_nope_head_dim": 128, "n_group": 8, "topk_group": 4,
    "num_experts_per_tok": 8, "first_k_dense_replace": 1, "norm_topk_prob": True,
    "max_position_embeddings": 4096, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
}  # fmt: skip
_TINY = {
    **SPECS["tiny-qwen3"].sizes, "hidden_size": 128, "moe_intermediate_size": 128, "head_dim": 64,
}  # fmt: skip
MODELS = {
    "tiny": SPECS["tiny-qwen3"]._replace(sizes=_TINY),
    "qwen3-30b-a3b": SPECS["qwen3-30b-a3b"],
    "mixtral-8x7b": Spec(transformers.MixtralConfig, _MIXTRAL, SDPA),
    "gpt-oss-120b": SPECS["gpt-oss-120b"],
    "deepseek-v3": Spec(transformers.DeepseekV3Config, _DEEPSEEK, SDPA, "fp8_block128"),
}
PROJECTIONS = {
    "mixtral": ("block_sparse_moe", ("w1", "w3", "w2")),
    "qwen3_moe": ("mlp", ("gate_proj", "up_proj", "down_proj")),
    "deepseek_v3": ("mlp", ("gate_proj", "up_proj", "down_proj")),
}
"""Type of a model -> its MoE block, and an expert's gate, up and down, as checkpoints name them."""


class Format(NamedTuple):
    """How a checkpoint holds the weights of experts."""

    tensors: Callable[[tuple[int, ...]], dict[str, Tensor]]
    """Random tensors of a weight ``(.., rows, columns)`` by the ends of their names."""
    config: Callable[[list[str]], dict[str, Any]] | None
    """``quantization_config``, from the names of linear layers that are not quantized."""


def compressed(ignore: list[str], format: str, **weights: Any) -> dict[str, Any]:
    """What compressed-tensors writes about weights of all linear layers but ``ignore``."""
    group = {"targets": ["Linear"], "weights": {"symmetric": True, "strategy": "group", **weights},
             "input_activations": None}  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "format": format, "ignore": ignore,
        "quantization_status": "compressed", "config_groups": {"group_0": group},
    }  # fmt: skip


def modelopt(ignore: list[str]) -> dict[str, Any]:
    """What ModelOpt writes about NVFP4 weights of all linear layers but ``ignore``."""
    return {
        "quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ignore,
    }  # fmt: skip


def _fp8(ignore: list[str]) -> dict[str, Any]:
    return {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
        "weight_block_size": [128, 128], "modules_to_not_convert": ignore,
    }  # fmt: skip


def _plain(shape: tuple[int, ...]) -> dict[str, Tensor]:
    return {"weight": torch.randn(shape, dtype=torch.bfloat16) / math.sqrt(shape[-1])}


def _blocks(shape: tuple[int, ...]) -> dict[str, Tensor]:
    *many, rows, columns = shape
    data = torch.randn(shape, dtype=torch.bfloat16).to(torch.float8_e4m3fn)
    scales = _about(1 / math.sqrt(columns), (*many, -(-rows // 128), -(-columns // 128)))
    return {"weight": data, "weight_scale_inv": scales}


def _integers(shape: tuple[int, ...]) -> dict[str, Tensor]:
    *many, rows, columns = shape
    words = _bits((*many, rows, columns // 2)).view(torch.int32)
    scales = _about(1 / INTEGERS / math.sqrt(columns), (*many, rows, columns // 128))
    sizes = torch.tensor([rows, columns]).repeat(*many, 1)
    return {
        "weight_packed": words, "weight_scale": scales.to(torch.bfloat16), "weight_shape": sizes,
    }  # fmt: skip


def _nvfp4(shape: tuple[int, ...]) -> dict[str, Tensor]:
    *many, rows, columns = shape
    scales = _about(1.0, (*many, rows, columns // 16)).to(torch.float8_e4m3fn)
    return {
        "weight": _bits((*many, rows, columns // 2)), "weight_scale": scales,
        "weight_scale_2": torch.full(many, 1 / NIBBLES / math.sqrt(columns)),
        "input_scale": torch.ones(many),
    }  # fmt: skip


def _mxfp4(shape: tuple[int, ...]) -> dict[str, Tensor]:
    *many, rows, columns = shape
    lower = round(math.log2(1 / NIBBLES / math.sqrt(2.5 * columns))) + 127  # (1 + 4) / 2 is 2.5
    scales = torch.randint(lower, lower + 2, (*many, rows, columns // 32))
    blocks = _bits((*many, rows, columns // 32, 16))
    return {"blocks": blocks, "scales": scales.to(torch.uint8)}


def _bits(shape: tuple[int, ...]) -> Tensor:
    return torch.randint(256, shape, dtype=torch.uint8)


def _about(value: float, shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape).uniform_(0.75 * value, 1.25 * value)


FORMATS = {
    "bf16": Format(_plain, None),
    "fp8_block128": Format(_blocks, _fp8),
    "int4_w4a16_g128": Format(
        _integers,
        lambda ignore: compressed(ignore, "pack-quantized", num_bits=4, type="int", group_size=128),
    ),
    "nvfp4_w4a16": Format(_nvfp4, modelopt),
    "mxfp4_w4a16": Format(_mxfp4, lambda _: {"quant_method": "mxfp4"}),
}
"""Scheme -> the format of its checkpoints: DeepSeek's fp8, compressed-tensors' integers, ModelOpt's
NVFP4, and gpt-oss's MXFP4."""


def shell(model: str, layers: int) -> Any:
    """The transformers model on ``meta``."""
    config = MODELS[model].config(layers)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def described(built: Any, scheme: str) -> dict[str, Any]:
    """What ``config.json`` says of a checkpoint."""
    config = {**built.config.to_dict(), "architectures": [type(built).__name__]}
    quantized = FORMATS[scheme].config
    if quantized is None:
        return config
    linear = [name for name, module in built.named_modules() if isinstance(module, nn.Linear)]
    gates = [f"model.layers.{i}.mlp.gate" for i in range(built.config.num_hidden_layers)]
    return {**config, "quantization_config": quantized([*linear, *gates])}


def tensors(built: Any, scheme: str) -> Iterator[tuple[str, Tensor]]:
    """All tensors of a checkpoint with their names: equal arguments give equal tensors.

    They are made on the default device.
    """
    torch.manual_seed(SEED)
    for name, tensor in built.state_dict().items():
        if ".experts." in name:
            yield from _expert_tensors(name, tuple(tensor.shape), built.config, FORMATS[scheme])
        else:
            yield _renamed(name, built.config), _other(name, tuple(tensor.shape))


def _renamed(name: str, config: Any) -> str:
    block, _ = PROJECTIONS.get(config.model_type, ("mlp", ()))
    return name.replace(".mlp.", f".{block}.")


def _other(name: str, shape: tuple[int, ...]) -> Tensor:
    """A tensor outside of experts: biases and sinks are small, norms are ones."""
    if "norm" in name:
        return torch.ones(shape, dtype=torch.bfloat16)
    if len(shape) == 1:
        return torch.randn(shape, dtype=torch.bfloat16) / 10
    if "embed_tokens" in name:
        return torch.randn(shape, dtype=torch.bfloat16)
    return _plain(shape)["weight"] * (LOGITS if "lm_head" in name else 1)


def _expert_tensors(
    name: str, shape: tuple[int, ...], config: Any, format: Format
) -> Iterator[tuple[str, Tensor]]:
    """The tensors that a checkpoint has for one of transformers' tensors of all experts."""
    if config.model_type == "gpt_oss":
        calm = CALM if ".down_proj" in name else 1
        if "bias" in name:
            yield name, torch.randn(shape, dtype=torch.bfloat16) / (10 * calm)
        else:
            made = format.tensors((shape[0], shape[2], shape[1]))
            yield f"{name}_blocks", made["blocks"]
            yield f"{name}_scales", made["scales"] - int(math.log2(calm))
        return
    for projection, rows in _projections(name, shape, config):
        made = format.tensors((shape[0], rows, shape[2]))
        for expert in range(shape[0]):
            place = _place(name, config, expert, projection)
            yield from ((f"{place}.{end}", tensor[expert]) for end, tensor in made.items())


def _projections(name: str, shape: tuple[int, ...], config: Any) -> list[tuple[str, int]]:
    """A checkpoint's matrices in one of transformers' tensors of all experts, and their rows."""
    _, (gate, up, down) = PROJECTIONS[config.model_type]
    names = (gate, up) if "gate_up" in name else (down,)
    return [(projection, shape[1] // len(names)) for projection in names]


def _place(name: str, config: Any, expert: int, projection: str) -> str:
    return f"{_renamed(name, config).rpartition('.')[0]}.{expert}.{projection}"


RANK = 16
"""Rank of the adapters."""
ADAPTER = {
    "peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "bias": "none", "task_type": "CAUSAL_LM",
    "target_modules": ["gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"],
}  # fmt: skip
"""``adapter_config.json`` of all adapters."""


def adapter(built: Any, number: int) -> dict[str, Tensor]:
    """The tensors of an adapter of all experts; ``number`` makes them differ.

    Raises:
        ValueError: the experts of the model are no matrices of their own in checkpoints.
    """
    if built.config.model_type not in PROJECTIONS:
        kind = built.config.model_type
        raise ValueError(f"adapters are made for {sorted(PROJECTIONS)}, got {kind!r}")
    torch.manual_seed(SEED + number)
    made = {}
    for name, tensor in built.state_dict().items():
        if ".experts." not in name:
            continue
        experts, _, columns = tensor.shape
        for projection, rows in _projections(name, tuple(tensor.shape), built.config):
            a = _plain((experts, RANK, columns))["weight"]
            b = _plain((experts, rows, RANK))["weight"] / 4
            for expert in range(experts):
                place = f"base_model.model.{_place(name, built.config, expert, projection)}"
                made |= {f"{place}.lora_A.weight": a[expert], f"{place}.lora_B.weight": b[expert]}
    return made
