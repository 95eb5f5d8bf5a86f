"""The compressed-tensors format: how schemes are written so that vLLM and others read them.

A scheme that the format cannot express is written in this library's own form: tensors as they are
stored, named ``weight``, ``weight_scale``, ``weight_zero_point``, ``weight_scale_2``,
``weight_chan_scale``, ``input_scale`` and ``bias``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from moe_ops.loading.names import SUFFIX
from moe_ops.scheme import Group, Quant, Scheme
from moe_ops.scheme.values import ELEMENTS, SCALE_BITS

INTEGERS = ("int4", "int8", "uint8")
MICROSCALED = {
    Quant(ELEMENTS["fp4"], Group(1, 16), "e4m3", global_scale=True): "nvfp4-pack-quantized",
    Quant(ELEMENTS["fp4"], Group(1, 32), "e8m0"): "mxfp4-pack-quantized",
    Quant(ELEMENTS["fp8"], Group(1, 32), "e8m0"): "mxfp8-quantized",
}
"""Formats of weights with one-byte scales; the format has no other operands with such scales."""
BY_ELEMENT = {
    "fp8": ("naive-quantized", "float-quantized"),
    "int8": ("pack-quantized", "int-quantized"),
    "uint8": ("pack-quantized", None),
    "int4": ("pack-quantized", None),
}
"""Formats of weights with wider scales: if activations are not quantized, and if they are.

``int-quantized`` has one number per entry, without an offset.
"""


def format_of(scheme: Scheme) -> str | None:
    """Return the name of the format of compressed-tensors that expresses a scheme; None: none does.

    The format has no word for dynamic scales that are powers of two (``pow2``): others who read
    such a scheme compute scales of activations that are not rounded up.
    """
    weight, activation = scheme.weight, scheme.activation
    if weight is None or not (activation is None or _is_expressed(activation)):
        return None
    if SCALE_BITS[weight.scale] == 8:
        return MICROSCALED.get(weight)
    form = BY_ELEMENT.get(weight.element.name, (None, None))[activation is not None]
    blocks_of_words = form == "pack-quantized" and weight.granularity == "block"
    return None if blocks_of_words else form  # blocks of integers are not packed


def _is_expressed(activation: Quant) -> bool:
    """Whether the format describes activations: 8 bits with float32 scales, or one-byte scales."""
    plain = activation.element.bits == 8 and SCALE_BITS[activation.scale] > 8
    return plain or activation in MICROSCALED


def config_group(scheme: Scheme, targets: list[str]) -> dict[str, Any]:
    """Return the entry of ``config_groups`` for modules quantized to a scheme."""
    weight, activation = scheme.weight, scheme.activation
    return {
        "targets": targets,
        "weights": _arguments(weight, is_weight=True),
        "input_activations": None if activation is None else _arguments(activation),
        "output_activations": None,
        "format": format_of(scheme),
    }


def _arguments(quant: Quant | None, *, is_weight: bool = False) -> dict[str, Any]:
    """Return the ``QuantizationArgs`` of an operand."""
    if quant is None:
        raise ValueError("scheme must quantize weights, got none")
    kind, (rows, cols) = quant.granularity, quant.group
    operand: dict[str, Any] = {
        "num_bits": quant.element.bits,
        "type": "int" if quant.element.name in INTEGERS else "float",
        "symmetric": not quant.zero_point,
        "dynamic": not (is_weight or quant.static),
        "strategy": "token" if kind == "channel" and not is_weight else kind,
    }
    if kind == "group":
        operand["group_size"] = cols
    elif kind == "block":
        operand["block_structure"] = [rows, cols]
    if quant.global_scale:
        operand["strategy"] = "tensor_group"
        operand["dynamic"] = False if is_weight else "local"
    if quant.scale == "e8m0":
        operand["scale_dtype"] = "torch.uint8"
    return operand


def quantization_config(groups: Mapping[Scheme, list[str]], ignore: list[str]) -> dict[str, Any]:
    """Return the ``quantization_config`` of a model.

    Args:
        groups: for each scheme, the patterns of the names of its linear layers.
        ignore: names of the linear layers that are not quantized.
    """
    formats = {format_of(scheme) for scheme in groups}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "config_groups": {
            f"group_{i}": config_group(scheme, targets)
            for i, (scheme, targets) in enumerate(groups.items())
        },
        "ignore": ignore,
    }


def stored_projection(scheme: Scheme, tensors: Mapping[str, Tensor], k: int) -> dict[str, Tensor]:
    """Return one projection's tensors by the ends of their names.

    Readers divide by global scales. The stored reciprocal is exact: scales are reciprocals of
    float32 numbers themselves, and for every such ``y = 1 / x`` holds ``1 / (1 / y) == y``.

    Args:
        scheme: the scheme.
        tensors: by kind: ``weight (N, K)`` as stored, ``scale``, ``zero_point (N, G)`` unpacked,
            ``global_scale ()``, ``channel_scale (N,)``, ``input_scale ()``, ``bias (N,)``.
        k: K of the weight.
    """
    entries = {SUFFIX[kind]: x for kind, x in tensors.items()}
    form, weight = format_of(scheme), scheme.weight
    if form is None or weight is None:
        return entries
    if form == "pack-quantized":
        n, data = tensors["weight"].shape[0], entries.pop("weight").view(torch.uint8)
        if weight.element.name == "int8":
            data = data ^ 128  # the offset of unsigned codes
        entries["weight_packed"] = _as_words(data)
        entries["weight_shape"] = torch.tensor([n, k], device="cpu")
        if "zero_point" in tensors:
            entries["weight_zero_point"] = _packed_rows(tensors["zero_point"], weight.element.bits)
    elif form.endswith("pack-quantized"):
        entries["weight_packed"] = entries.pop("weight")
    scale = entries["weight_scale"]
    if scale.dim() <= 1:
        entries["weight_scale"] = scale.reshape((-1, 1) if weight.per_row else (1,))
    if "global_scale" in tensors:
        entries["weight_global_scale"] = (1 / entries.pop("weight_scale_2")).reshape(1)
    if "input_scale" in tensors:
        scale = entries.pop("input_scale")
        is_global = scheme.activation is not None and scheme.activation.global_scale
        if is_global:
            entries["input_global_scale"] = (1 / scale).reshape(1)
        else:
            entries["input_scale"] = scale.reshape(1)
    return entries


def _as_words(data: Tensor) -> Tensor:
    """Bytes ``(N, B)`` as int32 words, the lowest bits first; a view if memory allows."""
    lacking = -data.shape[1] % 4
    whole = (pad(data, (0, lacking)) if lacking else data).flatten().contiguous()
    aligned = whole if whole.storage_offset() % 4 == 0 else whole.clone()
    return aligned.view(torch.int32).view(data.shape[0], -1)


def _packed_rows(codes: Tensor, bits: int) -> Tensor:
    """Codes ``(N, G)`` as int32 words along N: ``(ceil(N * bits / 32), G)``."""
    by_column = codes.t()
    if bits == 4:
        even = pad(by_column, (0, by_column.shape[1] % 2))
        by_column = even[:, 0::2] | even[:, 1::2] << 4
    return _as_words(by_column).t().contiguous()
