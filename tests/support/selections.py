"""Configurations to select kernels for, and tensors that fit them."""

from dataclasses import replace

import torch

import moe_ops
from moe_ops import FusedMoEConfig, RoutingMethodType
from moe_ops.pipeline import FusedMoEActivationFormat as Format

STANDARD = FusedMoEConfig(8, 2, 64, 48, 8, "silu", "cpu", RoutingMethodType.Renormalize)
BATCHED = replace(STANDARD, max_num_tokens=16)
FP8 = moe_ops.get_scheme("fp8_block128")


def reason(cls, config, scheme=moe_ops.SCHEMES["unquantized"], wanted=Format.Standard):
    keys = (scheme.weight, scheme.activation)
    supported, text = cls.is_supported_config(cls, config, *keys, wanted)
    assert supported is (text is None)
    return text


def layer_inputs(config, scheme, device="cpu", tokens=6):
    """Tokens, stored weights, routing, and the configuration that belongs to the weights."""
    generator = torch.Generator().manual_seed(0)
    e, h, i = config.num_experts, config.hidden_dim, config.intermediate_size
    shapes = ((tokens, h), (e, 2 * i, h), (e, h, i), (tokens, e))
    x, w1, w2, logits = (
        torch.randn(s, generator=generator).to(device, config.in_dtype) for s in shapes
    )
    q1, q2 = (moe_ops.quantize_weight(w, scheme) for w in (w1, w2))
    quant = moe_ops.FusedMoEQuantConfig.from_weights(scheme, q1, q2)
    routing = moe_ops.fused_topk(x, logits, config.experts_per_token, True)
    return (x, q1.data, q2.data, *routing), quant
