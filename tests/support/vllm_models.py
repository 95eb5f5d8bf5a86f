"""Small checkpoints for vLLM: quantized experts, and the same numbers in bf16.

Scales are powers of two where a format's are floats, so that dequantized weights are exact in bf16.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from served_models import compressed, modelopt
from torch import Tensor
from vllm_formats import awq, rows_first

from moe_ops import dequantize_weight, quantize_weight
from moe_ops.demo import MODEL
from moe_ops.tensors import QTensor

LEFT_OUT = ("self_attn", "mlp.gate", "lm_head")
IGNORED = ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"]
"""`LEFT_OUT`, written as in compressed-tensors' configurations."""


class Format(NamedTuple):
    """A format of checkpoints."""

    scheme: str
    tensors: Callable[[QTensor], dict[str, Tensor]]
    """A projection's tensors by the ends of their names, of a weight with one expert."""
    config: dict[str, Any]
    """What ``config.json`` says."""


def int4_tensors(q: QTensor) -> dict[str, Tensor]:
    """compressed-tensors' integers."""
    made = rows_first(q, 4)
    shape = torch.tensor([q.data.shape[1], q.data.shape[2] * 2])
    return {"weight_packed": made.weight[0], "weight_scale": made.scale[0], "weight_shape": shape}


def awq_tensors(q: QTensor) -> dict[str, Tensor]:
    """AWQ's integers."""
    made = awq(q, 4)
    assert made.zeros is not None
    return {"qweight": made.weight[0], "scales": made.scale[0], "qzeros": made.zeros[0]}


def nvfp4_tensors(q: QTensor) -> dict[str, Tensor]:
    """ModelOpt's NVFP4."""
    assert q.global_scale is not None
    return {
        "weight": q.data[0], "weight_scale": q.scale[0], "weight_scale_2": q.global_scale[0],
        "input_scale": torch.tensor(1.0),
    }  # fmt: skip


def mxfp8_tensors(q: QTensor) -> dict[str, Tensor]:
    """compressed-tensors' MXFP8."""
    return {"weight": q.data[0], "weight_scale": q.scale[0]}


FORMATS = {
    "compressed-tensors int4": Format(
        "int4_w4a16_g32", int4_tensors,
        compressed(IGNORED, "pack-quantized", num_bits=4, type="int", group_size=32),
    ),
    "AWQ": Format("int4_w4a16_g64_zp", awq_tensors, {
        "quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm",
        "modules_to_not_convert": list(LEFT_OUT),
    }),
    "ModelOpt NVFP4": Format(
        "nvfp4_w4a16", nvfp4_tensors, modelopt([f"*{name}*" for name in LEFT_OUT])
    ),
    "compressed-tensors MXFP8": Format(
        "|fp8:1x32:e8m0", mxfp8_tensors,
        compressed(IGNORED, "mxfp8-quantized", num_bits=8, type="float", group_size=32,
                   scale_dtype="torch.uint8"),
    ),
}  # fmt: skip


def quantized_demo(folder: Path, name: str) -> tuple[Path, Path]:
    """Checkpoints of the demo's model: quantized experts, and what these are in bf16."""
    from safetensors.torch import load_file

    format, config = FORMATS[name], json.loads((MODEL / "config.json").read_text())
    packed, plain = {}, {}
    for key, weight in load_file(MODEL / "model.safetensors").items():
        if ".mlp.experts." not in key:
            packed[key] = plain[key] = weight
            continue
        q = exact(quantize_weight(weight[None], format.scheme))
        plain[key] = dequantize_weight(q, format.scheme).to(weight.dtype)[0]
        stem = key.removesuffix("weight")
        packed |= {stem + end: tensor for end, tensor in format.tensors(q).items()}
    quantized = {**config, "quantization_config": format.config}
    return checkpoint(folder / "packed", packed, quantized), checkpoint(
        folder / "plain", plain, config
    )


def exact(q: QTensor) -> QTensor:
    """A weight whose float scales are powers of two."""
    rounded = [
        x.log2().round().exp2() if x is not None and x.dtype in (torch.bfloat16, torch.float32)
        else x
        for x in q
    ]  # fmt: skip
    return QTensor(*rounded)


def int8_demo(folder: Path) -> Path:
    """A checkpoint in bf16 whose experts vLLM quantizes to int8 without a loss."""
    from safetensors.torch import load_file

    weights = load_file(MODEL / "model.safetensors")
    for name, weight in weights.items():
        if ".mlp.experts." in name:
            rows = weight.float()
            largest = rows.abs().amax(1, keepdim=True)
            step = (largest / 127).log2().ceil().exp2()
            codes = (rows / step).round()
            codes = torch.where(rows.abs() == largest, 127 * rows.sign(), codes)
            weights[name] = (codes * step).to(weight.dtype)
    return checkpoint(folder, weights, json.loads((MODEL / "config.json").read_text()))


def checkpoint(folder: Path, weights: dict[str, Tensor], config: dict[str, Any]) -> Path:
    """Write a checkpoint with the demo's tokenizer."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    weights = {name: weight.contiguous() for name, weight in weights.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, folder / name)
    return folder


def gpt_oss(folder: Path) -> tuple[Path, Path]:
    """Checkpoints of a random gpt-oss: with MXFP4 experts, and with the same numbers in bf16."""
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=2048, hidden_size=128, intermediate_size=96, head_dim=64,
        num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2, num_local_experts=8,
        num_experts_per_tok=4, max_position_embeddings=1024, eos_token_id=0, bos_token_id=0,
        pad_token_id=0, dtype="bfloat16",
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "beta_fast": 32.0,
            "beta_slow": 1.0, "original_max_position_embeddings": 512, "truncate": False,
        },
    )  # fmt: skip
    weights = GptOssForCausalLM(config).to(torch.bfloat16).state_dict()
    for name, weight in weights.items():
        if "norm" not in name:
            weight.normal_(std=1.0 if "embed" in name else 0.3)
    packed, plain = {}, {}
    for name, weight in weights.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            packed[name] = plain[name] = weight
            continue
        q = quantize_weight(weight.transpose(1, 2).contiguous(), "mxfp4_w4a16")
        packed[f"{name}_blocks"] = q.data.unflatten(2, (-1, 16))
        packed[f"{name}_scales"] = q.scale
        plain[name] = dequantize_weight(q, "mxfp4_w4a16").to(torch.bfloat16).transpose(1, 2)
    described = {**config.to_dict(), "architectures": ["GptOssForCausalLM"]}
    quantized = {**described, "quantization_config": {"quant_method": "mxfp4"}}
    return (
        checkpoint(folder / "packed", packed, quantized),
        checkpoint(folder / "plain", plain, described),
    )
