"""What a layer of vLLM asks for, as schemes of this library: by the arguments of selections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_ops.integrations._engines import attribute_of
from moe_ops.integrations.vllm._interface import ORACLES
from moe_ops.scheme import SCHEMES, Scheme, get_scheme

Arguments = Mapping[str, Any]
"""Arguments of a function of vLLM by their names."""


def group_schemes(arguments: Arguments) -> list[Scheme]:
    """Return the scheme of int4 or int8 weights with a scale per group along K, or per row.

    Raises:
        NotImplementedError, ValueError: an order of columns, zero points, or sizes of groups that
            are not served.
    """
    config, kind = arguments["quant_config"], type(arguments["quant_config"]).__name__
    bits: Any = getattr(config, "num_bits", getattr(config, "weight_bits", None))
    if getattr(config, "desc_act", False) or getattr(config, "actorder", None) == "group":
        raise NotImplementedError("columns in the order of activations are not supported")
    zero_point = bool(arguments["may_have_zp"])
    if zero_point and kind == "AutoGPTQConfig":
        raise NotImplementedError("zero points of GPTQ are not supported")
    element = {4: "int4_w4a16", 8: "int8_w8a16"}.get(bits)
    if element is None:
        raise NotImplementedError(f"weights of {bits} bits are not supported")
    size = config.group_size
    if size is not None and size > 0:
        layer = arguments["config"]
        sizes = (layer.hidden_dim, layer.intermediate_size_per_partition)
        while kind == "MoeWNA16Config" and size > 32 and any(n % size for n in sizes):
            size //= 2  # as its method does
        if any(n % size for n in sizes):
            raise NotImplementedError(
                f"hidden and intermediate sizes must be multiples of the group {size}, got {sizes}"
            )
        return [get_scheme(f"{element}_g{size}" + "_zp" * zero_point)]
    if kind == "QuantizationArgs" or zero_point or bits == 8:
        raise NotImplementedError(
            "integers with one scale per row are not supported in this format"
        )
    return [SCHEMES["int4_w4a16_channel"]]


def mxfp4_schemes(arguments: Arguments) -> list[Scheme]:
    """Return the schemes of MXFP4 weights under the activations that a checkpoint asks for."""
    asked = None
    if "activation_key" in arguments:
        key = arguments["activation_key"]
        resolved = attribute_of(f"{ORACLES}.mxfp4", "_resolve_activation_key")  # the user's wish
        asked = of_activation(key if resolved is None else resolved(key))
    return [x for x in (asked, SCHEMES["mxfp4_w4a16"]) if x is not None]


def of_activation(key: Any) -> Scheme | None:
    """Return the scheme of MXFP4 weights under activations that a ``QuantKey`` describes.

    fp8 activations are quantized per token, in place of blocks or groups: that loses least beside
    the given sizes. None: weights alone are quantized, as vLLM does for keys without kernels.
    """
    if key is None or "float8" not in str(key.dtype) or key.scale.static:
        return None
    return SCHEMES["mxfp4_w4a8_token"]
