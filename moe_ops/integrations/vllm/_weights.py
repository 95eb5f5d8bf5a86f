"""Weights of vLLM's layers in this library's forms: the steps of vLLM that convert them.

A method of vLLM replaces the parameters of its layer by what a step returns. Packed weights take
the memory of the parameters, one tensor after the other. (GPTQ's method itself makes a copy of
both weights.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops.integrations.vllm._choice import Place
from moe_ops.integrations.vllm._experts import weight_of_layer
from moe_ops.integrations.vllm._requests import Arguments
from moe_ops.loading.derived import channel_scales
from moe_ops.loading.stored import awq_codes
from moe_ops.scheme.formats import join_nibbles
from moe_ops.tensors import QTensor

TOGETHER = 2**24
"""Bytes of AWQ's words that are converted at once. While vLLM loads a model, its allocator does not
find freed blocks of 1 to 10 MB again, so that a block for each expert would fill the GPU."""


def data_of(x: Tensor | None) -> Tensor | None:
    """Return a tensor that is no parameter, on the same memory."""
    return None if x is None else x.data


def formed(
    place: Place,
    which: str,
    data: Tensor,
    scale: Tensor | None,
    zero_point: Tensor | None = None,
    factor: Tensor | None = None,
) -> QTensor:
    """Return ``w13`` or ``w2`` in the form that its GPU reads."""
    q = QTensor(data.data, data_of(scale), data_of(zero_point), data_of(factor))
    return weight_of_layer(which, q, place.scheme, place.moe_config)


def groups(place: Place, arguments: Arguments) -> tuple[Tensor | None, ...]:
    """int4 and int8 weights with a scale for each group along K, with or without zero points."""
    is_awq = type(arguments["quant_config"]).__name__ == "AutoAWQConfig"  # its order of columns
    plain = awq_weight if is_awq else rows_first
    bits, qs = place.scheme.weight.element.bits, []  # type: ignore[union-attr]
    for which in ("w13", "w2"):
        zeros = data_of(arguments[f"{which}_qzeros"])
        q = plain(arguments[which].data, arguments[f"{which}_scale"].data, zeros, bits)
        zero_point = q.zero_point if place.scheme.weight.zero_point else None  # type: ignore[union-attr]
        qs.append(formed(place, which, q.data, q.scale, zero_point))
    (w13, scale13, zero13, _), (w2, scale2, zero2, _) = qs
    biases = (data_of(arguments["w13_bias"]), data_of(arguments["w2_bias"]))
    return w13, w2, scale13, scale2, zero13, zero2, None, None, *biases


def rows_first(words: Tensor, scale: Tensor, zeros: Tensor | None, bits: int) -> QTensor:
    """Return weights whose words hold numbers along K, ``(E, N, ..)``.

    Words of zero points hold numbers along N, ``(E, N / (32 / bits), G)``.
    """
    if zeros is not None and zeros.dtype == torch.int32:
        zeros = zeros.contiguous().view(torch.uint8).unflatten(2, (-1, 4))
        zeros = zeros.transpose(2, 3).flatten(1, 2).contiguous()
    return QTensor(words.contiguous().view(torch.uint8), scale, zeros)


def awq_weight(words: Tensor, scale: Tensor, zeros: Tensor | None, bits: int) -> QTensor:
    """Return weights of AWQ, whose words ``(E, K, N / 8)`` hold numbers along N in AWQ's order.

    The weights take the memory of the words.
    """
    experts, k, width = words.shape
    data = words.contiguous().view(torch.uint8).view(experts, width * 8, k // 2)
    at_once = max(1, TOGETHER // (k * width * words.itemsize))
    for source, target in zip(words.split(at_once), data.split(at_once), strict=True):
        target.copy_(join_nibbles(awq_codes(source, bits).mT, 2))
    zero_point = None if zeros is None else join_nibbles(awq_codes(zeros, bits).mT, 1)
    return QTensor(data, scale.transpose(1, 2).contiguous(), zero_point)


def int4_under_fp8(place: Place, arguments: Arguments) -> tuple[Tensor | None, ...]:
    """int4 weights whose float group scales become e4m3 times one factor per row."""
    qs = []
    for which in ("w13", "w2"):
        words, scales = arguments[f"{which}_weight"].data, arguments[f"{which}_weight_scale"].data
        experts, n, _ = scales.shape
        parts = channel_scales(scales.flatten(0, 1))
        scale = parts["scale"].unflatten(0, (experts, n))
        factor = parts["channel_scale"].unflatten(0, (experts, n))
        data = words.contiguous().view(torch.uint8)
        qs.append(formed(place, which, data, scale, None, factor))
    (w13, scale13, _, factor13), (w2, scale2, _, factor2) = qs
    return w13, w2, scale13, scale2, factor13, factor2, None, None


def nvfp4(place: Place, arguments: Arguments) -> tuple[Tensor | None, ...]:
    """NVFP4 weights; activations stay in 16 bits, so that their scales are dropped.

    vLLM passes the factors of gate alone.
    """
    made: list[Tensor | None] = []
    factors = {"w13": gate_and_up(arguments), "w2": arguments["w2_scale_2"]}
    for which, factor in factors.items():
        data, scale = arguments[which], arguments[f"{which}_scale"]
        q = formed(place, which, data, scale, None, factor)
        made += [q.data, q.scale, q.global_scale, None]
    return tuple(made)


def gate_and_up(arguments: Arguments) -> Tensor:
    """Return the factors of NVFP4's first weight: ``(E, 2)`` if the layer has both, else ``(E,)``.

    The shape does not depend on values: vLLM copies later weights into the tensors of the first.
    """
    layer, of_gate = arguments["layer"], arguments["w13_scale_2"]
    pairs = getattr(layer, "w13_weight_scale_2", None)  # ModelOpt's
    if pairs is None and hasattr(layer, "w13_weight_global_scale"):  # compressed-tensors'
        pairs = 1 / layer.w13_weight_global_scale
    if pairs is None or pairs.dim() != 2 or pairs.shape[1] != 2:  # one column: no gate
        return of_gate
    return pairs.data.contiguous()


def mxfp4(place: Place, arguments: Arguments) -> tuple[Tensor | None, ...]:
    """MXFP4 weights, with or without biases."""
    w13 = formed(place, "w13", arguments["w13_weight"], arguments["w13_weight_scale"])
    w2 = formed(place, "w2", arguments["w2_weight"], arguments["w2_weight_scale"])
    biases = (data_of(arguments["w13_bias"]), data_of(arguments["w2_bias"]))
    return w13.data, w2.data, w13.scale, w2.scale, *biases


def mxfp8(place: Place, arguments: Arguments) -> tuple[Tensor | None, ...]:
    """MXFP8 weights; activations stay in 16 bits."""
    w13 = formed(place, "w13", arguments["w13"], arguments["w13_scale"])
    w2 = formed(place, "w2", arguments["w2"], arguments["w2_scale"])
    return w13.data, w2.data, w13.scale, w2.scale
