"""vLLM's quantization keys and configurations as schemes of this library.

vLLM describes each operand by a ``QuantKey`` when it chooses experts. The experts then get a
``FusedMoEQuantConfig`` with the scales. The configuration decides what is computed: vLLM makes
weight-only configurations for some layers whose keys have quantized activations.
"""

from __future__ import annotations

from typing import Any

import torch

from moe_ops.integrations._engines import block_name, weight_scales
from moe_ops.scheme import SCHEMES, UNQUANTIZED, FusedMoEQuantConfig, Scheme, get_scheme

ELEMENTS = {torch.float8_e4m3fn: "fp8", torch.int8: "int8"}
TENSOR, TOKEN, CHANNEL = (-1, -1), (1, -1), (-1, 1)
"""Group shapes, as vLLM writes them: one scale for all, per row of activations, of weights."""
W8A8 = {
    ("fp8", CHANNEL, TOKEN, False): "fp8_channel",
    ("fp8", TENSOR, TOKEN, False): "fp8_channel",
    ("fp8", TENSOR, TENSOR, False): "fp8_tensor",
    ("fp8", TENSOR, TENSOR, True): "fp8_tensor_static",
    ("int8", CHANNEL, TOKEN, False): "int8_channel",
}
"""Schemes by element, groups of weights and activations, and whether activation scales are given.
Other group shapes are blocks."""

WEIGHTS = {
    ("mxfp4", None): "mxfp4_w4a16",
    ("mxfp4", "fp8"): "mxfp4_w4a8_token",
    ("mxfp8", None): "|fp8:1x32:e8m0",
    ("nvfp4", None): "nvfp4_w4a16",
    ("int4", "fp8"): "int4_w4a8_g128",
}
"""Schemes by what vLLM calls the element of weights, and of activations: None, or fp8 per token."""


def scheme_of_keys(weight_key: Any, activation_key: Any) -> Scheme | None:
    """Return the scheme of two ``QuantKey`` or None; None: no scheme of this plug-in.

    A `Scheme` in place of the first one is returned: `_factories` asks for layers by schemes.
    """
    if isinstance(weight_key, Scheme):
        return weight_key
    if weight_key is None and activation_key is None:
        return UNQUANTIZED
    if weight_key is None or activation_key is None or not _is_plain(weight_key):
        return None
    scale, of_rows = weight_key.scale, activation_key.scale
    element = ELEMENTS.get(weight_key.dtype)
    if not _is_plain(activation_key) or activation_key.dtype != weight_key.dtype:
        return None
    if element is None or {scale.dtype, of_rows.dtype} != {torch.float32} or not scale.static:
        return None
    weight, rows = tuple(scale.group_shape), tuple(of_rows.group_shape)
    if min(weight) > 1 and rows[0] == 1 and rows[1] > 1 and not of_rows.static:
        try:
            return get_scheme(block_name(element, weight))
        except ValueError:  # sizes that are not powers of two
            return None
    name = W8A8.get((element, weight, rows, of_rows.static))
    return None if name is None else SCHEMES[name]


def _is_plain(key: Any) -> bool:
    """Whether numbers have one scale each, and no zero point."""
    return key.scale2 is None and key.symmetric


def library_config(config: Any, num_local_experts: int) -> FusedMoEQuantConfig:
    """Return a ``FusedMoEQuantConfig`` of vLLM as this library's, on the same memory.

    Args:
        config: vLLM's.
        num_local_experts: El.

    Raises:
        NotImplementedError: a configuration of another kind.
    """
    scheme = _scheme(config)
    tensors = {f"w{i}_bias": getattr(config, f"w{i}_bias") for i in (1, 2)}
    weight = scheme.weight
    for i in (1, 2):
        scale, zero_point, factor, of_rows = (
            getattr(config, name.format(i))
            for name in ("w{}_scale", "w{}_zp", "g{}_alphas", "a{}_scale")
        )
        if weight is not None:
            tensors[f"w{i}_scale"] = weight_scales(scale, num_local_experts, scheme)
            tensors[f"w{i}_zp"] = zero_point if weight.zero_point else None
        if weight is not None and weight.channel_scale:
            tensors[f"g{i}_alphas"] = factor.reshape(num_local_experts, -1)
        elif weight is not None and weight.global_scale:
            tensors[f"w{i}_gscale"] = factor
        if scheme.input_scale_names:
            tensors[f"a{i}_scale"] = of_rows.reshape(1)
    return FusedMoEQuantConfig(scheme, **tensors)


def _scheme(config: Any) -> Scheme:
    """Return the scheme of a vLLM configuration."""
    weight, rows, block = config.weight_quant_dtype, config.quant_dtype, config.block_shape
    if weight is None and rows is None:
        return UNQUANTIZED
    if rows is None and weight in ("int4", torch.int8):
        return _integer_scheme("int4_w4a16" if weight == "int4" else "int8_w8a16", config)
    token = rows == torch.float8_e4m3fn and config.per_act_token_quant
    name = WEIGHTS.get((weight, "fp8" if token else rows))
    if name is not None:
        return get_scheme(name)
    element = ELEMENTS.get(weight)
    if element is None or rows != weight:
        raise NotImplementedError(
            f"quant_config must be one that this plug-in knows, got {weight} and {rows}"
        )
    if block is not None:
        return get_scheme(block_name(element, tuple(block)))
    if config.per_act_token_quant:
        return SCHEMES[f"{element}_channel"]
    return SCHEMES[f"{element}_tensor" + ("" if config.a1_scale is None else "_static")]


def _integer_scheme(name: str, config: Any) -> Scheme:
    """Return the scheme of integer weights with a scale per group along K, or per row."""
    if config.block_shape is None:
        return SCHEMES["int4_w4a16_channel" if name == "int4_w4a16" else name]
    return get_scheme(f"{name}_g{config.block_shape[1]}" + "_zp" * (config.w1_zp is not None))
