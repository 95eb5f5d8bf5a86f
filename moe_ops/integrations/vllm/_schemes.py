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


def scheme_of_keys(weight_key: Any, activation_key: Any) -> Scheme | None:
    """Return the scheme of two ``QuantKey`` or None; None: no scheme of this plug-in."""
    if weight_key is None and activation_key is None:
        return UNQUANTIZED
    if weight_key is None or not _is_plain(weight_key):
        return None
    scale = weight_key.scale
    if activation_key is None:
        mxfp4 = (weight_key.dtype, scale.dtype, tuple(scale.group_shape))
        return SCHEMES["mxfp4_w4a16"] if mxfp4 == (torch.uint8, torch.uint8, (1, 32)) else None
    of_rows = activation_key.scale
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
    tensors = {
        f"{name}{i}_{kind}": getattr(config, f"{name}{i}_{kind}")
        for name, kind in (("w", "scale"), ("w", "bias"), ("a", "scale"))
        for i in (1, 2)
    }
    activation = scheme.activation
    for name in ("w1_scale", "w2_scale"):
        given = scheme.weight is not None
        tensors[name] = weight_scales(tensors[name], num_local_experts, scheme) if given else None
    for name in ("a1_scale", "a2_scale"):
        given = activation is not None and activation.static
        tensors[name] = tensors[name].reshape(1) if given else None
    return FusedMoEQuantConfig(scheme, **tensors)


def _scheme(config: Any) -> Scheme:
    """Return the scheme of a vLLM configuration."""
    weight, rows, block = config.weight_quant_dtype, config.quant_dtype, config.block_shape
    if weight is None and rows is None:
        return UNQUANTIZED
    if weight == "mxfp4":
        return SCHEMES["mxfp4_w4a16"]
    if weight == torch.int8 and rows is None and block is None and config.w1_zp is None:
        return SCHEMES["int8_w8a16"]
    element = ELEMENTS.get(weight)
    if element is None or rows != weight:
        raise NotImplementedError(f"quant_config must be W8A8 or MXFP4, got {weight} and {rows}")
    if block is not None:
        return get_scheme(block_name(element, tuple(block)))
    if config.per_act_token_quant:
        return SCHEMES[f"{element}_channel"]
    return SCHEMES[f"{element}_tensor" + ("" if config.a1_scale is None else "_static")]
