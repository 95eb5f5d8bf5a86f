"""Layers of vLLM on stand-ins: keys, configurations, operands, and a call as vLLM makes it."""

from __future__ import annotations

import torch
import vllm_stand_ins as vllm

from moe_ops import FusedMoEQuantConfig, fused_experts, quantize_weight
from moe_ops.scheme import get_scheme

SILU = vllm.MoEActivation.SILU
FP8, INT8 = torch.float8_e4m3fn, torch.int8


def key(dtype, shape, static=True, scale=torch.float32):
    return vllm.QuantKey(dtype, vllm.ScaleDesc(scale, static, shape))


KEYS = {
    "unquantized": (None, None),
    "fp8_block128": (key(FP8, (128, 128)), key(FP8, (1, 128), static=False)),
    "fp8_block32": (key(FP8, (32, 32)), key(FP8, (1, 128), static=False)),
    "fp8_channel": (key(FP8, (-1, 1)), key(FP8, (1, -1), static=False)),
    "fp8_tensor": (key(FP8, (-1, -1)), key(FP8, (-1, -1), static=False)),
    "fp8_tensor_static": (key(FP8, (-1, -1)), key(FP8, (-1, -1))),
    "int8_channel": (key(INT8, (-1, 1)), key(INT8, (1, -1), static=False)),
}
"""vLLM's keys of each scheme that the plug-in serves."""


def layer(num_experts=4, k=2, hidden=64, width=64, activation=SILU, local=None, **more):
    local = num_experts if local is None else local
    return vllm.FusedMoEConfig(num_experts, k, hidden, width, local, activation, **more)


def exchange(**flags):
    return vllm.FusedMoEParallelConfig(use_all2all_kernels=True, **flags)


AG, BATCH = exchange(use_ag_rs_all2all_kernels=True), exchange(use_batched_activation_format=True)


def of_engine(name, q1, q2, biases):
    """vLLM's configuration for quantized weights, with scales in vLLM's shapes."""
    scheme = get_scheme(name)
    activation, tensors = scheme.activation, {"w1_bias": biases[0], "w2_bias": biases[1]}
    if scheme.weight is None:
        return vllm.FusedMoEQuantConfig(**tensors)
    tensors |= {"w1_scale": q1.scale, "w2_scale": q2.scale}
    if name == "mxfp4_w4a16":
        return vllm.FusedMoEQuantConfig("mxfp4", **tensors)
    dtype = scheme.weight.dtype
    if activation is None:
        return vllm.FusedMoEQuantConfig(dtype, **tensors)
    if activation.static:
        tensors |= {"a1_scale": torch.tensor(0.01), "a2_scale": torch.tensor([0.02])}
    return vllm.FusedMoEQuantConfig(
        dtype, dtype, scheme.block_shape, activation.per_row, **tensors
    )  # fmt: skip


def problem(name, seed=0, tokens=5, num_experts=4, k=2, hidden=64, width=64, gated=True):
    """A layer's operands: ``(x, topk_weights, topk_ids, q1, q2, biases)``."""
    torch.manual_seed(seed)
    x = torch.randn(tokens, hidden)
    weights = torch.rand(tokens, k)
    ids = torch.rand(tokens, num_experts).topk(k).indices.to(torch.int32)
    rows = (1 + gated) * width
    w1, w2 = torch.randn(num_experts, rows, hidden) / 8, torch.randn(
        num_experts, hidden, width) / 8  # fmt: skip
    biases = torch.randn(num_experts, rows), torch.randn(num_experts, hidden)
    q = [quantize_weight(w, name) for w in (w1, w2)] if name != "unquantized" else None
    return x, weights, ids, *(q or (type("Plain", (), {"data": w}) for w in (w1, w2))), biases


def served(made, x, w1, w2, topk_weights, topk_ids, expert_map=None, **changed):
    """Call experts as vLLM's modular kernel does; returns ``output``."""
    num_experts = len(w1) if expert_map is None else len(expert_map)
    sizes = (x.shape[-2], w1.shape[1], x.shape[-1], topk_ids.shape[1], num_experts, len(w1))
    first, second, shape = made.workspace_shapes(*sizes, None, made.moe_config.activation)
    output = torch.full(shape, float("nan"), dtype=made.moe_config.in_dtype)
    arguments = {
        "output": output, "hidden_states": x, "w1": w1, "w2": w2, "topk_weights": topk_weights,
        "topk_ids": topk_ids, "activation": made.moe_config.activation,
        "global_num_experts": num_experts, "expert_map": expert_map, "a1q_scale": None,
        "a2_scale": None, "workspace13": torch.empty(first), "workspace2": torch.empty(second),
        "expert_tokens_meta": None, "apply_router_weight_on_input": False, **changed,
    }  # fmt: skip
    assert made.apply(**arguments) is None
    return output


def expected(name, x, w1, w2, topk_weights, topk_ids, q, biases, **more):
    """What `fused_experts` computes on the same operands."""
    config = None
    if name != "unquantized":
        static = {"a1_scale": torch.tensor([0.01]), "a2_scale": torch.tensor([0.02])}
        given = static if "static" in name else {}
        config = FusedMoEQuantConfig.from_weights(name, *q, **given)
    return fused_experts(
        x, w1, w2, topk_weights, topk_ids, quant_config=config, w1_bias=biases[0],
        w2_bias=biases[1], **more,
    )  # fmt: skip
