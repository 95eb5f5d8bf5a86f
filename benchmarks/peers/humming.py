"""The layer benchmark's calls of Humming, whose GEMMs run as in vLLM's indexed experts."""

from __future__ import annotations

import json
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_ops.bench.problems import Call, Experts, Inputs
from peers import vllm
from peers.installed import lacks, package

_BF16 = {"input_quant_mode": "none"}
_TOKENS = {"input_quant_mode": "dynamic_token", "input_scale_dtype": "float32"}
_GROUPS = {
    "input_quant_mode": "dynamic_group",
    "input_scale_dtype": "float32",
    "input_scale_group_size": 128,
}
_FP8 = "float8e4m3"
SCHEMAS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "int4_w4a16_g128": ({"b_dtype": "uint4", "weight_scale_group_size": 128}, _BF16),
    "mxfp4_w4a16": (
        {"b_dtype": "float4e2m1", "bs_dtype": "float8e8m0", "weight_scale_group_size": 32},
        _BF16,
    ),
    "int8_w8a16": ({"b_dtype": "uint8"}, _BF16),
    "int8_channel": ({"b_dtype": "uint8"}, {"a_dtype": "int8", **_TOKENS}),
    "fp8_channel": ({"b_dtype": _FP8}, {"a_dtype": _FP8, **_TOKENS}),
    "fp8_block128": (
        {"b_dtype": _FP8, "weight_scale_group_size": 128, "weight_scale_group_size_n": 128},
        {"a_dtype": _FP8, **_GROUPS},
    ),
}
"""Scheme -> arguments of Humming's schemas of weights and of inputs."""
SILU_AND_MUL = {"activation_type": "binary_split", "activation_impl": "a / (1.f + expf(-a)) * b"}
"""The activation that Humming compiles into the kernel that reads the product of GEMM 1."""
COMPUTE = {"use_batch_invariant": False, "use_f16_accum": False, "gemm_type": "indexed"}

PADDED = {"pad_n_to_multiple": 256, "pad_k_to_multiple": 128}
"""Sizes to which vLLM pads weights for Humming."""


def missing() -> str | None:
    """What is missing: Humming, or vLLM's operators around its GEMMs."""
    if package("humming"):
        return "the package humming (humming-kernels)"
    return lacks("humming", "humming.forward") or vllm.missing(*vllm.TRITON)


def tensors_of(weight: Any) -> dict[str, Tensor]:
    """A weight in Humming's layout before it is repacked: codes in int32 words, and scales.

    See `vllm.codes_and_scales` for the codes. A float32 scale of a row is cast to bf16, the dtype
    that Humming takes.

    Args:
        weight: a `moe_ops.scheme.QTensor`.
    """
    codes, scale = vllm.codes_and_scales(weight)
    if scale.dtype == torch.float32 and scale.numel() == len(codes) * codes.shape[1]:
        scale = scale.reshape(*codes.shape[:2], 1).to(torch.bfloat16)
    return {"weight": codes.view(torch.int32), "weight_scale": scale.contiguous()}


def tuned(layer: Any, slots: int) -> dict[str, Any]:
    """Humming's choice of a kernel for a number of slots; the other kernels are not compiled."""
    return import_module("humming.tune").get_heuristics_config(layer, shape_m=slots, **COMPUTE)


class Gemm(NamedTuple):
    """One expert GEMM: Humming's configuration, and the arguments of its calls."""

    layer: Any
    block_m: int
    arguments: dict[str, Any]

    def process(self, x: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
        """Rows as the GEMM reads them (after the activation, quantized), and their scales."""
        run = import_module("humming.forward").may_process_input
        rows, of_groups, of_tokens = run(self.layer, inputs=x, **options)
        return rows, of_tokens if of_groups is None else of_groups

    def __call__(self, rows: Tensor, scale: Tensor | None, **options: Any) -> Tensor:
        """``(slots, N)``, a row for each slot."""
        run = import_module("humming.forward").humming_forward
        return run(self.layer, inputs=rows, input_scale=scale, **self.arguments, **options)


def gemm(scheme: str, weight: Any, slots: int) -> Gemm:
    """A GEMM with a repacked weight and the kernel for a number of slots."""
    schemas = import_module("humming.schema")
    of_weight, of_inputs = SCHEMAS[scheme]
    tensors = tensors_of(weight)
    count, rows = tensors["weight"].shape[:2]
    columns = tensors["weight"].shape[2] * (8 if weight.data.dtype == torch.uint8 else 4)
    layer, tensors = import_module("humming.transform").prepare_and_transform_humming_tensors(
        tensors,
        shape_n=rows,
        shape_k=columns,
        weight_schema=schemas.HummingWeightSchema(**of_weight),
        input_schema=schemas.HummingInputSchema(**of_inputs),
        num_experts=count,
        torch_dtype=torch.bfloat16,
        **PADDED,
    )
    chosen = tuned(layer, slots)
    locks = torch.zeros(2048, dtype=torch.int32, device=weight.data.device)
    configs = {"compute_config": json.dumps(COMPUTE), "tuning_config": json.dumps(chosen)}
    arguments = {**tensors, **configs, "locks": locks, "valid_shape_m": slots}
    return Gemm(layer, chosen["block_shape"][0], arguments)


def humming(experts: Experts, inputs: Inputs) -> Call:
    """Humming's GEMMs between vLLM's alignment of slots and vLLM's sum, as vLLM 0.33 runs them."""
    ids, weights, top_k = inputs.topk_ids, inputs.topk_weights, inputs.topk_ids.shape[1]
    first, second = (gemm(experts.scheme.name, weight, ids.numel()) for weight in experts.stored)
    align = import_module(f"{vllm.LAYERS}.moe_align_block_size").moe_align_block_size
    add = import_module(f"{vllm.LAYERS}.moe_fused_mul_sum").moe_fused_mul_sum
    names = ("sorted_ids", "expert_ids", "num_tokens_padded")

    def aligned(block_m: int) -> dict[str, Tensor]:
        plan = align(ids, block_m, len(experts.w1), ignore_invalid_experts=True)
        return dict(zip(names, plan, strict=True))

    def call() -> Tensor:
        plan = aligned(first.block_m)
        h = first(*first.process(inputs.x), top_k=top_k, **plan)
        if second.block_m != first.block_m:
            plan = aligned(second.block_m)
        y = second(*second.process(h, **SILU_AND_MUL), top_k=1, **plan)
        return add(y.view(*ids.shape, -1), weights)

    return call
